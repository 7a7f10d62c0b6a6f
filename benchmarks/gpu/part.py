"""The main program of a part's process: `python -m benchmarks.gpu.part MODULE FILE
[--tiny]`.

MODULE.rows(tiny) yields rows, remarks and raw figures, each of which is written to FILE
at once as a line of JSON. The last line says how the part ended; without that line, the
process was killed.
"""

import argparse
import importlib
import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Absent, Row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with options.file.open("w", buffering=1) as file:

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")

        try:
            for said in importlib.import_module(options.module).rows(options.tiny):
                kind = (
                    "row" if isinstance(said, Row) else "remark" if isinstance(said, str) else "raw"
                )
                say(**{kind: asdict(said) if isinstance(said, Row) else said})
        except Absent as error:
            say(ending="absent", why=str(error))
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines()
            say(ending="failed", why=f"{type(error).__name__}: {text[0] if text else 'no message'}")
        else:
            say(ending="measured", why="")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Writes questions with answers, one JSON object a line: sums and differences of
numbers up to 20.

    python examples/sums.py questions.jsonl

Your own file needs the same two fields, `prompt` and `answer`.
"""

import json
import sys
from pathlib import Path

NUMBERS = range(1, 21)


def main(path: Path) -> None:
    rows = []
    for a in NUMBERS:
        for b in NUMBERS:
            rows.append({"prompt": f"What is {a} + {b}?", "answer": str(a + b)})
            if b <= a:
                rows.append({"prompt": f"What is {a} - {b}?", "answer": str(a - b)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

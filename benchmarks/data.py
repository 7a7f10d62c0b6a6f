"""Measures preparing and streaming many prompts: rows per second, and memory against
the number of rows.

    nice -n 19 .venv/bin/python benchmarks/data.py --rows 1000000 --out
    benchmarks/results/data.json

The rows are synthetic word problems of about 400 characters; one in fifty is a repeat,
one in a thousand from an evaluation set of 500. Each part is measured in a process of
its own (peak resident memory of that process), with a tenth of the rows and with all of
them, to show what grows with the rows. The reference is a bare loop that decodes each
line's JSON once.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from rich.console import Console

WORDS = 4000
EVALUATION = 500


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--out", type=Path)
    options.add_argument("--part", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.part:
        measure(given.part[0], Path(given.part[1]))
        return
    found = {"date": date.today().isoformat(), "rows": given.rows, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for rows in (given.rows // 10, given.rows):
            place = Path(folder) / str(rows)
            write(place, rows)
            for part in PARTS:
                done = subprocess.run(
                    [sys.executable, __file__, "--part", part, str(place)],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                found["parts"].setdefault(part, {})[str(rows)] = json.loads(
                    done.stdout.splitlines()[-1]
                )
                print(rows, part, found["parts"][part][str(rows)], flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def write(place: Path, rows: int) -> None:
    """Write source.jsonl and evaluation.jsonl."""
    place.mkdir()
    rng = random.Random(0)
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
        for _ in range(WORDS)
    ]
    evaluation = [" ".join(rng.choices(words, k=60)) for _ in range(EVALUATION)]
    lines(place / "evaluation.jsonl", ({"problem": text} for text in evaluation))
    last = ""

    def made():
        nonlocal last
        for n in range(rows):
            kind = rng.random()
            if kind < 0.001:
                text = f"Given: {rng.choice(evaluation)}."
            elif kind > 0.02 or not last:
                last = text = f"Problem {n}. {' '.join(rng.choices(words, k=60))}?"
            else:
                text = last
            yield {"problem": text, "answer": str(rng.randrange(10**6)), "difficulty": f"{n % 8}/8"}

    lines(place / "source.jsonl", made())


def lines(path: Path, rows) -> None:
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


# Parts, each in its own process


def reference(place: Path) -> int:
    """Decode all lines in a bare loop; return the number of rows."""
    import msgspec

    with (place / "source.jsonl").open("rb") as file:
        return sum(1 for line in file if msgspec.json.decode(line))


def prepare(place: Path) -> int:
    """Do what `megarl data prepare` does: clean, split, decontaminate, write."""
    from megarl.tasks.data.mappings import mapping_of
    from megarl.tasks.data.prepare import prepare as prepare_files

    against = [str(place / "evaluation.jsonl")]
    quiet = Console(quiet=True)
    done = prepare_files(
        str(place / "source.jsonl"),
        place / "out",
        mapping_of("polaris", {}),
        1000,
        against,
        "jsonl",
        quiet,
    )
    print(dict(done.left_out.counts))
    return done.rows


def stream(place: Path) -> int:
    """Survey and stream the prepared rows, as `megarl data inspect` and the start of a
    run do.
    """
    from megarl.tasks.data.mappings import read_own
    from megarl.tasks.data.survey import chosen, survey

    return sum(1 for _ in chosen(survey(str(place / "out" / "train.jsonl"), read_own)))


def load(place: Path) -> int:
    """Load every prompt's tokens to disk, as the start of a run does (a word-level
    tokenizer: 62 tokens per prompt).
    """
    return len(loaded(place))


def draw(place: Path) -> int:
    """Load, make the controller's state for drawing (ids, difficulties, the order of an
    epoch), and draw every prompt once.
    """
    from megarl.core.base.admission import Admission
    from megarl.core.base.contracts import TaskPrompts
    from megarl.core.controller.draw import mixture_of
    from megarl.core.journal.records import State
    from megarl.core.recipe import from_tree

    prompts = loaded(place)
    at = {p.id: n for n, p in enumerate(prompts)}
    recipe = from_tree({"data": {"tasks": {"math": {"train": "", "heldout": 1}}}})
    mixture = mixture_of(recipe, {"math": TaskPrompts(prompts, [])}, State(Admission(48, 8)))
    draws = (mixture.draw() for _ in range(len(prompts)))
    return sum(1 for drawn in draws if drawn and len(prompts[at[drawn[1].prompt_id]].tokens))


def loaded(place: Path):
    """Return the prompts of the prepared rows."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    from megarl.core.base.tokenizer import Tokenizer
    from megarl.tasks.data.mappings import read_own
    from megarl.tasks.data.prompts import load_set
    from megarl.tasks.data.survey import survey_of

    backend = Backend(models.WordLevel({"?": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    found = survey_of(str(place / "out" / "train.jsonl"), read_own)
    return load_set(
        found, lambda row: row.prompt, Tokenizer(backend, 0, place), 2048, "math", "train"
    )[0].prompts


PARTS = {"reference": reference, "prepare": prepare, "stream": stream, "load": load, "draw": draw}


def measure(part: str, place: Path) -> None:
    """Print one JSON line: rows, wall seconds, CPU seconds (the relevant ones on a
    shared machine), peak memory.
    """
    begun = time.monotonic()
    rows = PARTS[part](place)
    seconds = time.monotonic() - begun
    cpu = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "rows": rows,
                "wall_s": round(seconds, 1),
                "cpu_s": round(cpu, 1),
                "peak_mb": round(peak),
            }
        )
    )


if __name__ == "__main__":
    main()

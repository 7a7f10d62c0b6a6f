"""Measures the grader of mathematics beside plain math-verify: verdicts a second, false rights and false wrongs.

    pip install --no-deps --target .bench -r requirements/benchmarks.txt
    PYTHONPATH=.bench python -m benchmarks.math_grading

Both judge the same answers in this process, in turn: the tables of tests/unit/tasks/graders, whose verdicts are a teacher's.
math-verify gets the expected answer in a box. An answer that it does not finish within LIMIT_S of CPU counts as wrong.
"""

import json
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.tasks.graders.math import is_equal, readable
from megarl.tasks.graders.worker import TimeUp
from tests.unit.tasks.graders.math_forms import FORMS, Form
from tests.unit.tasks.graders.math_pairs import RIGHT, WRONG

RESULTS = Path(__file__).parent / "results" / "math_grading.json"
LIMIT_S = 2.0
ROUNDS = 2
GOLDS = 50_000
type Judge = Callable[[Form], bool]


@dataclass(frozen=True)
class Tally:
    """What one grader made of one table. seconds: of CPU, the first and the fastest round."""

    pairs: int
    false_rights: int
    false_wrongs: int
    first_s: float
    fastest_s: float

    @property
    def verdicts_per_s(self) -> float:
        return self.pairs / self.fastest_s


def ours(form: Form) -> bool:
    return is_equal(form.answer, form.gold, form.prompt)


def plain(form: Form) -> bool:
    """Return math-verify's verdict as its documentation asks for it."""
    from math_verify import parse, verify

    try:
        gold = parse(rf"\boxed{{{form.gold}}}", parsing_timeout=None)
        return bool(verify(gold, parse(form.answer, parsing_timeout=None), timeout_seconds=None))
    except Exception:
        return False


def limited(judge: Judge, form: Form) -> bool:
    """Return the verdict, False if it takes too long."""
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S, LIMIT_S)
    try:
        return judge(form)
    except TimeUp:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def tally(judge: Judge, forms: list[Form]) -> Tally:
    verdicts: list[bool] = []
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        verdicts = [limited(judge, form) for form in forms]
        seconds.append(time.process_time() - began)
    pairs = list(zip(forms, verdicts, strict=True))
    false_rights = sum(right and not form.right for form, right in pairs)
    false_wrongs = sum(form.right and not right for form, right in pairs)
    return Tally(len(forms), false_rights, false_wrongs, round(seconds[0], 3), round(min(seconds), 3))


def seconds_of_readable(forms: list[Form]) -> float:
    """Return the CPU seconds for `readable` of GOLDS expected answers, none of them twice in a row."""
    golds = list(dict.fromkeys(form.gold for form in forms))
    began = time.process_time()
    for n in range(GOLDS):
        readable(f"{golds[n % len(golds)]} ")
    return time.process_time() - began


def time_up(*_: Any) -> None:
    raise TimeUp


def main() -> None:
    signal.signal(signal.SIGVTALRM, time_up)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    pairs = [Form(*pair, True) for pair in RIGHT] + [Form(*pair, False) for pair in WRONG]
    tables = {"pairs": pairs, "forms": FORMS}
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    for judge in (ours, plain):
        limited(judge, Form("1", "1", True))
    for name, forms in tables.items():
        for grader, judge in (("megarl", ours), ("math-verify", plain)):
            result = tally(judge, forms)
            results[f"{name}, {grader}"] = asdict(result) | {"verdicts_per_s": round(result.verdicts_per_s)}
    results["readable_us"] = round(1e6 * seconds_of_readable(pairs + FORMS) / GOLDS)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""Measures the grader of mathematics beside plain math-verify: verdicts a second, false
rights and false wrongs.

    pip install --no-deps --target .bench -r requirements/benchmarks.txt
    PYTHONPATH=.bench python -m benchmarks.math_grading

Both judge the same answers in this process, each once: the tables of
tests/unit/tasks/graders, whose verdicts are a teacher's. math-verify gets the expected
answer in a box. An answer that it does not finish within LIMIT_S of CPU counts as
wrong.
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
GOLDS = 50_000
type Judge = Callable[[Form], bool]


@dataclass(frozen=True)
class Tally:
    """What one grader made of one table, each pair once. seconds: of CPU."""

    pairs: int
    false_rights: int
    false_wrongs: int
    seconds: float
    verdicts_per_s: int


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
    began = time.process_time()
    verdicts = [limited(judge, form) for form in forms]
    seconds = time.process_time() - began
    pairs = list(zip(forms, verdicts, strict=True))
    false_rights = sum(right and not form.right for form, right in pairs)
    false_wrongs = sum(form.right and not right for form, right in pairs)
    return Tally(
        len(forms), false_rights, false_wrongs, round(seconds, 3), round(len(forms) / seconds)
    )


def seconds_of_readable(forms: list[Form]) -> float:
    """Return the CPU seconds for `readable` of GOLDS expected answers, no two of them
    the same text.
    """
    golds = list(dict.fromkeys(form.gold for form in forms))
    texts = [golds[n % len(golds)] + " " * (n // len(golds)) for n in range(GOLDS)]
    began = time.process_time()
    for text in texts:
        readable(text)
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
            results[f"{name}, {grader}"] = asdict(tally(judge, forms))
    results["readable_us"] = round(1e6 * seconds_of_readable(pairs + FORMS) / GOLDS)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

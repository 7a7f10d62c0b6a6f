"""Measures programs graded per second, 16 at once: in bubblewrap, and as bare Python
processes without restrictions.

    python -m benchmarks.code_grading [--workers 16] [--answers 100]

An answer is a short, correct program with two tests of stdin, hence two sandboxes; or a
function with one check of a hundred calls, which also needs two sandboxes. Rounds of
all kinds take turns, three of each.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.code import Code, passed, program_of, read_tests
from megarl.tasks.graders.sandbox import Ran, Sandbox

RESULTS = Path(__file__).parent / "results" / "code_grading.json"
ANSWER = "```python\nimport sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)\n```"
TESTS = json.dumps(
    {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "30 4\n", "output": "34\n"}]}
)
FUNCTION = "```python\ndef add(a, b):\n    return a + b\n```"
CHECK = "def check(candidate):\n    for n in range(100):\n        assert candidate(n, 4) == n + 4\n"
CHECKS = json.dumps({"tests": [{"check": CHECK, "entry_point": "add"}]})
ROUNDS = 3


async def in_sandbox(answers: int, workers: int, answer: str = ANSWER, tests: str = TESTS) -> float:
    code = Code(Sandbox("bubblewrap", workers))
    began = time.perf_counter()
    verdicts = await asyncio.gather(
        *(code.check(Submission(answer, tests)) for _ in range(answers))
    )
    assert all(verdict.score > 0 for verdict in verdicts)
    return answers / (time.perf_counter() - began)


async def bare(answers: int, workers: int) -> float:
    places = asyncio.Semaphore(workers)
    program = program_of(ANSWER)
    python = str(Sandbox("rlimits", 1).python)
    assert program

    async def check() -> bool:
        for test in read_tests(TESTS):
            async with places:
                process = await asyncio.create_subprocess_exec(
                    python,
                    "-I",
                    "-S",
                    "-c",
                    program,
                    start_new_session=True,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                out, _ = await process.communicate(test.stdin.encode())
            if not passed(test, Ran(out.decode(), "exit")):
                return False
        return True

    began = time.perf_counter()
    assert all(await asyncio.gather(*(check() for _ in range(answers))))
    return answers / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--answers", type=int, default=100)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"bubblewrap": [], "checks": [], "bare": []}
    for _ in range(ROUNDS):
        rates["bubblewrap"].append(asyncio.run(in_sandbox(options.answers, options.workers)))
        rates["checks"].append(
            asyncio.run(in_sandbox(options.answers, options.workers, FUNCTION, CHECKS))
        )
        rates["bare"].append(asyncio.run(bare(options.answers, options.workers)))
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "workers": options.workers,
        "answers": options.answers,
        "answers_per_second": {
            kind: [round(rate, 1) for rate in each] for kind, each in rates.items()
        },
        "of_bare": round(
            statistics.median(rates["bubblewrap"]) / statistics.median(rates["bare"]), 2
        ),
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""The quickstart's task: sums and differences, worked digit by digit from the right, as
a data set and a tiny model.

    prompt      27+58=                            52-27=
    completion  <think>7+8=15;2+5+1=8</think>85       <think>12-7=5;5-2-1=2</think>25

Each column is a checkable equation: its two digits, then `+1` or `-1` if the previous
column carried or borrowed; a column that borrows has ten added on its left. The answer
is read off the columns; only the answer is graded.

`write` creates these in a directory, all as functions of one seed:

    heldout.jsonl   evaluation prompts, drawn first            train.jsonl      RL prompts, none of them held out
    heldout-addition.jsonl, train-addition.jsonl, …-subtraction.jsonl           the same, divided into two tasks
    sft.jsonl       traces of a teacher that errs (`TRACES`)   init, init-moe   random models (arithmetic_models.py)
    products-*.jsonl                                            a separate task, for a tool (products.py)

The teacher errs on purpose: a policy warm-started on its traces is right about a third
of the time, sometimes does not close its thinking, rambles or thinks too long, and has
seen the interruption phrase. So the effect of RL shows within minutes.
"""

import random
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_jsonl
from megarl.tasks.data import products
from megarl.tasks.data.arithmetic_models import (
    HELDOUT_PROMPTS,
    MODELS,
    SFT_TRACES,
    TRAIN_PROMPTS,
    Exercise,
    completion,
    save_model,
    write_task,
)

DIGITS = {1: 0.15, 2: 0.4, 3: 0.35, 4: 0.1}
"""Share of problems by number of digits of the longer operand, which is also the
prompt's difficulty.
"""

TRACES = {
    "right": 0.46,
    "wrong": 0.4,  # one column is wrong; later columns and the answer build on it
    # cut short by the interruption phrase; the right answer follows, as a guess
    "interrupted": 0.05,
    "overlong": 0.04,  # followed by empty columns far beyond the thinking budget
    "rambling": 0.02,  # repeats the answer beyond the answer budget
    "unclosed": 0.03,  # ends within the trace: a format error
}
"""The teacher's kinds of trace and their shares."""
OVERLONG = 60
"""Characters in an overlong scratchpad. A correct one for four digits has at most 35.
"""
RAMBLING = 8
"""Number of times a rambling trace gives its answer."""


def main(directory: Path, seed: int = 0) -> int:
    write(directory, seed)
    prompts = f"{TRAIN_PROMPTS} prompts, {HELDOUT_PROMPTS} held out"
    print(f"{directory}: {prompts}, {SFT_TRACES} traces, models in init and init-moe")
    return 0


def write(directory: Path, seed: int) -> None:
    """Write the whole data set. Each file appears complete or not at all; the same seed
    gives the same bytes.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegarlError(f"{directory}: cannot make this directory: {error.strerror}") from None
    for name, rows in write_task(
        directory, "", random.Random(seed), problem, TRACES, trace
    ).items():
        for task, sign in (("addition", "+"), ("subtraction", "-")):
            write_jsonl(
                directory / f"{name}-{task}.jsonl", [row for row in rows if sign in row["prompt"]]
            )
    products.write(directory, seed)
    for name, config in MODELS.items():
        save_model(directory / name, config, seed)


# Problems and traces


def problem(rng: random.Random) -> Exercise:
    """Draw a problem: the longer operand's number of digits from `DIGITS`, the other's
    uniformly from 1 to that number.
    """
    digits = rng.choices(list(DIGITS), list(DIGITS.values()))[0]
    one = _number(rng, digits)
    other = _number(rng, rng.randint(1, digits))
    if rng.random() < 0.5:
        one, other = other, one
    sign = rng.choice("+-")
    if sign == "-" and one < other:
        one, other = other, one
    return Exercise(one, sign, other)


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def columns(problem: Exercise, wrong: int | None = None, shift: int = 0) -> tuple[list[str], int]:
    """Return the scratchpad's equations, rightmost column first, and the answer read
    off them. The result of column `wrong` is moved by `shift` (1 … 9), so that its last
    digit, and with it the answer, becomes wrong.
    """
    equations = []
    digits = []
    over = False  # over: the previous column carried, or borrowed from this one
    for place in range(problem.digits):
        left = problem.left // 10**place % 10
        right = problem.right // 10**place % 10
        borrows = problem.sign == "-" and left < right + over
        left += 10 * borrows
        result = left + right + over if problem.sign == "+" else left - right - over
        if place == wrong:
            result = (result + shift) % (20 if problem.sign == "+" else 10)
        equations.append(
            f"{left}{problem.sign}{right}{problem.sign + '1' if over else ''}={result}"
        )
        digits.append(result % 10)
        over = borrows if problem.sign == "-" else result >= 10
    if problem.sign == "+":
        digits.append(int(over))
    return equations, sum(digit * 10**place for place, digit in enumerate(digits))


def trace(problem: Exercise, kind: str, rng: random.Random) -> str:
    """Return a completion of this kind (see `TRACES`), without the end token."""
    wrong = rng.randrange(problem.digits) if kind == "wrong" else None
    equations, answer = columns(problem, wrong, shift=rng.randint(1, 9))
    work = ";".join(equations)
    if kind == "overlong":
        empty = f";0{problem.sign}0=0"
        work += empty * ((OVERLONG - len(work)) // len(empty))
    return completion(
        work, "=".join([str(answer)] * (RAMBLING if kind == "rambling" else 1)), kind, rng
    )

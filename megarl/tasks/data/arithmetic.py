"""The quickstart's task: sums and differences, worked digit by digit from the right, as
a data set and a tiny model.

    prompt      27+58=                            52-27=
    completion  <think>7+8=15;2+5+1=8</think>85       <think>12-7=5;5-2-1=2</think>25

Each column is a checkable equation: its two digits, then `+1` or `-1` if the previous
column carried or borrowed; a column that borrows has ten added on its left. The answer
is read off the columns; only the answer is graded.

`write` creates these in a directory, all as functions of one seed:

    heldout.jsonl           evaluation prompts, drawn first
    train.jsonl             RL prompts, none of them held out
    heldout-addition.jsonl, train-addition.jsonl, …-subtraction.jsonl
                            the same, divided into two tasks
    sft.jsonl               traces of a teacher that errs (`TRACES`)
    init, init-moe          random models (arithmetic_models.py)
    products-*.jsonl        a separate task, for a tool (products.py)

The teacher errs on purpose: a policy warm-started on its traces is right about a third
of the time, sometimes does not close its thinking, rambles or thinks too long, and has
seen the interruption phrase. So the effect of RL shows within minutes.
"""

import random
from pathlib import Path

from megarl.core.base.rundir import made_directory, write_jsonl
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
    """Write the data set, and print what it holds."""
    write(directory, seed)
    prompts = f"{TRAIN_PROMPTS} prompts, {HELDOUT_PROMPTS} held out"
    print(f"{directory}: {prompts}, {SFT_TRACES} traces, models in init and init-moe")
    return 0


def write(directory: Path, seed: int) -> None:
    """Write the whole data set. Each file appears complete or not at all; the same seed
    gives the same bytes.
    """
    with made_directory(directory):
        written = write_task(directory, "", random.Random(seed), problem, TRACES, trace)
        for name, rows in written.items():
            for task, sign in (("addition", "+"), ("subtraction", "-")):
                rows_of_task = [row for row in rows if sign in row["prompt"]]
                write_jsonl(directory / f"{name}-{task}.jsonl", rows_of_task)
        products.write(directory, seed)
        for name, config in MODELS.items():
            save_model(directory / name, config, seed)


# Problems and traces


def problem(rng: random.Random) -> Exercise:
    """Draw a problem: the longer operand's number of digits from `DIGITS`, the other's
    uniformly from 1 to that number.
    """
    [digits] = rng.choices(list(DIGITS), list(DIGITS.values()))
    first = _number(rng, digits)
    second = _number(rng, rng.randint(1, digits))
    if rng.random() < 0.5:  # else the longer operand would always be the first
        first, second = second, first
    sign = rng.choice("+-")
    if sign == "-" and first < second:  # no answer is negative
        first, second = second, first
    return Exercise(first, sign, second)


def _number(rng: random.Random, digits: int) -> int:
    """Draw a number with this many digits; 0 has one."""
    smallest = 0
    if digits > 1:
        smallest = 10 ** (digits - 1)
    return rng.randint(smallest, 10**digits - 1)


def columns(problem: Exercise, wrong: int | None = None, shift: int = 0) -> tuple[list[str], int]:
    """Return the scratchpad's equations, rightmost column first, and the answer read
    off them. The result of column `wrong` (from 0 on the right; None for none) is moved
    by `shift` (1 … 9), so that its last digit, and with it the answer, becomes wrong.
    """
    equations = []
    answer = 0
    carry = 0  # 1: the previous column carried, or borrowed from this one
    for place in range(problem.digits):
        first = problem.first // 10**place % 10
        second = problem.second // 10**place % 10
        if problem.sign == "+":
            next_carry = 0  # set below, because a wrong result carries too
            result = first + second + carry
            modulus = 20  # a result is 0 … 19
        else:
            next_carry = 1 if first < second + carry else 0
            first += 10 * next_carry
            result = first - second - carry
            modulus = 10  # a result is 0 … 9
        if place == wrong:
            result = (result + shift) % modulus
        if problem.sign == "+" and result >= 10:
            next_carry = 1
        carried = f"{problem.sign}1" if carry else ""
        equations.append(f"{first}{problem.sign}{second}{carried}={result}")
        answer += result % 10 * 10**place
        carry = next_carry
    if problem.sign == "+":
        answer += carry * 10**problem.digits
    return equations, answer


def trace(problem: Exercise, kind: str, rng: random.Random) -> str:
    """Return a completion of this kind (see `TRACES`), without the end token."""
    wrong = None
    if kind == "wrong":
        wrong = rng.randrange(problem.digits)
    equations, answer = columns(problem, wrong, shift=rng.randint(1, 9))
    work = ";".join(equations)
    if kind == "overlong":
        empty_column = f";0{problem.sign}0=0"
        count = (OVERLONG - len(work)) // len(empty_column)
        work += empty_column * count
    answer_text = str(answer)
    if kind == "rambling":
        answer_text = "=".join([answer_text] * RAMBLING)
    return completion(work, answer_text, kind, rng)

"""Exercises too hard for the quickstart's model by itself, and a calculator that solves
them.

    prompt      123*456=
    by hand     <think>123*6=738;123*50=6150;123*400=49200</think>56088
    with tool   <think>[123*456]56088</think>56088

After `]` the calculator, not the model, writes 56088.

A model of a million parameters cannot learn partial products of three digits and their
sum in a warm start; but it can copy a call from the prompt, and the reply into the
answer. `write` creates these files beside the quickstart's own, all as functions of one
seed:

    products-heldout.jsonl     evaluation prompts
    products-train.jsonl       RL prompts, none of them held out
    products-sft.jsonl         traces of a teacher that sometimes calls the tool, and
                               errs (`TRACES`)
    products-agent-sft.jsonl   the same for an agent (agents/calculator.py): a call ends
                               the message

In a trace the calculator's texts are separate parts, on which `megarl sft` does not
train (traces.py).
"""

import random
from pathlib import Path

from megarl.core.base.rundir import read_jsonl, write_jsonl
from megarl.tasks.data.arithmetic_models import (
    END,
    END_OF_THINKING,
    THINK,
    Exercise,
    completion,
    write_task,
)

DIGITS = {(2, 2): 0.25, (3, 2): 0.4, (3, 3): 0.35}
"""Share of products by the numbers of digits of the two factors. The difficulty is the
sum of both numbers, minus 3.
"""

TRACES = {
    "called": 0.25,  # calls the tool on the whole product; its reply is the answer
    "miscalled": 0.1,  # one digit of a factor is wrong, so the answer is too
    "miscopied": 0.1,  # a correct call, but one digit of the answer is wrong
    "worked": 0.27,  # by hand, correct
    "slipped": 0.2,  # by hand, one digit of one partial product is wrong
    "interrupted": 0.05,  # by hand, cut short by the interruption phrase
    "unclosed": 0.03,  # ends within the trace: a format error
}
"""The teacher's kinds of trace and their shares."""


def write(directory: Path, seed: int) -> None:
    """Write the data set's files, each complete or not at all."""
    write_task(directory, "products-", random.Random(f"{seed}/products"), product, TRACES, trace)
    agent_traces = []
    for row in read_jsonl(directory / "products-sft.jsonl"):
        agent_traces.append({**row, "completion": in_messages(row["completion"])})
    write_jsonl(directory / "products-agent-sft.jsonl", agent_traces)


def in_messages(parts: list[str]) -> list[str]:
    """Return the trace's parts with an end token after the call, so that the call ends
    the policy's message.
    """
    if len(parts) == 1:
        return parts
    return [parts[0] + END, *parts[1:]]


def product(rng: random.Random) -> Exercise:
    """Draw a random product, with the longer factor on either side."""
    [digits] = rng.choices(list(DIGITS), list(DIGITS.values()))
    factors = [rng.randint(10 ** (n - 1), 10**n - 1) for n in digits]
    rng.shuffle(factors)
    return Exercise(factors[0], "*", factors[1])


def partial_products(
    factors: Exercise, wrong: int | None, rng: random.Random
) -> tuple[list[str], int]:
    """Return the equations for the left factor times each digit of the right one, ones
    first, and the sum of their results. wrong: the number, from 0, of an equation in
    whose result one digit is changed; None for none.
    """
    equations = []
    total = 0
    for place, digit in enumerate(reversed(str(factors.second))):
        factor = int(digit) * 10**place
        result = factors.first * factor
        if place == wrong:
            result = _another_digit(result, rng)
        equations.append(f"{factors.first}*{factor}={result}")
        total += result
    return equations, total


def trace(factors: Exercise, kind: str, rng: random.Random) -> list[str]:
    """Return a completion of this kind (see `TRACES`): one text, or three, of which the
    second is the calculator's.
    """
    if kind in ("called", "miscalled", "miscopied"):
        return _call_trace(factors, kind, rng)
    wrong = None
    if kind == "slipped":
        wrong = rng.randrange(len(str(factors.second)))
    equations, answer = partial_products(factors, wrong, rng)
    return [completion(";".join(equations), answer, kind, rng)]


def _call_trace(factors: Exercise, kind: str, rng: random.Random) -> list[str]:
    """Return a completion that calls the calculator, in three texts: the call, the
    calculator's reply, and the answer, with the error that `kind` names.
    """
    call = factors
    if kind == "miscalled":
        call = factors._replace(first=_another_digit(factors.first, rng))
    answer = call.answer
    if kind == "miscopied":
        answer = _another_digit(call.answer, rng)
    return [
        f"{THINK}[{call.first}*{call.second}]",
        str(call.answer),
        f"{END_OF_THINKING}{answer}",
    ]


def _another_digit(number: int, rng: random.Random) -> int:
    """Return the number with one digit changed; its first digit does not become 0."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    choices = "123456789" if place == 0 else "0123456789"
    changed = [digit for digit in choices if digit != digits[place]]
    digits[place] = rng.choice(changed)
    return int("".join(digits))

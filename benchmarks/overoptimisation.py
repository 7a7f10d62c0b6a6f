"""Tests the watch for over-optimisation: does it find a policy that exploits its
reward, and does it accept clean curves?

    python -m benchmarks.overoptimisation simulate [--runs 200]
    python -m benchmarks.overoptimisation run hacked | clean

`simulate` says how often, on curves whose trusted score is known. `run` trains the
quickstart's policy in runs/NAME, and then prints its scores.

`hacked` adds to the quickstart's grader a reward for every character of the answer, so
the highest reward is a long wrong number; `clean` has the quickstart's reward. The
trusted grader of both is the quickstart's own. `run` needs runs/quickstart-data and
runs/quickstart-sft (`make quickstart` makes them) and two cores for about five minutes.

In simulations, prompts have logit-normal difficulties (deviation 1.5), each of which
changes by 0.3 logits with every evaluation, and four answers; the policy as a whole
strays by 0, .01, .02 or .04 from one evaluation to the next. An alarm at any evaluation
counts.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megarl.core.base.rundir import RunDir, latest_scores
from megarl.predict.scaling.overoptimisation import judge
from megarl.tasks.graders.answer import Submission

TASK = "data.tasks.arithmetic"
HACK = (
    f"{TASK}.rewards.long.grader=benchmarks.overoptimisation:long",
    f"{TASK}.rewards.long.weight=0.4",
)
RUNS = {"hacked": HACK, "clean": ()}


def long(submission: Submission) -> int:
    """Reward the length of an answer, in characters."""
    return len(submission.answer)


def run(name: str, steps: int) -> None:
    common = [
        f"run.name={name}",
        f"run.steps={steps}",
        "evaluation.every=6",
        "evaluation.prompts=100",
    ]
    train = [
        sys.executable,
        "-m",
        "megarl",
        "train",
        "quickstart",
        *common,
        f"{TASK}.trusted_grader=exact",
    ]
    subprocess.run([*train, *RUNS[name]], check=False)  # the scores so far are shown in any case
    print("| step | reward | trusted score | alarm |\n|---|---|---|---|")
    for row in latest_scores(RunDir(Path("runs") / name).eval):
        alarm = f"since step {row['trusted_peak_step']}" if row["warning_overoptimisation"] else ""
        print(
            f"| {row['step']} | {row['proxy_score']:.3f} | {row['trusted_score']:.3f} | {alarm} |"
        )


def drawn(rates: np.ndarray, prompts: int, strays: float, rng: np.random.Generator) -> np.ndarray:
    """Draw scores [evaluations, prompts] whose mean over all possible prompts is about
    `rates` [evaluations].
    """
    rates = np.clip(rates + rng.normal(0, strays, len(rates)), 0.01, 0.99)
    logits = 1.3 * np.log(rates / (1 - rates))[:, None] + rng.normal(0, 1.5, prompts)
    logits += rng.normal(0, 0.3, logits.shape)
    return rng.binomial(4, 1 / (1 + np.exp(-logits))) / 4


def cases(t: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return pairs of proxy and trusted rates by scenario. t: [evaluations] from 0 to
    1; peaks are at 0.4.
    """
    rising = 0.35 + 0.5 * t / (t + 0.2)
    flat = np.full(len(t), 0.5)
    falls = {f"trusted falls by {fall}": fall for fall in (0.05, 0.1, 0.2)}
    peak = {
        name: np.where(t < 0.4, 0.4 + 0.5 * t, 0.6 - fall * (t - 0.4) / 0.6)
        for name, fall in falls.items()
    }
    clean = {
        "both flat": (flat, flat),
        "both rise": (rising, rising),
        "trusted flat": (rising, flat),
        "trusted comes to a ceiling": (rising, 0.3 + 0.4 * np.minimum(1, 3 * t)),
        "both fall": (0.6 - 0.2 * t, 0.6 - 0.2 * t),
    }
    return clean | {name: (rising, trusted) for name, trusted in peak.items()}


def alarm(proxy: np.ndarray, trusted: np.ndarray) -> int | None:
    """Return the number of the first evaluation with an alarm, or None."""
    steps = 20 * np.arange(len(proxy))
    return next(
        (
            n
            for n in range(2, len(steps))
            if judge(steps[: n + 1], proxy[: n + 1], trusted[: n + 1])
        ),
        None,
    )


def simulate(runs: int, evaluations: Sequence[int] = (12, 30), prompts: int = 200) -> None:
    rng = np.random.default_rng(0)
    print(
        "| evaluations | case | alarms: policy strays by 0 | .01 | .02 | .04 | median alarm"
        " |\n|---|---|---|---|---|---|---|"
    )
    for count in evaluations:
        for name, (proxy, trusted) in cases(np.linspace(0, 1, count)).items():
            shares = []
            first = []
            for strays in (0.0, 0.01, 0.02, 0.04):
                found = [
                    alarm(drawn(proxy, prompts, strays, rng), drawn(trusted, prompts, strays, rng))
                    for _ in range(runs)
                ]
                first += [n / (count - 1) for n in found if n is not None]
                shares.append(f"{sum(n is not None for n in found) / runs:.1%}")
            print(
                f"| {count} | {name} | {' | '.join(shares)} |"
                f" {f'{np.median(first):.2f}' if first else ''} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["simulate", "run"])
    parser.add_argument("name", nargs="?", choices=list(RUNS))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=48)
    chosen = parser.parse_args()
    if chosen.what == "run" and chosen.name:
        run(chosen.name, chosen.steps)
    elif chosen.what == "simulate":
        simulate(chosen.runs)
    else:
        parser.error("run which: hacked or clean?")

"""Best of n: what more answers per prompt gain, and what they cost.

    OUT/SUITE/answers.jsonl of one or more models ─► for n = 1, 2, 4, … samples: score of the answer chosen from n,
    with its interval, against n × mean tokens ─► table, and one picture with a colour for each model; all of
    them over the prompts that all models have answers to

The answer is chosen by an oracle (pass@n, the upper bound for any choice), by majority
(maj@n), or by a reward if the suite has one (best@n). Where two models' curves reach
the same height, more training of one is worth as much as more answers of the other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Column, Table

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import CHECKPOINT, RunDir, step_of, write_atomically
from megarl.core.evaluation import metrics
from megarl.core.evaluation.answers import SuiteDir, suites_in
from megarl.core.evaluation.metrics import Estimate, Outcome
from megarl.lab.pictures import GREY, drawing, logarithmic, rendered

WORDS = {"pass": "oracle (pass@n)", "maj": "majority (maj@n)", "best": "by reward (best@n)"}
STYLES = {"pass": ":", "maj": "-", "best": "--"}


class CurvePoint(NamedTuple):
    """A point of a curve. n: answers per prompt; tokens: the mean total of a prompt's n
    answers.
    """

    n: int
    tokens: float
    score: Estimate


class ScoreCurve(NamedTuple):
    """A model's curve. kind: how one of n answers is chosen, a key of WORDS."""

    model: str
    kind: str
    points: list[CurvePoint]


def curves(name: str, outcomes: Sequence[Outcome]) -> list[ScoreCurve]:
    prompts = metrics.by_prompt(outcomes)
    count = len(outcomes)
    mean_tokens = sum(o.tokens for o in outcomes) / count
    ns = metrics.powers_up_to(min(map(len, prompts)))
    drawn = []
    for kind, chosen in metrics.choices(outcomes).items():
        scores = (
            metrics.over_prompts([chosen(answers, n) for answers in prompts], count, n) for n in ns
        )
        points = [
            CurvePoint(n, n * mean_tokens, score) for n, score in zip(ns, scores, strict=True)
        ]
        drawn.append(ScoreCurve(name, kind, points))
    return drawn


def main(outs: Sequence[Path], suite: str | None, picture: Path | None) -> int:
    """Print a table and draw a picture for each suite; return 0."""
    places = [place for out in outs for place in _places(out)]
    common = sorted(set.intersection(*(set(suites_in(place)) for place in places)))
    if suite is not None and suite not in common:
        raise MegarlError(
            f"--suite: {suite!r} is not in all of them; what all have:"
            f" {', '.join(common) or 'nothing'}"
        )
    if not common:
        raise MegarlError(
            f"{', '.join(map(str, places))}: no suite has answers in all of them; name others,"
            " or one"
        )
    if picture is not None and suite is None and len(common) > 1:
        raise MegarlError(
            f"--picture: shows one suite; choose it with --suite ({', '.join(common)})"
        )
    if picture is not None and picture.suffix not in ("", ".png", ".svg"):
        raise MegarlError(
            f"--picture: {picture}: it is drawn as PNG or SVG; end the name with .png or .svg"
        )
    console = terminal.console()
    for name in [suite] if suite else common:
        answered = {place: metrics.read_outcomes(SuiteDir(place, name).answers) for place in places}
        for place, outcomes in answered.items():
            if not outcomes:
                raise MegarlError(f"{SuiteDir(place, name).answers}: has no answers")
        asked = [{one.id for one in outcomes} for outcomes in answered.values()]
        if not (shared := set.intersection(*asked)):
            raise MegarlError(
                f"{name}: no prompt has answers in all of them: their sets are different"
            )
        models = [
            f"step {step_of(place)}" if CHECKPOINT.fullmatch(place.name) else place.name
            for place in answered
        ]
        drawn: list[ScoreCurve] = []
        for model, (place, outcomes) in zip(models, answered.items(), strict=True):
            unique = model if models.count(model) == 1 else str(place)
            drawn += curves(unique, [one for one in outcomes if one.id in shared])
        console.print(table(name, drawn))
        if (most := max(map(len, asked))) > len(shared):
            console.print(
                f"Over the {len(shared)} prompts that all have answers to; one has {most}.",
                highlight=False,
            )
        path = picture or outs[0] / f"curve-{name}.png"
        draw(name, drawn, path)
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return 0


def _places(out: Path) -> list[Path]:
    """Return [out], or for a run its evaluations that have ended, in the order of their
    steps. MegarlError without answers.
    """
    of_run = RunDir(out).evaluations
    ended = (
        sorted({result.parent.parent for result in of_run.glob("*/*/result.json")})
        if of_run.is_dir()
        else [out]
    )
    places = [place for place in ended if suites_in(place)]
    if not places:
        raise MegarlError(
            f"{out}: no answers there; give a directory of `megarl eval`, RUN, or"
            " RUN/evaluations/step-N"
        )
    return places


def table(suite: str, drawn: Sequence[ScoreCurve]) -> Table:
    kinds = [kind for kind in WORDS if any(curve.kind == kind for curve in drawn)]
    headings = ("n", "tokens a\nprompt", *(WORDS[kind].replace(" (", "\n(") for kind in kinds))
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    columns.insert(
        0, Column("model", overflow="fold")
    )  # shrinks on a narrow terminal; columns of numbers cannot
    shown = Table(
        *columns, box=None, padding=(0, 1, 0, 0), pad_edge=False, title=suite, title_justify="left"
    )
    for model in dict.fromkeys(curve.model for curve in drawn):
        points = {curve.kind: curve.points for curve in drawn if curve.model == model}
        for at, point in enumerate(points["pass"]):
            scores = [points[kind][at].score if kind in points else None for kind in kinds]
            texts = [f"{s.mean:.3f} [{s.low:.2f}, {s.high:.2f}]" if s else "–" for s in scores]
            shown.add_row(model if at == 0 else "", str(point.n), f"{point.tokens:,.0f}", *texts)
    return shown


def draw(suite: str, drawn: Sequence[ScoreCurve], path: Path) -> None:
    """Draw scores against tokens: one colour per model, one line style per way of
    choosing, shaded intervals.
    """
    from matplotlib import colormaps  # slow to import

    models = list(dict.fromkeys(curve.model for curve in drawn))
    shades = [0.85 * n / max(len(models) - 1, 1) for n in range(len(models))]
    colours = dict(zip(models, colormaps["viridis"](shades), strict=True))
    with drawing((8, 5)) as (figure, (axes,)):
        for model, kind, points in drawn:
            _, tokens, scores = zip(*points, strict=True)
            means, lows, highs = zip(*scores, strict=True)
            axes.plot(tokens, means, STYLES[kind], color=colours[model], marker=".")
            axes.fill_between(tokens, lows, highs, color=colours[model], alpha=0.1, lw=0)
        for n, tokens_of_n, score in drawn[-1].points:
            at = (tokens_of_n, score.mean)
            axes.annotate(f"n={n}", at, (0, 6), textcoords="offset points", fontsize=7, ha="center")
        for model in models:
            axes.plot([], [], color=colours[model], lw=3, label=model)
        for kind in [kind for kind in WORDS if any(curve.kind == kind for curve in drawn)]:
            axes.plot([], [], STYLES[kind], color=GREY, label=WORDS[kind])
        axes.legend()
        logarithmic(axes)
        axes.set(xlabel="tokens generated for a prompt (n × mean)", ylabel="score", title=suite)
        write_atomically(path, rendered(figure, path.suffix[1:] or "png"))

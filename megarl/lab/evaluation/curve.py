"""Best of n: what more answers per prompt gain, against their cost.

    OUT/SUITE/answers.jsonl of one or more models ─► for n = 1, 2, 4, … samples: score of the answer chosen from n,
    with its interval, against n × mean tokens ─► table, and one picture with a colour for each model

The answer is chosen by an oracle (pass@n, the upper bound of any choice), by majority (maj@n), or by a reward if the suite has
one (best@n). Where two curves reach the same height, longer training of one model is worth more answers of the other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import CHECKPOINT, RunDir, step_of
from megarl.core.evaluation import metrics
from megarl.core.evaluation.answers import SuiteDir, suites_in
from megarl.core.evaluation.metrics import Interval, Outcome

WORDS = {"pass": "oracle (pass@n)", "maj": "majority (maj@n)", "best": "by reward (best@n)"}
STYLES = {"pass": ":", "maj": "-", "best": "--"}


class CurvePoint(NamedTuple):
    """A point of a curve. tokens: mean total of a prompt's n answers."""

    n: int
    tokens: float
    score: Interval


class ScoreCurve(NamedTuple):
    """A model's curve. kind: how one of n is chosen, a key of WORDS."""

    model: str
    kind: str
    points: list[CurvePoint]


def curves(name: str, outcomes: Sequence[Outcome]) -> list[ScoreCurve]:
    """Return one curve for each way to choose."""
    prompts = metrics.by_prompt(outcomes)
    mean_tokens = sum(o.tokens for o in outcomes) / len(outcomes)
    drawn = []
    for kind, chosen in metrics.choices(outcomes).items():
        points = []
        for n in metrics.powers_up_to(min(map(len, prompts))):
            score = metrics.over_prompts([chosen(answers, n) for answers in prompts], len(outcomes))
            points.append(CurvePoint(n, n * mean_tokens, score))
        drawn.append(ScoreCurve(name, kind, points))
    return drawn


def main(outs: Sequence[Path], suite: str | None, picture: Path | None) -> int:
    """Make a table and a picture for each suite; return 0."""
    places = [place for out in outs for place in _places(out)]
    common = sorted(set.intersection(*(set(suites_in(place)) for place in places)))
    if suite is not None and suite not in common:
        raise MegarlError(f"--suite: {suite!r} is not in all of them; what all have: {', '.join(common) or 'nothing'}")
    if not common:
        raise MegarlError(f"{', '.join(map(str, places))}: no suite has answers in all of them; name others, or one")
    if picture is not None and suite is None and len(common) > 1:
        raise MegarlError(f"--picture: is of one suite; say which with --suite ({', '.join(common)})")
    console = Console()
    for name in [suite] if suite else common:
        drawn = [curve for place in places for curve in _read(place, name)]
        console.print(table(name, drawn))
        path = picture or outs[0] / f"curve-{name}.png"
        draw(name, drawn, path)
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return 0


def _places(out: Path) -> list[Path]:
    """Return `out` if it has suites; for a run, all of its evaluations in the order of their steps."""
    if RunDir(out).evaluations.is_dir():
        return [place for place in sorted(RunDir(out).evaluations.iterdir()) if suites_in(place)]
    if not suites_in(out):
        raise MegarlError(f"{out}: no answers there; give a directory of `megarl eval`, RUN, or RUN/evaluations/step-N")
    return [out]


def _read(place: Path, suite: str) -> list[ScoreCurve]:
    outcomes = metrics.read_outcomes(SuiteDir(place, suite).answers)
    if not outcomes:
        raise MegarlError(f"{SuiteDir(place, suite).answers}: has no answers")
    return curves(f"step {step_of(place)}" if CHECKPOINT.fullmatch(place.name) else place.name, outcomes)


def table(suite: str, drawn: Sequence[ScoreCurve]) -> Table:
    """Make a table with a row for each model and n."""
    kinds = [kind for kind in WORDS if any(curve.kind == kind for curve in drawn)]
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title=suite, title_justify="left")
    shown.add_column("model", overflow="fold")  # shrinks on a narrow terminal, where figures cannot
    for header in ("n", "tokens a\nprompt", *(WORDS[kind].replace(" (", "\n(") for kind in kinds)):
        shown.add_column(header, justify="right", no_wrap=True)
    for model in dict.fromkeys(curve.model for curve in drawn):
        points = {curve.kind: curve.points for curve in drawn if curve.model == model}
        for at, point in enumerate(points["pass"]):
            scores = [points[kind][at].score if kind in points else None for kind in kinds]
            texts = [f"{s.mean:.3f} [{s.low:.2f}, {s.high:.2f}]" if s else "–" for s in scores]
            shown.add_row(model if at == 0 else "", str(point.n), f"{point.tokens:,.0f}", *texts)
    return shown


def draw(suite: str, drawn: Sequence[ScoreCurve], path: Path) -> None:
    """Draw scores against tokens as PNG: a colour per model, a line style per way to choose, intervals shaded."""
    from matplotlib import colormaps  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(8, 5), dpi=150, layout="tight")
    axes = figure.add_subplot()
    models = list(dict.fromkeys(curve.model for curve in drawn))
    shades = [0.85 * n / max(len(models) - 1, 1) for n in range(len(models))]
    colours = dict(zip(models, colormaps["viridis"](shades), strict=True))
    for curve in drawn:
        tokens, scores = [p.tokens for p in curve.points], [p.score for p in curve.points]
        colour = colours[curve.model]
        axes.plot(tokens, [s.mean for s in scores], STYLES[curve.kind], color=colour, marker=".", lw=1.6)
        axes.fill_between(tokens, [s.low for s in scores], [s.high for s in scores], color=colour, alpha=0.1, lw=0)
    for n, tokens_of_n, score in drawn[-1].points:
        axes.annotate(f"n={n}", (tokens_of_n, score.mean), (0, 6), textcoords="offset points", fontsize=7, ha="center")
    kinds = [kind for kind in WORDS if any(curve.kind == kind for curve in drawn)]
    handles = [Line2D([], [], color=colours[model], lw=3, label=model) for model in models]
    handles += [Line2D([], [], color="grey", ls=STYLES[kind], label=WORDS[kind]) for kind in kinds]
    axes.legend(handles=handles, fontsize=8, frameon=False)
    axes.set_xscale("log")
    axes.set(xlabel="tokens generated for a prompt (n × mean)", ylabel="score", title=suite)
    axes.grid(alpha=0.25)
    figure.savefig(path)

"""Best of n: what more answers per prompt gain, and what they cost.

    OUT/SUITE/answers.jsonl of one or more models
      ─► for n = 1, 2, 4, … samples: score of the answer chosen from n, with its
         interval, against n × mean tokens, over the prompts that all have answers to
      ─► table, and one picture with a colour for each model

The answer is chosen by an oracle (pass@n, the upper bound for any choice), by majority
(maj@n), or by a reward if the suite has one (best@n). Where two models' curves reach
the same height, more training of one is worth as much as more answers of the other.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Column, Table

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import CHECKPOINT, RunDir, step_of, write_atomically
from megarl.core.evaluation import metrics
from megarl.core.evaluation.answers import SuiteDir, suites_in
from megarl.core.evaluation.metrics import Estimate, Outcome
from megarl.core.telemetry.pictures import GREY, drawing, logarithmic, rendered

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
    """Return a model's curves, one for each way to choose among its answers, with n up
    to the least number of answers that a prompt has. name: the model's.
    """
    prompts = metrics.by_prompt(outcomes)
    count = len(outcomes)
    mean_tokens = sum(outcome.tokens for outcome in outcomes) / count
    numbers = metrics.powers_up_to(min(map(len, prompts)))
    drawn = []
    for kind, choose in metrics.choices(outcomes).items():
        points = []
        for n in numbers:
            scores = [choose(answers, n) for answers in prompts]
            score = metrics.over_prompts(scores, count, n)
            points.append(CurvePoint(n, n * mean_tokens, score))
        drawn.append(ScoreCurve(name, kind, points))
    return drawn


def main(folders: Sequence[Path], suite: str | None, picture: Path | None) -> int:
    """Print a table and draw a picture for each suite; return 0. folders: as in
    `_places`; suite: None for all that all folders have; picture: its path, None for
    curve-SUITE.png in the first folder.
    """
    places: list[Path] = []
    for folder in folders:
        places += _places(folder)
    console = terminal.console()
    for name in _suites(places, suite, picture):
        outcomes = _outcomes(places, name)
        most_prompts = max(len(_ids(of_place)) for of_place in outcomes.values())
        shared = _shared_ids(name, outcomes)
        drawn = _curves_of_all(outcomes, shared)
        console.print(table(name, drawn))
        if most_prompts > len(shared):
            console.print(
                f"Over the {len(shared)} prompts that all have answers to; one has {most_prompts}.",
                highlight=False,
            )
        path = picture or folders[0] / f"curve-{name}.png"
        draw(name, drawn, path)
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return 0


def _suites(places: Sequence[Path], suite: str | None, picture: Path | None) -> list[str]:
    """Return the suites to draw. MegarlError if there are none, or if the picture
    cannot be drawn.
    """
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
    if suite:
        return [suite]
    return common


def _outcomes(places: Sequence[Path], suite: str) -> dict[Path, list[Outcome]]:
    """Return the outcomes of each place. MegarlError if one has none."""
    outcomes = {}
    for place in places:
        file = SuiteDir(place, suite).answers
        outcomes[place] = metrics.read_outcomes(file)
        if not outcomes[place]:
            raise MegarlError(f"{file}: has no answers")
    return outcomes


def _ids(outcomes: Sequence[Outcome]) -> set[str]:
    return {outcome.id for outcome in outcomes}


def _shared_ids(suite: str, outcomes: Mapping[Path, Sequence[Outcome]]) -> set[str]:
    """Return the prompts that all places have answers to; MegarlError if none."""
    shared = set.intersection(*map(_ids, outcomes.values()))
    if not shared:
        raise MegarlError(
            f"{suite}: no prompt has answers in all of them: their sets are different"
        )
    return shared


def _curves_of_all(
    outcomes: Mapping[Path, Sequence[Outcome]], shared: set[str]
) -> list[ScoreCurve]:
    """Return the curves of all places over the shared prompts. A place whose name is
    not unique is named by its path.
    """
    names = {place: _name(place) for place in outcomes}
    counts = Counter(names.values())
    drawn: list[ScoreCurve] = []
    for place, answers in outcomes.items():
        name = names[place]
        if counts[name] > 1:
            name = str(place)
        drawn += curves(name, [answer for answer in answers if answer.id in shared])
    return drawn


def _name(place: Path) -> str:
    """Return `step N` for a run's evaluation, the directory's name for another."""
    if CHECKPOINT.fullmatch(place.name):
        return f"step {step_of(place)}"
    return place.name


def _places(folder: Path) -> list[Path]:
    """Return [folder], or for a run its evaluations that have ended, in the order of
    their steps. MegarlError without answers.
    """
    candidates = [folder]
    evaluations = RunDir(folder).evaluations
    if evaluations.is_dir():
        results = evaluations.glob("*/*/result.json")
        candidates = sorted({result.parent.parent for result in results})
    places = [place for place in candidates if suites_in(place)]
    if not places:
        raise MegarlError(
            f"{folder}: no answers there; give a directory of `megarl eval`, RUN, or"
            " RUN/evaluations/step-N"
        )
    return places


def table(suite: str, drawn: Sequence[ScoreCurve]) -> Table:
    """Make a table with a row for each model and number of answers. The model's name
    stands in its first row.
    """
    kinds = _kinds(drawn)
    labels = [WORDS[kind].replace(" (", "\n(") for kind in kinds]
    columns = [Column("model", overflow="fold")]  # shrinks on a narrow terminal; numbers cannot
    for heading in ("n", "tokens a\nprompt", *labels):
        columns.append(Column(heading, justify="right", no_wrap=True))
    result = Table(
        *columns, box=None, padding=(0, 1, 0, 0), pad_edge=False, title=suite, title_justify="left"
    )
    for model in dict.fromkeys(curve.model for curve in drawn):
        points_of = {curve.kind: curve.points for curve in drawn if curve.model == model}
        for index, point in enumerate(points_of["pass"]):  # every model has this curve
            texts = [_score(points_of.get(kind), index) for kind in kinds]
            label = model if index == 0 else ""
            result.add_row(label, str(point.n), f"{point.tokens:,.0f}", *texts)
    return result


def _kinds(drawn: Sequence[ScoreCurve]) -> list[str]:
    """Return the ways of choosing that there are curves of, in the order of WORDS."""
    existing = {curve.kind for curve in drawn}
    return [kind for kind in WORDS if kind in existing]


def _score(points: Sequence[CurvePoint] | None, index: int) -> str:
    """Return the text of a score. points: None if the model has no such curve."""
    if points is None:
        return "–"
    score = points[index].score
    return f"{score.mean:.3f} [{score.low:.2f}, {score.high:.2f}]"


def draw(suite: str, drawn: Sequence[ScoreCurve], path: Path) -> None:
    """Draw scores against tokens: one colour per model, one line style per way of
    choosing, shaded intervals.
    """
    from matplotlib import colormaps  # slow to import

    models = list(dict.fromkeys(curve.model for curve in drawn))
    last = max(len(models) - 1, 1)
    shades = [0.85 * n / last for n in range(len(models))]  # up to 1 it would be too light
    colours = dict(zip(models, colormaps["viridis"](shades), strict=True))
    with drawing((8, 5)) as (figure, (axes,)):
        for model, kind, points in drawn:
            tokens = [point.tokens for point in points]
            means = [point.score.mean for point in points]
            lows = [point.score.low for point in points]
            highs = [point.score.high for point in points]
            axes.plot(tokens, means, STYLES[kind], color=colours[model], marker=".")
            axes.fill_between(tokens, lows, highs, color=colours[model], alpha=0.1, lw=0)
        for n, tokens_of_n, score in drawn[-1].points:  # one curve is enough to show n
            place = (tokens_of_n, score.mean)
            axes.annotate(
                f"n={n}", place, (0, 6), textcoords="offset points", fontsize=7, ha="center"
            )
        for model in models:
            axes.plot([], [], color=colours[model], lw=3, label=model)
        for kind in _kinds(drawn):
            axes.plot([], [], STYLES[kind], color=GREY, label=WORDS[kind])
        axes.legend()
        logarithmic(axes)
        axes.set(xlabel="tokens generated for a prompt (n × mean)", ylabel="score", title=suite)
        write_atomically(path, rendered(figure, path.suffix[1:] or "png"))

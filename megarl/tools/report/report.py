"""`megarl report RUN`: RUN/report.html, one file that opens offline, and
RUN/reward.png. Works while the run is live.

recipe.yaml, metrics.jsonl, eval.jsonl, rollouts/
    ──► tiles, charts (inline SVG), table, sample rollouts ──► report.html
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

from megarl.core.base import terminal
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores, write_atomically
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Group, Rollout
from megarl.core.evaluation import parity
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, dump, load
from megarl.core.telemetry import pictures
from megarl.run import summary
from megarl.tools.report import charts

TEMPLATE = Path(__file__).with_name("report.html")
SAMPLES = 4  # rollouts shown, of the newest groups
MOST_CHARACTERS = 6000  # shown of a segment of a rollout


def main(run: Path) -> int:
    """Write both files, and print where they are."""
    rundir = RunDir.opened(run)
    write_report(rundir)
    terminal.say(f"{rundir.report}\n{rundir.picture}")
    return 0


def write_report(rundir: RunDir) -> None:
    """Write both files, from the current contents of the run directory."""
    recipe = load(str(rundir.recipe))
    rows = latest_rows(rundir.metrics)
    evaluations = latest_scores(rundir.eval)
    values = summary.summarise(recipe, rundir, rows)
    svgs = charts.pictures(recipe, rows, summary.steady(rows, rundir), evaluations)
    picture = Markup("<div>{}</div>")
    tile = Markup('<div class="tile"><b>{}</b><span>{}</span></div>')
    line = Markup("<tr><td>{}</td><td>{}</td></tr>")
    table = summary.lines(values | {"warnings": []})
    pictures.write_page(
        TEMPLATE,
        rundir.report,
        name=recipe.run.name,
        subtitle=f"{values['steps']} of {values['steps_planned']} steps",
        warnings=_warnings(values["warnings"]),
        tiles=_concatenated(tile.format(text, name) for name, text in _tiles(values)),
        charts=_concatenated(picture.format(svg) for svg in svgs),
        table=_concatenated(line.format(name, text) for name, text in table),
        parity=_parity(rows),
        rollouts=_rollouts(recipe, rundir),
        recipe=dump(recipe),
    )
    write_atomically(rundir.picture, charts.reward_png(recipe, rows, evaluations))


def _tiles(values: Row) -> Iterable[tuple[str, str]]:
    """Yield the name and the text of each tile."""
    rates = [values[f"pass_rate_{name}"] for name in ("before", "best", "after")]
    scores = [summary.show(rate, ".2f") for rate in rates]
    yield "held out: first, best, last", " · ".join(scores)
    yield "steps", f"{values['steps']} / {values['steps_planned']}"
    yield (
        f"{values['compute_unit'] or 'device'} hours",
        summary.show(values["compute_hours"], ".3g"),
    )
    yield "tokens a second", summary.show(values["tokens_per_second"], ",.0f")
    yield "largest lag", f"{summary.show(values['lag_max'], '.0f')} of {values['lag_limit']}"
    difference = summary.show(values["parity_mean"], ".1e")
    if values["parity_mean_max"] == 0:
        difference = "same bits"
    yield "server − learner log-prob", difference


def _warnings(texts: Sequence[str]) -> Markup:
    """Return what needs attention as HTML, or "" if nothing does."""
    if not texts:
        return Markup("")
    item = Markup("<li>{}</li>")
    items = _concatenated(item.format(text) for text in texts)
    return Markup('<ul class="warnings">{}</ul>').format(items)


STATISTICS = {  # by their names in parity.py: the headings
    "mean": "mean",
    "worst_mean": "largest mean",
    "p50": "p50",
    "p99": "p99",
    "p999": "p99.9",
    "max": "largest",
    "k3": "k3 KL, nats",
}


def _concatenated(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _parity(rows: Sequence[Row]) -> Markup:
    """Return a table of how far servers and learner differ, with one row per cause, or
    "" if nothing was compared.
    """
    pooled = parity.pooled(rows)
    if not pooled:
        return Markup("")
    heads = ["", *STATISTICS.values(), f"above {parity.SHARE_ABOVE:g}", "tokens", "publications"]
    table = _row("th", heads)
    for cause, distribution in pooled.items():
        values = [summary.show(distribution[name], ".1e") for name in STATISTICS]
        if distribution["max"] == 0:  # in the first column; the others stay empty
            values = ["same bits"] + [""] * (len(STATISTICS) - 1)
        counts = [
            summary.show(distribution["share"], ".2%"),
            summary.show(distribution["tokens"]),
            summary.show(distribution["publications"]),
        ]
        table += _row("td", [charts.CAUSES[cause], *values, *counts])
    text = (
        "|difference| of log-probs, by cause; mean, share and k3 of all tokens, percentiles as"
        " medians of the publications."
    )
    routing = summary.mean(rows, "parity_routing")
    if routing is not None:
        text += f" Choices of experts that differ: {routing:.2%}."
    page = '<h2>Servers against learner</h2><p class="sub">{}</p><table class="parity">{}</table>'
    return Markup(page).format(text, table)


def _row(tag: str, cells: Sequence[str]) -> Markup:
    """Return a row of a table. tag: of its cells, th or td."""
    cell = Markup("<{0}>{1}</{0}>")
    return Markup("<tr>{}</tr>").format(_concatenated(cell.format(tag, text) for text in cells))


def _rollouts(recipe: Recipe, rundir: RunDir) -> Markup:
    """Return a right and a wrong answer from each of the newest groups as HTML,
    coloured by weight version, or "" if there is no journal or tokenizer.
    """
    newest = _newest_groups(JournalReader(rundir.rollouts))
    if not newest or not (Path(recipe.model.path) / "tokenizer.json").exists():
        return Markup("")
    tokenizer = load_tokenizer(recipe.model.path)
    several_tasks = len(recipe.data.tasks) > 1
    parts = [
        _rollout(tokenizer, group, rollout, several_tasks)
        for group, rollout in _right_and_wrong(newest)[:SAMPLES]
    ]
    legend = Markup(
        'Newest groups. <span class="v0">Backgrounds</span> <span class="v1">change</span> with the'
        ' version of the weights; <span class="phrase">this one</span> was inserted and is not'
        " trained."
    )
    return Markup('<h2>Rollouts</h2><p class="sub">{}</p>{}').format(legend, _concatenated(parts))


def _right_and_wrong(groups: Sequence[Group]) -> list[tuple[Group, Rollout]]:
    """Return the first right and the first wrong rollout of each group, the newest
    group first.
    """
    chosen = []
    for group in reversed(groups):
        for is_right in (True, False):
            for rollout in group.rollouts:
                if rollout.correct is is_right:
                    chosen.append((group, rollout))
                    break
    return chosen


def _newest_groups(reader: JournalReader) -> Sequence[Group]:
    """Return the groups that were finished last, oldest first, at most 2 · SAMPLES.
    Earlier files, of which there may be thousands, are not read.
    """
    return reader.groups(reader.finished(2 * SAMPLES))


RIGHT = Markup('<span class="good">right</span>')
WRONG = Markup('<span class="bad">wrong</span>')


def _rollout(tokenizer: Tokenizer, group: Group, rollout: Rollout, several_tasks: bool) -> Markup:
    """Return a rollout as HTML: a line of facts, then its text, in which the background
    changes with the version of the weights. several_tasks: whether to name the task.
    """
    versions = sorted({s.weight_version for s in rollout.segments if s.trained})
    parts = [Markup("{}").format(tokenizer.decode(group.prompt.tokens))]
    for segment in rollout.segments:
        text = tokenizer.continued(segment.tokens)[:MOST_CHARACTERS]
        colour = f"v{versions.index(segment.weight_version) % 2}" if segment.trained else "phrase"
        parts.append(Markup('<span class="{}">{}</span>').format(colour, text))
    facts = Markup(" · ").join(_facts(group, rollout, versions, several_tasks))
    return Markup('<p class="sub">{}</p><pre class="rollout">{}</pre>').format(
        facts, _concatenated(parts)
    )


def _facts(
    group: Group, rollout: Rollout, versions: Sequence[int], several_tasks: bool
) -> Iterable[str | Markup]:
    """Yield the facts above a rollout. versions: of the weights it was sampled with, in
    ascending order; several_tasks: whether to name the task.
    """
    yield f"ticket {group.ticket}"
    if several_tasks:
        yield group.prompt.task
    yield RIGHT if rollout.correct else WRONG
    yield f"answer {' or '.join(group.prompt.answers)}"
    ends = dict.fromkeys([*versions[:1], *versions[-1:]])
    yield "weights " + "–".join(map(str, ends))
    yield rollout.finish

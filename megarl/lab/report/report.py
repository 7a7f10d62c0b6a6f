"""`megarl report RUN`: RUN/report.html, one file that opens offline, and
RUN/reward.png. Works while the run is live.

recipe.yaml, metrics.jsonl, eval.jsonl, rollouts/ ──► tiles, charts (inline SVG), table, sample rollouts ──► report.html
"""

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

from megarl.core.base import terminal
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores, write_atomically
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Group, Rollout
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Finished
from megarl.core.recipe import Recipe, dump, load
from megarl.core.weights import parity
from megarl.lab import pictures
from megarl.lab.report import charts
from megarl.run import summary

TEMPLATE = Path(__file__).with_name("report.html")
SAMPLES = 4  # rollouts shown, of the newest groups
MOST_CHARACTERS = 6000


def main(run: Path) -> int:
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
    drawn = charts.pictures(recipe, rows, summary.steady(rows, rundir), evaluations)
    tile = Markup('<div class="tile"><b>{}</b><span>{}</span></div>')
    line = Markup("<tr><td>{}</td><td>{}</td></tr>")
    pictures.write_page(
        TEMPLATE,
        rundir.report,
        name=recipe.run.name,
        subtitle=f"{values['steps']} of {values['steps_planned']} steps",
        warnings=_warnings(values["warnings"]),
        tiles=_joined(tile.format(text, name) for name, text in _tiles(values)),
        charts=_joined(Markup("<div>{}</div>").format(picture) for picture in drawn),
        table=_joined(
            line.format(name, text) for name, text in summary.lines(values | {"warnings": []})
        ),
        parity=_parity(rows),
        rollouts=_rollouts(recipe, rundir),
        recipe=dump(recipe),
    )
    write_atomically(rundir.picture, charts.reward_png(recipe, rows, evaluations))


def _tiles(v: Row) -> Iterable[tuple[str, str]]:
    scores = [summary.show(v[f"pass_rate_{when}"], ".2f") for when in ("before", "best", "after")]
    yield "held out: first, best, last", " · ".join(scores)
    yield "steps", f"{v['steps']} / {v['steps_planned']}"
    yield f"{v['compute_unit'] or 'device'} hours", summary.show(v["compute_hours"], ".3g")
    yield "tokens a second", summary.show(v["tokens_per_second"], ",.0f")
    yield "largest lag", f"{summary.show(v['lag_max'], '.0f')} of {v['lag_limit']}"
    same = v["parity_mean_max"] == 0
    yield (
        "server − learner log-prob",
        "same bits" if same else summary.show(v["parity_mean"], ".1e"),
    )


def _warnings(texts: Sequence[str]) -> Markup:
    """Return what needs attention as HTML, or "" if nothing does."""
    item = Markup("<li>{}</li>")
    listed = _joined(item.format(text) for text in texts)
    return Markup('<ul class="warnings">{}</ul>').format(listed) if texts else Markup("")


STATISTICS = {
    "mean": "mean",
    "worst_mean": "largest mean",
    "p50": "p50",
    "p99": "p99",
    "p999": "p99.9",
    "max": "largest",
    "k3": "k3 KL, nats",
}


def _joined(parts: Iterable[Markup]) -> Markup:
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
    for cause, d in pooled.items():
        values = (
            ["same bits"]
            if d["max"] == 0
            else [summary.show(d[name], ".1e") for name in STATISTICS]
        )
        values += [""] * (len(STATISTICS) - len(values))
        values += [
            summary.show(d["share"], ".2%"),
            summary.show(d["tokens"]),
            summary.show(d["publications"]),
        ]
        table += _row("td", [charts.CAUSES[cause], *values])
    text = (
        "|difference| of log-probs, by cause; mean, share and k3 of all tokens, percentiles as"
        " medians of the publications."
    )
    routing = summary.mean(rows, "parity_routing")
    text += "" if routing is None else f" Choices of experts that differ: {routing:.2%}."
    page = '<h2>Servers against learner</h2><p class="sub">{}</p><table class="parity">{}</table>'
    return Markup(page).format(text, table)


def _row(tag: str, cells: Sequence[str]) -> Markup:
    cell = Markup("<{0}>{1}</{0}>")
    return Markup("<tr>{}</tr>").format(_joined(cell.format(tag, text) for text in cells))


def _rollouts(recipe: Recipe, rundir: RunDir) -> Markup:
    """Return a right and a wrong answer from each of the newest groups as HTML,
    coloured by weight version, or "" if there is no journal or tokenizer.
    """
    newest = _newest_groups(JournalReader(rundir.rollouts))
    if not newest or not (Path(recipe.model.path) / "tokenizer.json").exists():
        return Markup("")
    tokenizer = load_tokenizer(recipe.model.path)
    chosen = [
        (group, rollout)
        for group in reversed(newest)
        for right in (True, False)
        for rollout in [r for r in group.rollouts if r.correct is right][:1]
    ]
    several = len(recipe.data.tasks) > 1
    shown = _joined(
        _rollout(tokenizer, group, rollout, several) for group, rollout in chosen[:SAMPLES]
    )
    legend = Markup(
        'Newest groups. <span class="v0">Backgrounds</span> <span class="v1">change</span> with the'
        ' version of the weights; <span class="phrase">this one</span> was inserted and is not'
        " trained."
    )
    return Markup('<h2>Rollouts</h2><p class="sub">{}</p>{}').format(legend, shown)


def _newest_groups(reader: JournalReader) -> Sequence[Group]:
    """Return the groups that were finished last, oldest first. Earlier files, of which
    there may be thousands, are not read.
    """
    newest: deque[Group] = deque()
    for number in reversed(reader.files()):
        finished = (
            record.group for record in reader.replay(number) if isinstance(record, Finished)
        )
        newest = deque(finished, 2 * SAMPLES)
        if len(newest) == 2 * SAMPLES:
            break
    return newest


RIGHT = Markup('<span class="good">right</span>')
WRONG = Markup('<span class="bad">wrong</span>')


def _rollout(tokenizer: Tokenizer, group: Group, rollout: Rollout, several_tasks: bool) -> Markup:
    versions = sorted({s.weight_version for s in rollout.segments if s.trained})
    parts = [Markup("{}").format(tokenizer.decode(group.prompt.tokens))]
    for segment in rollout.segments:
        text = tokenizer.continued(segment.tokens)[:MOST_CHARACTERS]
        colour = f"v{versions.index(segment.weight_version) % 2}" if segment.trained else "phrase"
        parts.append(Markup('<span class="{}">{}</span>').format(colour, text))
    facts = Markup(" · ").join(_facts(group, rollout, versions, several_tasks))
    return Markup('<p class="sub">{}</p><pre class="rollout">{}</pre>').format(
        facts, _joined(parts)
    )


def _facts(
    group: Group, rollout: Rollout, versions: Sequence[int], several_tasks: bool
) -> Iterable[str | Markup]:
    yield f"ticket {group.ticket}"
    if several_tasks:
        yield group.prompt.task
    yield RIGHT if rollout.correct else WRONG
    yield f"answer {' or '.join(group.prompt.answers)}"
    yield "weights " + "–".join(map(str, dict.fromkeys([*versions[:1], *versions[-1:]])))
    yield rollout.finish

"""Writes the model card of an exported directory: where the weights come from, how they
were trained, how well they score.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from megarl.core.base.rundir import RunDir, latest_rows
from megarl.core.models.checkpoint import CheckpointMeta

FILE = "README.md"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FOLDERS = ("runs", "models", "data")
"""Folders in which recipes and docs keep models: `models/Qwen3-8B` means a directory
even if it does not exist.
"""

UNITS = {"gpu": "GPU", "core": "core"}


def render(checkpoint: Path, meta: CheckpointMeta) -> str:
    """Return the text of README.md, with training and evaluation if the checkpoint lies
    in a run directory.
    """
    run = run_of(checkpoint)
    title = checkpoint.name
    recipe: dict[str, Any] = {}
    if run is not None:
        title = run.path.name
        recipe = yaml.safe_load(run.recipe.read_text()) or {}
    # A URL may contain a key, and a card is made to be published.
    recipe.get("data", {}).pop("services", None)
    base = str(recipe.get("model", {}).get("path") or meta.hf_source)
    base_model = [f"base_model: {base}"] if _is_hub_id(base) else []
    lines = ["---", *base_model, "library_name: transformers", "tags: [megarl]", "---", ""]
    lines += [f"# {title}", "", f"Weights of step {meta.step}, {meta.model['dtype']}."]
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| base model | {base} |",
        f"| optimiser steps | {meta.step} |",
    ]
    if run is not None:
        lines += [f"| {name} | {text} |" for name, text in _training(run, meta)]
        lines += [
            "",
            "## Recipe",
            "",
            "```yaml",
            yaml.safe_dump(recipe, sort_keys=False, width=120).rstrip(),
            "```",
        ]
    return "\n".join(lines) + "\n"


def run_of(checkpoint: Path) -> RunDir | None:
    """Return the run in which a checkpoint lies (RUN/checkpoints/step-N), or None."""
    folder = checkpoint.resolve().parent
    run = RunDir(folder.parent)
    is_in_run = folder == run.checkpoints and run.recipe.is_file()
    return run if is_in_run else None


def _is_hub_id(base: str) -> bool:
    """Return whether this is ORG/NAME on the hub, as a card's base_model must be,
    rather than a directory.
    """
    organisation, _, _ = base.partition("/")
    return (
        HUB_ID.fullmatch(base) is not None
        and organisation not in FOLDERS
        and not Path(base).exists()
    )


def _training(run: RunDir, meta: CheckpointMeta) -> list[tuple[str, str]]:
    """Return (name, text) pairs about the training up to this checkpoint."""
    # A row of metrics is of the step that leads to the next version; the `step` of an
    # evaluation is the version evaluated.
    rows = [row for row in latest_rows(run.metrics) if row["step"] < meta.step]
    evaluations = [row for row in latest_rows(run.eval) if row["step"] <= meta.step]
    facts = []
    if rows:
        last_row = rows[-1]
        unit = UNITS[last_row["compute_unit"]]
        tokens = sum(row["tokens_trained"] for row in rows)
        facts.append((f"{unit}-hours", f"{last_row['compute_hours']:.4g}"))
        facts.append(("tokens trained", f"{tokens:,.0f}"))
    if evaluations:
        last = evaluations[-1]
        score = f"pass rate {last['pass_rate']:.4g} at step {last['step']}"
        basis = f"mean of {last['samples']} samples on {last['n_prompts']} held-out prompts"
        facts.append(("evaluation", f"{score}: {basis}"))
    return facts

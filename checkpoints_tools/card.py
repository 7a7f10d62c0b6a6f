"""Writes the model card of an exported directory: where the weights come from, how they
were trained, how well they score.
"""

import re
from pathlib import Path

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
    recipe = yaml.safe_load(run.recipe.read_text()) or {} if run else {}
    recipe.get("data", {}).pop(
        "services", None
    )  # a URL may contain a key, and a card is made to be published
    base = str(recipe.get("model", {}).get("path") or meta.hf_source)
    hub = [f"base_model: {base}"] if _is_hub_id(base) else []
    lines = ["---", *hub, "library_name: transformers", "tags: [megarl]", "---", ""]
    lines += [
        f"# {run.path.name if run else checkpoint.name}",
        "",
        f"Weights of step {meta.step}, {meta.model['dtype']}.",
    ]
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
    run = RunDir(checkpoint.resolve().parent.parent)
    inside = checkpoint.resolve().parent == run.checkpoints and run.recipe.is_file()
    return run if inside else None


def _is_hub_id(base: str) -> bool:
    """Return whether this is ORG/NAME on the hub rather than a directory: base_model in
    a card's front matter must be.
    """
    organisation, _, _ = base.partition("/")
    return (
        HUB_ID.fullmatch(base) is not None
        and organisation not in FOLDERS
        and not Path(base).exists()
    )


def _training(run: RunDir, meta: CheckpointMeta) -> list[tuple[str, str]]:
    """Return (name, text) pairs about the training up to this checkpoint."""
    rows = [row for row in latest_rows(run.metrics) if row["step"] < meta.step]
    evaluations = [row for row in latest_rows(run.eval) if row["step"] <= meta.step]
    facts = []
    if rows:
        facts.append(
            (f"{UNITS[rows[-1]['compute_unit']]}-hours", f"{rows[-1]['compute_hours']:.4g}")
        )
        facts.append(("tokens trained", f"{sum(row['tokens_trained'] for row in rows):,.0f}"))
    if evaluations:
        last = evaluations[-1]
        basis = f"mean of {last['samples']} samples on {last['n_prompts']} held-out prompts"
        facts.append(
            ("evaluation", f"pass rate {last['pass_rate']:.4g} at step {last['step']}: {basis}")
        )
    return facts

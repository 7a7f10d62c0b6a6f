"""The model card of an exported directory: where the weights come from, how they were trained, how well they do."""

import re
from pathlib import Path

import yaml

from megarl.core.base.rundir import RunDir, latest_rows
from megarl.core.models.checkpoint import Meta

FILE = "README.md"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FOLDERS = ("runs", "models", "data")
"""Where models lie by the recipes and the docs: `models/Qwen3-8B` is a directory, also where it is not there."""

UNITS = {"gpu": "GPU", "core": "core"}


def render(checkpoint: Path, meta: Meta) -> str:
    """README.md. Training and evaluation only if the checkpoint lies in a run directory."""
    run = run_of(checkpoint)
    base = _base(run, meta)
    of_hub = [f"base_model: {base}"] if _is_hub_id(base) else []
    lines = ["---", *of_hub, "library_name: transformers", "tags: [megarl]", "---", ""]
    lines += [
        f"# {run.path.name if run else checkpoint.name}",
        "",
        f"Weights of step {meta.step}, {meta.model['dtype']}.",
    ]
    lines += ["", "| | |", "|---|---|", f"| base model | {base} |", f"| optimiser steps | {meta.step} |"]
    if run is not None:
        lines += [f"| {name} | {text} |" for name, text in _training(run, meta)]
    if run is not None:
        lines += ["", "## Recipe", "", "```yaml", run.recipe.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def run_of(checkpoint: Path) -> RunDir | None:
    """The run a checkpoint lies in (RUN/checkpoints/step-N), if it lies in one."""
    run = RunDir(checkpoint.resolve().parent.parent)
    inside = checkpoint.resolve().parent == run.checkpoints and run.recipe.is_file()
    return run if inside else None


def _base(run: RunDir | None, meta: Meta) -> str:
    if run is None:
        return meta.hf_source
    recipe = yaml.safe_load(run.recipe.read_text()) or {}
    return str(recipe.get("model", {}).get("path") or meta.hf_source)


def _is_hub_id(base: str) -> bool:
    """ORG/NAME, and no directory: the front matter of a card takes nothing else as base_model."""
    organisation, _, _ = base.partition("/")
    return HUB_ID.fullmatch(base) is not None and organisation not in FOLDERS and not Path(base).exists()


def _training(run: RunDir, meta: Meta) -> list[tuple[str, str]]:
    """Of the steps up to this checkpoint's."""
    recipe = yaml.safe_load(run.recipe.read_text()) or {}
    rows = [row for row in latest_rows(run.metrics) if row["step"] < meta.step]
    evaluations = [row for row in latest_rows(run.eval) if row["step"] <= meta.step]
    found = [("recipe", str(recipe.get("description") or run.path.name))]
    if rows:
        found.append((f"{UNITS[rows[-1]['compute_unit']]}-hours", f"{rows[-1]['compute_hours']:.4g}"))
        found.append(("tokens trained", f"{sum(row['tokens_trained'] for row in rows):,.0f}"))
    if evaluations:
        last = evaluations[-1]
        found.append(
            (
                "evaluation",
                f"pass rate {last['pass_rate']:.4g} at step {last['step']}: mean of {last['samples']} samples on "
                f"{last['n_prompts']} held-out prompts",
            )
        )
    return found

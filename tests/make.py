"""Makes what tests of several rooms need."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.checks import inputs
from megarl.checks.making import Facts
from megarl.core.base.types import Rollout, Segment, float32, int32
from megarl.core.recipe import Recipe, from_tree
from megarl.run.devices import HostBytes


def recipe(tree: Mapping[str, Any], **sections: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a tree in which keys of these sections are replaced."""
    changed = {name: tree.get(name, {}) | keys for name, keys in sections.items()}
    return from_tree({**tree, **changed})


def start_facts(recipe: Recipe) -> Facts:
    """What is known of a run whose inputs were not read and which needs no memory."""
    return inputs.facts_of(recipe) | {"fingerprints": {}, "host_bytes": HostBytes(0, 0)}


def segment(
    tokens: Sequence[int] | np.ndarray,
    version: int = 0,
    *,
    logprob: float = -1.0,
    trained: bool = True,
) -> Segment:
    """Return a segment of these tokens [n], which all have one log-prob."""
    return Segment(
        tokens=int32(tokens),
        logprobs=float32([logprob] * len(tokens)),
        weight_version=version,
        trained=trained,
    )


def rollout(*segments: Segment, reward: float, sample: int = 0, **fields: Any) -> Rollout:
    """Return a rollout that ended by itself. It is correct if its reward is positive,
    unless `fields` say otherwise.
    """
    usual: dict[str, Any] = {"correct": reward > 0, "finish": "stop"}
    return Rollout(sample=sample, segments=segments, reward=reward, **(usual | fields))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines; return their path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def edit_config(directory: Path, **changes: object) -> None:
    """Replace keys of a model directory's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

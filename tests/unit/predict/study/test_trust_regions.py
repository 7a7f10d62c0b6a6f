"""The arms of benchmarks/trust_regions differ from quickstart-moe only in the loss, and
have the papers' numbers.
"""

from pathlib import Path
from typing import Any

import pytest

from megarl.core.recipe import differences, load
from megarl.core.recipe.algorithm import LOSSES

ARMS = Path(__file__).parents[4] / "benchmarks" / "trust_regions"


def changed(arm: Path) -> dict[str, Any]:
    return {k: new for k, _, new in differences(load("quickstart-moe"), load(str(arm)))}


PAPERS = {
    "dppo-tv": {"loss.kind": "dppo", "loss.clip_low": 0.15, "loss.clip_high": 0.15},
    "dppo-kl": {
        "loss.kind": "dppo",
        "loss.divergence": "kl",
        "loss.clip_low": 0.05,
        "loss.clip_high": 0.05,
    },
    "prime-rl": {
        "loss.kind": "dppo",
        "loss.log_ratio_penalty": 1e-3,
    },  # 0.2 and 0.2 are the defaults
    "icepop": {
        "loss.kind": "clip",
        "loss.clip_high": 0.28,
        "loss.correction": "mask",
        "loss.lower": 0.5,
        "loss.cap": 5.0,
    },
    "gmpo": {
        "loss.kind": "gmpo",
        "loss.clip_low": 0.4,
        "loss.clip_high": 0.4,
        "batch.aggregation": "sample",
    },
}


@pytest.mark.parametrize("name", PAPERS)
def test_an_arm_has_its_papers_numbers(name: str) -> None:
    assert changed(ARMS / f"{name}.yaml") == PAPERS[name]


def test_arms_differ_in_the_loss_alone() -> None:
    arms = sorted(ARMS.glob("*.yaml"))
    assert changed(ARMS / "cispo.yaml") == {}
    assert {k for arm in arms for k in changed(arm) if not k.startswith("loss.")} == {
        "batch.aggregation"
    }
    assert {load(str(arm)).loss.kind for arm in arms} == {*LOSSES} - {"reinforce"}

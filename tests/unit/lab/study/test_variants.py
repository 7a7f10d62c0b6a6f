"""The variants of a study are what the paper left out, one at a time."""

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import differences, load
from megarl.lab.study.main import leave_one_out, side_by_side


def test_each_variant_changes_one_part() -> None:
    variants = leave_one_out("scalerl-8b", ["run.seed=5"])
    base = variants.pop("scalerl-8b")
    assert base == load("scalerl-8b", ["run.seed=5"])
    changed = {name: {key: new for key, _, new in differences(base, recipe)} for name, recipe in variants.items()}
    assert changed == {
        "prompt-level-advantage": {"batch.advantage": "group"},
        "length-penalty": {"length.control": "overlong_penalty"},
        "zero-variance-kept": {"batch.zero_variance": "keep"},
        "ppo-off-policy-8": {"pipeline.kind": "ppo-off-policy"},
        "no-fp32-head": {"model.fp32_head": "none"},
        "sample-average": {"batch.aggregation": "sample"},
        "positives-resampled": {"batch.positive_threshold": None},
        "dapo-loss": {"loss.kind": "clip", "loss.clip_high": 0.26},
    }


def test_variants_that_make_no_difference_are_left_out() -> None:
    names = leave_one_out("quickstart", ["batch.aggregation=sample"])
    assert "no-fp32-head" not in names  # all of it is float32
    assert "sample-average" not in names
    assert next(iter(names)) == "quickstart"


def test_recipes_of_one_name_are_refused() -> None:
    with pytest.raises(MegarlError, match="'grpo-tiny'"):
        side_by_side(["grpo-tiny", "dapo-tiny", "grpo-tiny"], [])

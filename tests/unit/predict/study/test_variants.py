"""The variants of a study are what the paper left out, one at a time."""

from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import differences, load, shipped_studies
from megarl.predict.study.files import opened, variants_of
from megarl.predict.study.running import side_by_side


def test_each_variant_changes_one_part() -> None:
    variants = variants_of("loo", "scalerl-8b", ["run.seed=5"])
    base = variants.pop("scalerl-8b")
    assert base == load("scalerl-8b", ["run.seed=5"])
    changed = {
        name: {key: new for key, _, new in differences(base, recipe)}
        for name, recipe in variants.items()
    }
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
    names = variants_of("loo", "quickstart", ["batch.aggregation=sample"])
    assert "no-fp32-head" not in names  # all of it is float32
    assert "sample-average" not in names
    assert next(iter(names)) == "quickstart"


SHIPPED = {"value-precision": "ppo-critic"} | dict.fromkeys(
    ("axes", "curriculum", "forward", "kl"), "scalerl-8b"
)


@pytest.mark.parametrize(("study", "recipe"), SHIPPED.items())
def test_the_variants_of_a_shipped_study_differ(study: str, recipe: str) -> None:
    """All of what it names are there, so each is a recipe, and no two are the same."""
    assert len(variants_of(study, recipe, [])) == 1 + len(opened(study).variants)


def test_all_shipped_studies_are_tested() -> None:
    assert set(shipped_studies()) == {"loo", *SHIPPED}


def test_axes_that_leave_the_batch_as_it_is() -> None:
    """arXiv 2510.13786, section 5: 8, 24 and 32 rollouts per prompt at a
    batch of 768.
    """
    sizes = {
        name: (
            r.sampling.generations,
            r.batch.prompts * r.sampling.generations,
            r.length.context_tokens,
        )
        for name, r in variants_of("axes", "scalerl-8b", []).items()
    }
    assert sizes == {
        "base": (16, 768, 16_096),
        "batch-512": (16, 512, 16_096),
        "batch-2048": (16, 2048, 16_096),
        "generations-8": (8, 768, 16_096),
        "generations-24": (24, 768, 16_096),
        "generations-32": (32, 768, 16_096),
        "context-32k": (16, 768, 32_096),
    }


def test_common_keys_lie_under_the_command_lines_and_these_under_a_variants() -> None:
    found = variants_of("forward", "quickstart", ["run.steps=7", "pipeline.k=2"])
    assert (found["base"].run.steps, found["base"].pipeline.k) == (7, 2)
    assert found["ppo-off-policy-1"].pipeline.k == 1
    assert not {"quickstart", "fp32-head"} & found.keys(), (
        "all of it is float32, and it is not the quickstart"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("variants: {}", "variants: name at least one"),
        ("variants: [a]", r"variants: should be a mapping, got \['a'\]"),
        ("variants: {a: 1}", "variants.a: should be a mapping, got 1"),
        ("variants: {a: {run.sede: 1}}", "variants.a: .*run.sede: unknown key; did you mean seed?"),
        (
            "variants: {quickstart: {run.seed: 1}}",
            "variants.quickstart: the recipe itself has this name",
        ),
        ("varants: {}", "varants: unknown key; a study file has common and variants"),
        (
            "common: {batch.prompts: 0}\nvariants: {a: {run.seed: 1}}",
            "batch.prompts: input should be greater",
        ),
        ("", "the file is empty"),
    ],
)
def test_a_study_file_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(MegarlError, match=said):
        variants_of(str(file), "quickstart", [])


def test_a_study_that_is_not_there() -> None:
    with pytest.raises(
        MegarlError, match=r"no study 'curiculum': .*\(axes, .*\); did you mean curriculum\?"
    ):
        variants_of("curiculum", "quickstart", [])


def test_recipes_of_one_name_are_refused() -> None:
    with pytest.raises(MegarlError, match="'grpo'"):
        side_by_side(["grpo", "dapo", "grpo"], [])

"""The shipped recipes load, and say ScaleRL's numbers where they must."""

import pytest

from megarl.data import arithmetic
from megarl.recipe import Recipe, load, shipped

DEFAULT = Recipe()


@pytest.mark.parametrize("name", shipped())
def test_it_loads_describes_itself_and_is_named_after_its_file(name):
    recipe = load(name)
    assert 20 < len(recipe.description) < 110
    assert recipe.run.name == name
    assert recipe.sft.output == recipe.model.path


@pytest.mark.parametrize("name", shipped())
def test_the_structure_is_scalerls(name):
    recipe = load(name)
    assert recipe.pipeline.k == 8
    assert recipe.loss == DEFAULT.loss
    assert recipe.model.fp32_head
    for key in ("zero_variance", "positive_threshold", "advantage", "aggregation"):
        assert getattr(recipe.batch, key) == getattr(DEFAULT.batch, key)
    for key in ("betas", "eps", "weight_decay", "grad_clip"):
        assert getattr(recipe.learner.optimizer, key) == getattr(DEFAULT.learner.optimizer, key)


def test_scalerl_8b_is_the_papers():
    """arXiv 2510.13786: 64 + 16 GPUs, 48 x 16 rollouts, lr 5e-7 after 100 steps, 10k-12k thinking, mean@16 on 1,000 prompts."""
    r = load("scalerl-8b")
    assert (r.resources.servers * r.resources.server_tensor_parallel, r.resources.learner_ranks) == (64, 16)
    assert (r.batch.prompts, r.sampling.generations) == (48, 16)
    assert (r.learner.optimizer.lr, r.learner.optimizer.warmup_steps) == (5e-7, 100)
    assert (r.length.prompt_tokens, r.length.thinking_tokens, r.length.answer_tokens) == (2048, (10_000, 12_000), 2048)
    assert (r.evaluation.every, r.evaluation.prompts, r.evaluation.samples) == (100, 1000, 16)
    assert (r.sft.batch_tokens, r.sft.optimizer.lr, r.sft.max_length) == (2_000_000, 3e-5, 12_288)
    assert r.model.dtype == "bf16"


def test_scalerl_17bx16_is_the_papers_where_it_differs_from_8b():
    """arXiv 2510.13786: 7,100 steps; the same 80 GPUs and hyperparameters."""
    r, dense = load("scalerl-17bx16"), load("scalerl-8b")
    assert (r.resources.servers * r.resources.server_tensor_parallel, r.resources.learner_ranks) == (64, 16)
    assert r.run.steps == 7100
    assert (r.batch, r.length, r.learner, r.sampling, r.evaluation) == (
        dense.batch, dense.length, dense.learner, dense.sampling, dense.evaluation,
    )  # fmt: skip
    assert r.model.moe == DEFAULT.model.moe


def test_the_quickstart_fits_its_task_and_its_machine():
    r = load("quickstart")
    assert r.evaluation.prompts <= arithmetic.HELDOUT_PROMPTS
    assert r.resources.learner_ranks + r.resources.servers == 2  # cores
    assert r.model.dtype == "fp32"
    longest = r.length.context_tokens + len("...") + 1
    assert r.serving.kv_tokens >= r.serving.max_running_requests * longest
    assert r.sft.max_length >= longest

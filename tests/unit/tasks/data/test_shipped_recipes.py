"""The shipped recipes load, and say ScaleRL's numbers and those of its baselines where
they must.
"""

import pytest

from megarl.core.base import architecture
from megarl.core.recipe import Recipe, load, shipped
from megarl.predict.scaling.published import law_named
from megarl.run.devices import needed
from megarl.tasks.data import arithmetic_models
from megarl.tasks.data.traces import MAX_TOKENS

DEFAULT = Recipe()


@pytest.mark.parametrize("name", shipped())
def test_it_loads_describes_itself_and_is_named_after_its_file(name: str) -> None:
    recipe = load(name)
    described = shipped()[name].read_text().partition("\n")[0]
    assert described.startswith("# ")
    assert 20 < len(described) < 115
    assert recipe.run.name == name
    assert not recipe.sft.init or recipe.model.path.endswith("-sft"), (
        "the warm start writes model.path"
    )


@pytest.mark.parametrize(
    "name", [name for name in shipped() if name.startswith(("scalerl-", "quickstart"))]
)
def test_the_structure_is_scalerls(name: str) -> None:
    recipe = load(name)
    assert recipe.pipeline.k == (2 if name == "quickstart-real" else 8), (
        "8 of sixty steps would be too many"
    )
    assert recipe.loss == DEFAULT.loss
    assert recipe.model.fp32_head == "both"
    assert recipe.reference.coefficient == recipe.loss.entropy_bonus == 0
    for key in ("zero_variance", "positive_threshold", "advantage", "aggregation"):
        assert getattr(recipe.batch, key) == getattr(DEFAULT.batch, key)
    assert recipe.learner.optimizer.grad_clip == DEFAULT.learner.optimizer.grad_clip


BASELINES = {
    # phases or PipelineRL, k; loss, its bounds; aggregation, advantage; FP32 head;
    # prompts of 8B
    "grpo": ("ppo-off-policy", 8, "clip", (0.2, 0.2), "sample", "group", "none", 48),
    "dapo": ("ppo-off-policy", 8, "clip", (0.2, 0.26), "prompt", "group", "none", 80),
    "magistral": ("pipeline-rl", 8, "clip", (0.2, 0.26), "prompt", "batch", "none", 80),
    "minimax-m1": ("ppo-off-policy", 8, "cispo", (0.0, 5.0), "prompt", "group", "both", 80),
    "gspo": ("pipeline-rl", 8, "gspo", (3e-3, 5e-3), "sample", "group", "none", 48),
    "dr-grpo": ("ppo-off-policy", 1, "clip", (0.2, 0.2), "constant", "none", "none", 48),
}
"""arXiv 2510.13786, the baselines of its comparison of recipes and losses; Dr. GRPO:
arXiv 2503.20783.
"""


@pytest.mark.parametrize("base", ["scalerl-8b", "quickstart"])
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_its_paper_and_otherwise_the_scalerl_of_its_size(
    name: str, base: str
) -> None:
    r = load(name, [f"base={base}"])
    scalerl = load(base)
    bounds = (0, r.loss.cap) if r.loss.kind == "cispo" else (r.loss.clip_low, r.loss.clip_high)
    assert (
        r.pipeline.kind,
        r.pipeline.k,
        r.loss.kind,
        bounds,
        r.batch.aggregation,
        r.batch.advantage,
        r.model.fp32_head,
    ) == BASELINES[name][:-1]
    assert r.batch.prompts == BASELINES[name][-1] // (1 if base == "scalerl-8b" else 2)
    assert r.batch.positive_threshold is None
    assert (r.loss.correction, r.loss.entropy_bonus, r.batch.centring) == ("none", 0.0, "group")
    assert r.reference.coefficient == 0
    for section in ("data", "sampling", "learner", "weights", "serving", "evaluation", "sft"):
        assert getattr(r, section) == getattr(scalerl, section)
    assert needed(r) == needed(scalerl)
    assert r.length.completion_tokens == scalerl.length.completion_tokens
    assert r.length.control == (
        "overlong_penalty" if name in ("dapo", "magistral") else "interruption"
    )
    assert r.model.path == scalerl.model.path


@pytest.mark.parametrize("base", ["scalerl-8b", "quickstart"])
def test_ppo_with_a_critic_is_as_it_is_usually_given_and_otherwise_the_scalerl_of_its_size(
    base: str,
) -> None:
    r = load("ppo-critic", [f"base={base}"])
    scalerl = load(base)
    assert r.has_critic
    assert (r.pipeline.kind, r.batch.aggregation, r.batch.zero_variance) == (
        "ppo-off-policy",
        "token",
        "keep",
    )
    assert (r.loss.kind, r.loss.clip_low, r.loss.clip_high, r.loss.entropy_bonus) == (
        "clip",
        0.2,
        0.2,
        0.01,
    )
    assert r.batch.advantage == "running"
    assert 0.01 <= r.reference.coefficient <= 0.1
    for optimizer in (r.learner.optimizer, r.critic_optimizer):
        assert (optimizer.schedule, optimizer.grad_clip) == ("cosine", 1.0)
    assert 2 <= r.learner.epochs <= 8
    for section in ("data", "length", "sampling", "weights", "serving", "evaluation", "sft"):
        assert getattr(r, section) == getattr(scalerl, section)
    wider = {"tensor_parallel": r.model.tensor_parallel}  # its ranks hold two networks
    assert r.model == scalerl.model.model_copy(update=wider)
    assert needed(r) == needed(scalerl)


def test_scalerl_8b_is_the_papers() -> None:
    """arXiv 2510.13786: 80 GPUs, 48 x 16 rollouts, lr 5e-7 after 100 steps, 10k-12k
    thinking, mean@16 on 1,000 prompts.
    """
    r = load("scalerl-8b")
    assert needed(r) == 80
    assert (r.batch.prompts, r.sampling.generations) == (48, 16)
    epochs = r.run.steps * r.batch.prompts / 52_000
    assert epochs * 1500 == pytest.approx(16_000, rel=0.02), (
        "an epoch takes about 1,500 of the leave-one-out runs' GPU-hours"
    )
    assert r.batch.truncated == "drop"
    assert (r.learner.optimizer.lr, r.learner.optimizer.warmup_steps) == (5e-7, 100)
    assert (r.length.prompt_tokens, r.length.thinking_tokens, r.length.answer_tokens) == (
        2048,
        (10_000, 12_000),
        2048,
    )
    assert (r.evaluation.every, r.evaluation.prompts, r.evaluation.samples) == (100, 1000, 16)
    assert (r.sft.batch_tokens, r.sft.optimizer.lr, MAX_TOKENS) == (2_000_000, 3e-5, 12_288)
    assert r.sft.steps * r.sft.batch_tokens == 32_000_000_000
    assert r.model.dtype == "bf16"


def test_scalerl_17bx16_is_the_papers_where_it_differs_from_8b() -> None:
    """arXiv 2510.13786: 7,100 steps; as many GPUs, and the same hyperparameters."""
    r = load("scalerl-17bx16")
    dense = load("scalerl-8b")
    assert needed(r) == 80
    assert r.run.steps == 7100
    assert (r.batch, r.length, r.learner, r.sampling, r.evaluation) == (
        dense.batch,
        dense.length,
        dense.learner,
        dense.sampling,
        dense.evaluation,
    )
    assert r.model.moe == DEFAULT.model.moe


def test_the_17bx16_of_h100_differs_only_in_its_layout() -> None:
    """Which is two sections of the recipe, and what the learner computes again."""
    r = load("scalerl-17bx16-h100")
    base = load("scalerl-17bx16")
    layout = {"tensor_parallel": 4, "pipeline_parallel": 4, "expert_parallel": 8}
    assert r.model == base.model.model_copy(update=layout)
    assert r.learner == base.learner.model_copy(update={"recompute": "full"})
    for section in Recipe.model_fields.keys() - {"run", "model", "resources", "learner"}:
        assert getattr(r, section) == getattr(base, section)
    assert needed(r) == needed(base)


def test_scalerl_8b_32k_is_scalerl_8b_with_the_papers_longer_context() -> None:
    """32,768 tokens, with room for the phrase; a micro-batch holds one rollout; all
    else is as it was.
    """
    r = load("scalerl-8b-32k")
    base = load("scalerl-8b")
    assert r.length == base.length.model_copy(update={"thinking_tokens": (26_000, 28_000)})
    assert (r.length.context_tokens, r.learner.microbatch_tokens) == (32_768 - 672, 32_768)
    assert r.learner == base.learner.model_copy(update={"microbatch_tokens": 32_768})
    for section in Recipe.model_fields.keys() - {"run", "length", "learner", "model", "resources"}:
        assert getattr(r, section) == getattr(base, section)
    assert r.model == base.model.model_copy(update={"tensor_parallel": 4})
    assert needed(r) == needed(base)
    assert r.run.model_copy(update={"name": base.run.name}) == base.run


def test_scalerl_8b_batch_2048_is_the_papers_longest_run() -> None:
    r = load("scalerl-8b-batch-2048")
    base = load("scalerl-8b")
    assert (r.batch.prompts * r.sampling.generations, r.run.steps) == (2048, 7400)
    assert r.batch == base.batch.model_copy(update={"prompts": 128})
    for section in Recipe.model_fields.keys() - {"run", "batch", "resources"}:
        assert getattr(r, section) == getattr(base, section)
    assert needed(r) == needed(base)


@pytest.mark.parametrize(
    ("name", "law"), [("scalerl-8b-32k", "context-32k"), ("scalerl-8b-batch-2048", "batch-2048")]
)
def test_the_fits_that_a_recipe_names_are_the_published_ones(name: str, law: str) -> None:
    said = " ".join(shipped()[name].read_text().replace("#", "").split())
    fit = law_named(law)
    base = law_named("scalerl-8b")
    assert f"C_mid {fit.C_mid:,.0f} GPU-hours instead of {base.C_mid:,.0f}" in said
    assert f"an asymptote of {fit.A:.3f} instead of {base.A:.3f}".replace("0.", ".") in said


def test_math_and_code_is_scalerl_8b_with_a_second_task() -> None:
    r = load("scalerl-8b-math-code")
    math = load("scalerl-8b")
    assert {name: task.grader for name, task in r.data.tasks.items()} == {
        "math": "math",
        "code": "code",
    }
    assert r.data.sandbox == "bubblewrap"
    for section in Recipe.model_fields.keys() - {"run", "data", "evaluation"}:
        assert getattr(r, section) == getattr(math, section)
    assert r.evaluation == math.evaluation.model_copy(update={"forecast": "math"})
    assert r.run.model_copy(update={"name": math.run.name}) == math.run


def test_one_gpu_is_all_that_scalerl_1gpu_needs() -> None:
    r = load("scalerl-1gpu")
    assert (r.resources.servers, r.resources.server_tensor_parallel, r.resources.learner_ranks) == (
        1,
        1,
        1,
    )
    assert (r.resources.colocate, r.weights.transport) == (True, "cuda_ipc")
    assert isinstance(r.learner.microbatch_tokens, int)
    assert r.learner.microbatch_tokens >= r.length.context_tokens
    assert r.length.end_of_thinking == DEFAULT.length.end_of_thinking


@pytest.mark.parametrize("name", ["quickstart", "quickstart-tools"])
def test_the_quickstart_fits_its_task_and_its_machine(name: str) -> None:
    r = load(name)
    assert r.evaluation.prompts <= arithmetic_models.HELDOUT_PROMPTS
    assert r.resources.learner_ranks + r.resources.servers == 2  # cores
    assert r.model.dtype == "fp32"
    longest = r.length.context_tokens + len("...") + 1
    assert r.serving.kv_tokens is not None
    assert r.serving.kv_tokens >= r.serving.max_running_requests * longest


def test_the_experts_of_all_tokens_of_a_run_are_not_kept() -> None:
    """48 layers x 8 of 128 experts, one byte each: 500 steps would take a terabyte
    beside 1.3 TB of checkpoints.
    """
    r = load("qwen3-30b-a3b-2nodes")
    shape = architecture.read("qwen3-30b-a3b")
    assert r.model.moe.routing_replay
    token = 8 + shape.moe_layers * shape.experts_per_token
    step = (
        r.batch.prompts * r.sampling.generations * r.length.completion_tokens / 2 * token
    )  # `megarl plan`'s mean length
    assert 1.8e9 < step < 2.5e9
    assert r.journal.keep == "checkpoints"

"""What cannot go together in a recipe is refused, with its keys; its neighbours are
not.
"""

from typing import Any

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import from_tree
from megarl.core.recipe.data import ENVIRONMENTS
from megarl.tasks.environments.registry import BUILT_IN

Tree = dict[str, Any]


def stage(until_step: int, *thinking_tokens: int) -> Tree:
    return {"until_step": until_step, "thinking_tokens": list(thinking_tokens)}


def shared(**sections: Tree) -> Tree:
    """A recipe whose server and learner share GPUs, but for these sections."""
    tree = {
        "resources": {"colocate": True},
        "weights": {"transport": "cuda_ipc"},
        "serving": {"memory_fraction": 0.4},
    }
    return tree | sections


def by_agent(**sections: Tree) -> Tree:
    task: Tree = {"train": "x", "heldout": "y", "grader": "exact", "agent": "mine:solve"}
    return {"data": {"tasks": {"t": task}}, "length": {"control": "none"}} | sections


def distilled(**sections: Tree) -> Tree:
    """A recipe with a teacher, but for these sections."""
    return {
        "teacher": {"url": "http://t", "weight": 1.0},
        "batch": {"zero_variance": "keep"},
    } | sections


SEVERAL = {"tasks": {name: {"train": "", "heldout": ""} for name in ("math", "code")}}
IMPOSSIBLE = [
    (
        {"data": SEVERAL, "run": {"stop_when": "gain < 1e-5 per GPU-hour"}},
        "run.stop_when: one of the tasks (math, code) must decide",
    ),
    (
        {"data": SEVERAL, "evaluation": {"forecast": "cod"}},
        (
            "evaluation.forecast: 'cod' is neither a task nor a suite of this recipe; did you mean"
            " code? known: math, code"
        ),
    ),
    (
        {"batch": {"centring": "none", "advantage": "group"}},
        "batch.advantage: a group without variance",
    ),
    (
        {"model": {"dtype": "fp16"}, "serving": {"quantization": "fp8"}},
        "serving.quantization: FP8 products give bf16 numbers; set model.dtype=bf16",
    ),
    (
        {"model": {"dtype": "fp32"}, "serving": {"kv_cache_dtype": "fp8_e4m3"}},
        "serving.kv_cache_dtype: fp8_e4m3 goes with bf16; set model.dtype=bf16",
    ),
    (
        {"serving": {"expert_parallel": True}},
        "serving.expert_parallel: divides the experts among a server's GPUs, and with",
    ),
    (
        {"serving": {"attention_copies": 3}, "resources": {"server_tensor_parallel": 4}},
        "serving.attention_copies: 3 copies cannot have equally many of a server's 4 GPUs",
    ),
    (
        {
            "serving": {"attention_copies": 8, "max_running_requests": 7},
            "resources": {"server_tensor_parallel": 8},
        },
        "serving.max_running_requests: 7 requests are fewer than the copies of the attention",
    ),
    (
        {"model": {"dtype": "fp32"}, "learner": {"optimizer_offload": 0.5}},
        "learner.optimizer_offload: megatron-core cannot load",
    ),
    (
        {"batch": {"truncated": "drop"}, "reference": {"coefficient": 0.01}},
        "batch.truncated: the reference scores only rollouts in the loss, so that k1",
    ),
    (
        {"batch": {"centring": "critic"}},
        "batch.zero_variance: with a critic a group of equal rewards has a gradient",
    ),
    (
        {"batch": {"centring": "critic", "zero_variance": "keep", "advantage": "group"}},
        "batch.advantage: a critic gives each token its advantage",
    ),
    (
        {"batch": {"centring": "critic", "zero_variance": "keep"}, "critic": {"warmup_steps": 400}},
        (
            "critic.warmup_steps: a warm-up of 400 steps leaves none of run.steps=400 to train the"
            " policy in"
        ),
    ),
    (
        {"loss": {"correction": "mask"}},
        "loss.correction: cispo already truncates the importance weight",
    ),
    (
        {"loss": {"kind": "gspo", "correction": "truncate"}},
        "loss.correction: gspo has one weight per sequence",
    ),
    (
        {"loss": {"kind": "gmpo", "correction": "truncate"}},
        "loss.correction: gmpo has one weight per sequence",
    ),
    (
        {"loss": {"kind": "gmpo"}, "batch": {"centring": "critic", "zero_variance": "keep"}},
        "loss.kind: gmpo needs one advantage per rollout, but a critic",
    ),
    (
        {"loss": {"lower": 0.1}},
        "loss.lower: needs loss.correction=mask, and a value below loss.cap (4)",
    ),
    (
        {"loss": {"kind": "clip", "correction": "mask", "lower": 5.0, "cap": 2.0}},
        "loss.lower: needs loss.correction=mask, and a value below loss.cap (2)",
    ),
    ({"loss": {"sequence_mask": [1.0, 1.01]}}, "loss.sequence_mask: give [low, high] around 1"),
    (distilled(teacher={"weight": 1.0}), "teacher.url: teacher.weight above 0 needs a teacher"),
    (
        distilled(batch={}),
        (
            "batch.zero_variance: with a teacher a group of equal rewards has a gradient too; set"
            " keep, not drop"
        ),
    ),
    (
        distilled(batch={"zero_variance": "keep", "centring": "critic"}),
        "teacher.weight: with batch.centring=critic the critic gives tokens their advantages",
    ),
    (
        distilled(loss={"kind": "gmpo"}),
        "loss.kind: gmpo needs one advantage per rollout, but a teacher",
    ),
    (
        by_agent(agent={"credit": "turn"}, batch={"centring": "critic"}),
        "agent.credit: with batch.centring=critic the critic gives turns their advantages",
    ),
    (
        by_agent(agent={"credit": "turn"}, loss={"kind": "gmpo"}),
        "agent.credit: gmpo needs one advantage per rollout",
    ),
    (
        distilled(sampling={"temperature": 0.9}),
        "sampling.temperature: the teacher scores at temperature 1",
    ),
    (
        {"run": {"steps": 100}, "learner": {"optimizer": {"schedule": "cosine"}}},
        "learner.optimizer.warmup_steps: a warm-up of 100 steps leaves none of run.steps=100",
    ),
    (
        {
            "run": {"steps": 140},
            "learner": {"optimizer": {"schedule": "cosine"}},
            "critic": {"warmup_steps": 50},
            "batch": {"centring": "critic", "zero_variance": "keep"},
        },
        (
            "a warm-up of 150 steps leaves none of run.steps=140 for the schedule cosine"
            " (critic.warmup_steps included)"
        ),
    ),
    (
        {"data": {"tasks": {"math": {"train": "lm-eval:arc_easy", "heldout": ""}}}},
        "data.tasks.math.train: lm-eval:arc_easy is a task of lm-eval, which only",
    ),
    ({"monitor": {"profile_steps": [3, 2]}}, "monitor.profile_steps: should be [first, last]"),
    ({"model": {"tensor_parallel": 2}}, "resources.learner_ranks: 1 ranks do not divide"),
    (
        {"model": {"virtual_pipeline_parallel": 2}},
        "model.virtual_pipeline_parallel: needs model.pipeline_parallel",
    ),
    (
        {
            "model": {"tensor_parallel": 2, "expert_tensor_parallel": 4},
            "resources": {"learner_ranks": 2},
        },
        (
            "resources.learner_ranks: 2 ranks do not divide into copies of the experts of EP x ETP"
            " x PP = 4 ranks"
        ),
    ),
    (
        {"model": {"moe": {"aux_loss": 1e-3, "freeze_router": True}}},
        "model.moe.aux_loss: balances by training the router",
    ),
    (
        {"model": {"moe": {"shared_overlap": True}}},
        (
            "model.moe.shared_overlap: hides the exchange of tokens between ranks, and with"
            " model.expert_parallel of 1"
        ),
    ),
    (
        {"batch": {"prompts": 7}, "resources": {"learner_ranks": 2}},
        "batch.prompts: 7 is not divisible by the 2 data-parallel",
    ),
    ({"length": {"thinking_tokens": [9, 5]}}, "length.thinking_tokens: give [shortest, longest]"),
    ({"length": {"thinking_tokens": [0, 5]}}, "length.thinking_tokens: give [shortest, longest]"),
    (
        {"length": {"stages": [stage(5, 1, 8), stage(5, 1, 9)]}},
        "length.stages: until_step must rise from stage to stage; it is 5, 5",
    ),
    (
        {"length": {"stages": [stage(5, 1, 9), stage(7, 1, 8)], "thinking_tokens": [3, 10]}},
        (
            "length.stages: budgets must not fall, up to length.thinking_tokens; the longest are 9,"
            " 8, 10"
        ),
    ),
    (
        {"length": {"stages": [stage(5, 1, 20)], "thinking_tokens": [3, 10]}},
        (
            "length.stages: budgets must not fall, up to length.thinking_tokens; the longest are"
            " 20, 10"
        ),
    ),
    (
        {"length": {"stages": [stage(5, 9, 8)]}},
        "length.stages: give [shortest, longest], 1 or more",
    ),
    (
        {"length": {"interruption": "stop"}},
        "length.interruption: must end with length.end_of_thinking",
    ),
    (
        {"length": {"end_of_thinking": ""}},
        "length.end_of_thinking: is empty, so no thinking trace is ever interrupted",
    ),
    (
        {"length": {"end_of_thinking": "\n", "interruption": "\n", "control": "none"}},
        "length.end_of_thinking: '\\n' is only white space",
    ),
    (
        {"weights": {"transport": "cuda_ipc"}},
        "weights.transport: cuda_ipc shares memory within a GPU, but learner",
    ),
    (
        {"resources": {"colocate": True}, "serving": {"memory_fraction": 0.4}},
        (
            "weights.transport: with resources.colocate server and learner share a GPU, and NCCL"
            " cannot connect two processes on one GPU; set weights.transport=cuda_ipc"
        ),
    ),
    (
        shared(serving={}),
        "serving.memory_fraction: with resources.colocate say which share of a GPU",
    ),
    (
        {"loss": {"kind": "cispp"}},
        (
            "loss.kind: unknown loss 'cispp'; did you mean cispo? known: cispo, clip, dppo, gmpo,"
            " gspo, rei"
        ),
    ),
    (
        {"loss": {"kind": "grpo"}},
        ("loss.kind: 'grpo' is not a loss but an algorithm: GRPO's loss is clip; the recipe grpo"),
    ),
    ({"loss": {"kind": "mine:loss", "correction": "mask"}}, "loss.correction: your own loss"),
    (
        shared(resources={"colocate": True, "servers": 2}),
        "resources.colocate: each GPU has a learner rank",
    ),
    (
        shared(
            resources={"colocate": True, "servers": 2, "learner_ranks": 2},
            model={"pipeline_parallel": 2},
        ),
        "weights.transport: cuda_ipc shares memory within a GPU, but with model.pipeline_parallel",
    ),
]


@pytest.mark.parametrize(("tree", "said"), IMPOSSIBLE)
def test_impossible_combinations(tree: Tree, said: str) -> None:
    with pytest.raises(MegarlError) as error:
        from_tree(tree)
    assert said in str(error.value)


def test_servers_in_fp8_go_with_bf16() -> None:
    serving = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    recipe = from_tree({"serving": serving})
    assert recipe.serving.fp8_keys == ("serving.quantization", "serving.kv_cache_dtype")


def test_all_impossible_combinations_are_said_at_once() -> None:
    with pytest.raises(MegarlError) as error:
        from_tree({"loss": {"kind": "cispp"}, "model": {"tensor_parallel": 2}})
    first, second = str(error.value).splitlines()
    assert first.startswith("recipe: loss.kind: unknown loss 'cispp'")
    assert second.startswith("recipe: resources.learner_ranks: 1 ranks do not divide")


def test_neighbours_of_the_impossible_are_possible() -> None:
    from_tree(
        {
            "model": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
            "resources": {"learner_ranks": 2},
        }
    )
    from_tree(
        {
            "model": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
            "resources": {"learner_ranks": 2},
        }
    )
    from_tree({"pipeline": {"k": 0}})
    run = {"stop_when": "gain < 1e-5 per GPU-hour"}
    stopped = {"data": SEVERAL, "evaluation": {"forecast": "code", "top_p": 0.95}, "run": run}
    assert from_tree(stopped).forecast_column == "pass_rate/code"
    assert (
        from_tree({"data": {"tasks": {"math": SEVERAL["tasks"]["math"]}}}).forecast_column
        == "pass_rate"
    )
    for pipeline, lends in (
        ({"k": 0}, True),
        ({"kind": "ppo-off-policy", "k": 8}, True),
        ({"k": 1}, False),
    ):
        assert from_tree(shared(pipeline=pipeline)).lends_memory is lends
    assert not from_tree({"pipeline": {"k": 0}}).lends_memory
    from_tree(shared(weights={"transport": "disk"}))
    from_tree(distilled(teacher={"url": "http://t"}, batch={}))
    from_tree({"loss": {"kind": "clip", "correction": "mask", "lower": 0.5}})
    from_tree({"loss": {"sequence_mask": [0.99, 1.01]}})


def played(**keys: Any) -> dict[str, Any]:
    return {
        "data": {"tasks": {"math": {"train": "a", "heldout": "b", "environment": "python"} | keys}}
    }


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            played(grader="code"),
            "data.tasks.math.environment: python runs every turn that has a program in it",
        ),
        (
            played(reply_tokens=40) | {"length": {"thinking_tokens": [40, 48]}},
            (
                "data.tasks.math.reply_tokens: a reply of 40 tokens leaves nothing of the shortest"
                " budget .* which is 40"
            ),
        ),
        (
            played(reply_tokens=9)
            | {"length": {"thinking_tokens": [40, 48], "stages": [stage(3, 7, 9)]}},
            "leaves nothing of the shortest budget for thinking and replies, which is 7",
        ),
    ],
)
def test_environments_that_cannot_work(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(MegarlError, match=said):
        from_tree(tree)


def test_environments_that_work() -> None:
    assert tuple(BUILT_IN) == ENVIRONMENTS
    for name in (*ENVIRONMENTS, "my.games:Chess"):
        assert from_tree(played(environment=name)).data.tasks["math"].environment == name
    control = {"length": {"control": "none", "thinking_tokens": [40, 48], "answer_tokens": 20}}
    assert from_tree(played(reply_tokens=50) | control).length.control == "none", (
        "one budget for both"
    )

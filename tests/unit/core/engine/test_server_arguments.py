"""What SGLang is started with, and what is refused before it is."""

import inspect
import json
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core.base.architecture import read
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.rundir import Meeting
from megarl.core.client import servable
from megarl.core.client.client import TOP_K_WITH_TOP_P
from megarl.core.client.servable import check, check_gpus
from megarl.core.engine import launch, states
from megarl.core.engine.launch import (
    engine_arguments,
    environment,
    memory_arguments,
    node_arguments,
    precision_arguments,
)
from megarl.core.recipe import Recipe
from megarl.core.recipe.model import FP8_BLOCK
from megarl.core.sync.block_fp8 import BLOCK
from tests import make

LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
BINDING = "SGLANG_NUMA_BIND_V2"
PERMUTED = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def a_recipe(
    path: Path, positions: int = 512, config: dict[str, Any] | None = None, **sections: Any
) -> Recipe:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(
        json.dumps(SIZES | {"max_position_embeddings": positions} | (config or {}))
    )
    tree = {
        "model": {"path": str(path)},
        "length": {"prompt_tokens": 100, "thinking_tokens": [100, 200], "answer_tokens": 100},
        "serving": {"kv_tokens": 4096},
    }
    return make.recipe(tree, **sections)


def test_arguments_follow_the_recipe(tmp_path: Path) -> None:
    recipe = a_recipe(
        tmp_path,
        model={"dtype": "fp32", "path": str(tmp_path), "fp32_head": "learner"},
        run={"seed": 2},
    )
    arguments = engine_arguments(recipe, 3, "127.0.0.1", 1234, cuda=False)
    wanted = {
        "dtype": "float32",
        "enable_fp32_lm_head": False,
        "device": "cpu",
        "port": 1234,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "max_total_tokens": 4096,
        "context_length": 400 + len(recipe.length.interruption) + KEPT_FROM_INPUT,
    }
    assert {k: arguments[k] for k in wanted} == wanted
    others = [
        engine_arguments(recipe, i, "127.0.0.1", 1, cuda=False)["random_seed"] for i in range(3)
    ]
    assert len({arguments["random_seed"], *others}) == 4


@pytest.mark.parametrize(
    ("side", "here"), [("both", True), ("server", True), ("learner", False), ("none", False)]
)
def test_the_head_is_float32_where_the_recipe_says_the_server(
    tmp_path: Path, side: str, here: bool
) -> None:
    recipe = a_recipe(tmp_path, model={"path": str(tmp_path), "fp32_head": side})
    assert engine_arguments(recipe, 0, "127.0.0.1", 1, cuda=True)["enable_fp32_lm_head"] is here


def test_tokens_that_tie_with_the_last_of_the_top_k_do_not_end_a_request(tmp_path: Path) -> None:
    """A GPU's sampler keeps them all, and SGLang aborts a request with more tokens than
    this.
    """
    from sglang.srt.layers.sampler import Sampler, SamplingMaskStatus, _SamplingMaskCapture

    most = engine_arguments(a_recipe(tmp_path), 0, "127.0.0.1", 1, cuda=True)[
        "sampling_mask_max_tokens"
    ]
    kept = TOP_K_WITH_TOP_P + 500
    weights = torch.nn.functional.pad(torch.full((1, kept), 1 / kept), (0, 10_000))
    capture = _SamplingMaskCapture(
        weights, token_ids=None, selected_weight=None, batch_rows=torch.tensor([0])
    )
    for limit, status in (
        (most, SamplingMaskStatus.OK),
        (TOP_K_WITH_TOP_P, SamplingMaskStatus.OVERFLOW),
    ):
        sampler = SimpleNamespace(sampling_mask_max_tokens=limit)
        said = Sampler._build_sampling_mask_output(sampler, torch.tensor([7]), capture, None)
        assert said.statuses.tolist() == [status]
        assert said.selected_logprobs.exp().item() == pytest.approx(1 / kept)


def test_prefills_replay_no_graphs_on_a_gpu(tmp_path: Path) -> None:
    assert (
        engine_arguments(a_recipe(tmp_path), 0, "127.0.0.1", 1, cuda=True)[
            "cuda_graph_backend_prefill"
        ]
        == "disabled"
    )


@pytest.mark.parametrize(
    ("kv_tokens", "held", "enough"),
    [(None, 488, True), (None, 487, False), (450, 450, True), (450, 384, False)],
)
def test_a_kv_cache_without_room_for_the_longest_sequence_is_refused(
    tmp_path: Path, kv_tokens: int | None, held: int, enough: bool
) -> None:
    """SGLang only warns. It would cut long requests short and refuse to continue them:
    their tickets would be void.
    """
    recipe = a_recipe(tmp_path, serving={"kv_tokens": kv_tokens})
    context = engine_arguments(recipe, 0, "127.0.0.1", 1, cuda=True)["context_length"]
    assert context == 488
    most_input = min(context, held) - 1 - 5  # as SGLang computes max_req_input_len
    with (
        nullcontext()
        if enough
        else pytest.raises(MegarlError, match=f"serving: .* has {held} tokens, and the longest")
    ):
        launch.check_kv(recipe, most_input)


def test_context_does_not_exceed_the_model(tmp_path: Path) -> None:
    assert (
        engine_arguments(a_recipe(tmp_path, 410), 0, "127.0.0.1", 1, cuda=False)["context_length"]
        == 410
    )


def test_nothing_is_patched_with_a_gpu(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, resources={"server_tensor_parallel": 2})
    assert {k for k in environment(recipe, 0, [0, 1], cuda=True) if k.startswith("SGLANG")} == {
        LOGPROBS,
        BINDING,
        PERMUTED,
    }


def test_no_rank_is_started_by_a_script_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would put it into /tmp, where hardened nodes execute nothing, to start
    numactl for a GPU of a NUMA node.
    """
    from sglang.srt.utils import numa_utils

    def asked(*_: object) -> int:
        raise AssertionError("a script would be written")

    monkeypatch.setattr(numa_utils, "get_numa_node_if_available", asked)
    monkeypatch.setenv(BINDING, environment(a_recipe(tmp_path), 0, [0], cuda=True)[BINDING])
    with numa_utils.configure_subprocess(None, 0):
        pass
    monkeypatch.setenv(BINDING, "1")
    with pytest.raises(AssertionError), numa_utils.configure_subprocess(None, 0):
        pass


@pytest.mark.parametrize("cuda", [False, True])
def test_logprobs_are_at_the_sampling_temperature_whatever_the_shell_says(
    tmp_path: Path, cuda: bool
) -> None:
    """True would give those at temperature 1: another behaviour policy than the one
    that sampled.
    """
    assert environment(a_recipe(tmp_path), 0, [0], cuda)[LOGPROBS] == "0"


def test_experts_keep_their_rows_whatever_the_shell_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would permute them after loading; weights that are swapped in later are
    not permuted.
    """
    from sglang.srt.environ import envs

    monkeypatch.setenv(PERMUTED, "1")
    assert envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.get()
    monkeypatch.setenv(PERMUTED, environment(a_recipe(tmp_path), 0, [0], cuda=True)[PERMUTED])
    assert not envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.get()


def test_a_shared_gpu_is_said_to_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: dict[str, Any] = {
        "resources": {"colocate": True},
        "weights": {"transport": "cuda_ipc"},
        "pipeline": {"k": 0},
        "serving": {"memory_fraction": 0.25},
    }
    recipe = a_recipe(tmp_path, **shares)
    monkeypatch.setattr(launch, "free_and_total", lambda: [(50_000, 80_000)])
    assert memory_arguments(recipe, cuda=True) == {
        "mem_fraction_static": 0.4,
        "enable_memory_saver": True,
    }
    assert memory_arguments(recipe, cuda=False) == {}
    assert memory_arguments(a_recipe(tmp_path), cuda=True) == {"enable_memory_saver": False}
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "LD_LIBRARY_PATH" in environment(recipe, 0, [0], cuda=True)
    assert "LD_LIBRARY_PATH" not in environment(a_recipe(tmp_path), 0, [0], cuda=True)
    if find_spec("torch_memory_saver") is None:
        with pytest.raises(
            MegarlError, match=r"resources.colocate: .* needs the package torch_memory_saver"
        ):
            check(recipe, cuda=True)
    check(recipe, cuda=False)


LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 1, 1, 0],
    "interleave_moe_layer_step": 2,
    "moe_layers": [1, 3],
    "attention_chunk_size": 256,
}


def test_llama_4_without_its_vision_tower_is_always_ours(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, config=LLAMA4)
    for cuda in (False, True):
        assert (
            environment(recipe, 0, [0], cuda)["SGLANG_EXTERNAL_MODEL_PACKAGE"]
            == "megarl.core.engine.sglang_models"
        )
    whole = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": SIZES | LLAMA4 | {"architectures": None},
    }
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in environment(
        a_recipe(tmp_path, config=whole), 0, [0], cuda=True
    )


BALANCED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def test_gpus_with_whole_experts(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"serving": {"kv_tokens": 4096, "expert_parallel": True}}
    four: dict[str, Any] = {"resources": {"server_tensor_parallel": 4}}
    recipe = a_recipe(tmp_path, config=BALANCED, **four, **whole)
    for cuda in (False, True):
        check(recipe, cuda)
        arguments = engine_arguments(recipe, 0, "127.0.0.1", 1, cuda)
        assert (arguments["tp_size"], arguments["ep_size"]) == (4, 4)
    divided = a_recipe(tmp_path, config=BALANCED, **four)
    assert engine_arguments(divided, 0, "127.0.0.1", 1, cuda=True)["ep_size"] == 1


def test_whole_experts_in_fp8_need_blocks_in_their_own_width() -> None:
    """Qwen3-30B-A3B has experts of 768 columns."""
    model = read("qwen3-30b-a3b")
    assert servable.unquantisable(model, 4, whole_experts=False) == "the width of an expert is 192"
    assert servable.unquantisable(model, 4, whole_experts=True) == ""


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({}, 2, "the model has no experts; set it to false"),
        (GPT_OSS, 2, "is for Qwen3MoeForCausalLM, .*, not GptOssForCausalLM"),
        (BALANCED, 3, "SGLang cannot divide 8 experts among a server's 3 GPUs; use a divisor"),
    ],
)
@pytest.mark.parametrize("cuda", [False, True])
def test_models_whose_experts_no_gpu_has_whole(
    config: dict[str, Any], ranks: int, said: str, cuda: bool, tmp_path: Path
) -> None:
    recipe = a_recipe(
        tmp_path,
        config=config,
        resources={"server_tensor_parallel": ranks},
        serving={"kv_tokens": 4096, "expert_parallel": True},
    )
    with pytest.raises(MegarlError, match=rf"serving.expert_parallel: .*: {said}"):
        check(recipe, cuda)


def test_gpt_oss_is_always_ours_and_on_a_gpu_in_bf16(tmp_path: Path) -> None:
    """SGLang's own takes experts by gigabytes."""
    recipe = a_recipe(tmp_path, config=GPT_OSS)
    for cuda in (False, True):
        assert (
            environment(recipe, 0, [0], cuda)["SGLANG_EXTERNAL_MODEL_PACKAGE"]
            == "megarl.core.engine.sglang_models"
        )
    check(a_recipe(tmp_path, config=GPT_OSS, model={"dtype": "bf16"}), cuda=True)
    odd = a_recipe(tmp_path, config=GPT_OSS | {"intermediate_size": 48}, model={"dtype": "bf16"})
    check(odd, cuda=True)
    with pytest.raises(
        MegarlError, match=r"intermediate_size=48, which is no multiple of 32; serve it on a GPU"
    ):
        check(odd, cuda=False)
    for dtype in ("fp16", "fp32"):
        other = a_recipe(tmp_path, config=GPT_OSS, model={"dtype": dtype})
        check(other, cuda=False)
        with pytest.raises(MegarlError, match=f"model.dtype: {dtype}: .* sinks in bf16 only"):
            check(other, cuda=True)


def test_deepseek_v3_is_always_ours_and_its_shared_expert_is_no_routed_one(tmp_path: Path) -> None:
    """SGLang would make the shared expert of the released models one more of those it
    tells of, and publishes to.
    """
    recipe = a_recipe(tmp_path, config=BALANCED)
    for cuda in (False, True):
        assert (
            environment(recipe, 0, [0], cuda)["SGLANG_EXTERNAL_MODEL_PACKAGE"]
            == "megarl.core.engine.sglang_models"
        )
        assert engine_arguments(recipe, 0, "127.0.0.1", 1, cuda)["disable_shared_experts_fusion"]
    assert "TORCH_COMPILE_DISABLE" not in environment(recipe, 0, [0], cuda=True)
    assert environment(recipe, 0, [0], cuda=False)["TORCH_COMPILE_DISABLE"] == "1"
    dense = a_recipe(tmp_path / "dense")
    assert not engine_arguments(dense, 0, "127.0.0.1", 1, cuda=True)[
        "disable_shared_experts_fusion"
    ]


@pytest.mark.parametrize(
    ("changed", "cuda", "message"),
    [
        ({"no_rope_layers": [1, 0, 1, 0]}, False, "no_rope_layers .* every fourth layer"),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "moe_intermediate_size": 32,
                "mlp_only_layers": [0],
            },
            False,
            "experts in every layer",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "head_dim": 16}, False, "heads of .* = 8"),
        ({"moe_layers": [0, 3]}, False, "moe_layers .* interleave_moe_layer_step=2"),
        ({}, True, "does not divide the attention of Llama4ForCausalLM into chunks"),
    ],
)
def test_a_model_that_would_be_served_wrongly_is_refused(
    tmp_path: Path, changed: dict[str, Any], cuda: bool, message: str
) -> None:
    with pytest.raises(MegarlError, match=message):
        check(a_recipe(tmp_path, config=LLAMA4 | changed), cuda)
    check(a_recipe(tmp_path, config=LLAMA4), cuda=False)


def test_llama_4_beyond_a_chunk_is_served_on_hopper_only(tmp_path: Path) -> None:
    """SGLang's kernels for other GPUs attend to the whole sequence in every layer."""
    whole = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": SIZES | LLAMA4 | {"architectures": None},
    }
    recipe = a_recipe(tmp_path, config=whole)
    for capabilities in (["9.0"], []):
        check_gpus(recipe, capabilities)
    with pytest.raises(MegarlError, match=r"on a GPU of compute capability 8\.9"):
        check_gpus(recipe, ["8.9", "9.0"])
    for capability in ("8.0", "10.0", "12.0"):
        with pytest.raises(
            MegarlError,
            match=rf"length: .* is 400, but on a GPU of compute capability {capability} .*256",
        ):
            check_gpus(recipe, [capability])
        check_gpus(
            a_recipe(
                tmp_path / "short",
                config=whole | {"text_config": SIZES | LLAMA4 | {"attention_chunk_size": 400}},
            ),
            [capability],
        )
        check_gpus(a_recipe(tmp_path / "dense"), [capability])


DELTA: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": SIZES
    | {
        "architectures": None,
        "num_hidden_layers": 6,
        "layer_types": [*["linear_attention"] * 2, "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}


def test_delta_networks_are_served_by_our_text_class_from_either_directory(tmp_path: Path) -> None:
    """transformers does not write the interval, without which SGLang ends."""
    text = {**DELTA["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"]}
    for config in (DELTA, text):
        recipe = a_recipe(tmp_path, config=config)
        for cuda in (False, True):
            variables = environment(recipe, 0, [0], cuda)
            assert variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "megarl.core.engine.sglang_models"
            arguments = engine_arguments(recipe, 0, "127.0.0.1", 1, cuda)
            assert arguments["enable_multimodal"] is False
            said = json.loads(str(arguments["json_model_override_args"]))
            assert said["architectures"] == ["Qwen3_5MoeForCausalLM"]
            assert said.get("text_config", said)["full_attention_interval"] == 3
            assert ("text_config" in said) is ("text_config" in config)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_states_are_exact_and_convolutions_keep_the_models_type(tmp_path: Path, dtype: str) -> None:
    from sglang.srt.environ import envs

    recipe = a_recipe(tmp_path, config=DELTA, model={"path": str(tmp_path), "dtype": dtype})
    variables = states.state_environment(recipe, read(str(tmp_path)))
    assert variables["SGLANG_MAMBA_CONV_DTYPE"] == launch.DTYPES[dtype]
    assert variables["SGLANG_MAMBA_SSM_DTYPE"] == "float32"
    assert all(hasattr(envs, name) for name in variables)
    dense = a_recipe(tmp_path / "dense")
    assert states.state_environment(dense, read(str(tmp_path / "dense"))) == {}


@pytest.mark.parametrize("cuda", [False, True])
def test_sglang_has_a_state_for_each_request_that_may_run(
    tmp_path: Path, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own rule for how many slots each takes."""
    from sglang.srt.mem_cache import kv_cache_configurator as theirs

    arguments = engine_arguments(a_recipe(tmp_path, config=DELTA), 0, "127.0.0.1", 1, cuda)
    no_overlap = arguments.get("disable_overlap_schedule", False)
    buffered = arguments["mamba_radix_cache_strategy"] == "extra_buffer"
    mamba = SimpleNamespace(
        enable_mamba_extra_buffer=buffered, enable_mamba_extra_buffer_lazy=False
    )
    schedule = SimpleNamespace(disable_overlap_schedule=no_overlap)
    cache = SimpleNamespace(disable_radix_cache=arguments.get("disable_radix_cache", False))
    monkeypatch.setattr(theirs, "get_memory", lambda: cache)
    monkeypatch.setattr(theirs, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(theirs, "get_schedule", lambda: schedule)
    each = theirs.KVCacheConfigurator._calculate_mamba_ratio(None)
    slots = arguments["max_mamba_cache_size"]
    running = arguments["max_running_requests"]
    assert isinstance(slots, int)
    assert slots // each == running


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Before the start by the GPU's memory, after it by what SGLang says."""
    recipe = a_recipe(tmp_path, config=DELTA, serving={"max_running_requests": 1000})
    model = read(str(tmp_path))
    assert model.delta is not None
    needed = 5 * 1008 * 4 * (4 * 4 * 16 * 16 + 2 * 3 * 128) + 2 * model.parameters
    for free, fits in ((needed + 2**20, True), (needed - 2**20, False)):
        memory = [(80_000, 80_000), (free // 2**20, 80_000)]
        with (
            nullcontext()
            if fits
            else pytest.raises(
                MegarlError, match=r"max_running_requests: 1008 .* 5040 slots .* GiB are free"
            )
        ):
            states.check_state_room(recipe, model, memory)
    states.check_states(recipe, model, 1008)
    with pytest.raises(MegarlError, match="SGLang runs at most 1007 requests at once, not 1008"):
        states.check_states(recipe, model, 1007)
    states.check_states(a_recipe(tmp_path / "dense"), read(str(tmp_path / "dense")), 1)


def test_ranks_of_cpu_servers_own_cores(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, resources={"server_tensor_parallel": 2, "threads": 2})
    binds = [
        environment(recipe, i, list(range(6)), cuda=False)["SGLANG_CPU_OMP_THREADS_BIND"]
        for i in range(2)
    ]
    assert binds == ["0,1|2,3", "4,5|0,1"]
    second = environment(recipe, 1, list(range(6)), cuda=False, nodes=2)
    assert second["SGLANG_CPU_OMP_THREADS_BIND"] == "2,3", "one rank on each of two nodes"


def test_a_server_on_several_nodes(tmp_path: Path) -> None:
    """No queue that would listen where it likes; and SGLang knows the arguments."""
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    arguments = node_arguments(Meeting(2, 2345), "10.0.0.1", 1)
    assert arguments == {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:2345"}
    assert set(arguments) <= set(inspect.signature(ServerArgs).parameters)
    assert node_arguments(Meeting(1, 0), "10.0.0.1", 0) == {}
    variable = "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"
    assert hasattr(envs, variable)
    recipe = a_recipe(tmp_path, resources={"server_tensor_parallel": 16})
    assert environment(recipe, 0, [0], cuda=True, nodes=2)[variable] == "0"
    assert variable not in environment(recipe, 0, [0], cuda=True)


@pytest.mark.parametrize(
    ("config", "ranks", "what", "most"),
    [
        ({}, 16, "8 attention heads", 8),
        ({"num_key_value_heads": 4}, 8, "", 0),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads", 4),
        ({"num_attention_heads": 64, "head_dim": 8}, 64, "96 columns of an MLP", 32),
        (LLAMA4 | {"intermediate_size": 20}, 8, "20 columns of an expert", 4),
        (
            BALANCED | {"n_shared_experts": 1, "moe_intermediate_size": 36},
            8,
            "36 columns of an expert",
            4,
        ),
        (BALANCED | {"num_attention_heads": 16}, 16, "", 0),
        (DELTA, 4, "2 key heads of a delta network", 2),
    ],
)
def test_a_server_on_more_gpus_than_divide_the_model_is_refused(
    tmp_path: Path, config: dict[str, Any], ranks: int, what: str, most: int
) -> None:
    """Each rank would end with an assertion, after it was started again and again. On a
    CPU SGLang pads.
    """
    length = {"prompt_tokens": 56, "thinking_tokens": [50, 100], "answer_tokens": 100}
    recipe = a_recipe(
        tmp_path, config=config, resources={"server_tensor_parallel": ranks}, length=length
    )
    check(recipe, cuda=False)
    if not what:
        return check(recipe, cuda=True)
    with pytest.raises(
        MegarlError,
        match=rf"^resources.server_tensor_parallel: .* {what} of .* {ranks} GPUs; use {most} ",
    ):
        check(recipe, cuda=True)


@pytest.mark.parametrize(
    ("sections", "cuda", "message"),
    [
        ({"model": {"path": "/nowhere"}}, True, "/nowhere: no Hugging Face model there"),
        ({"serving": {"kv_tokens": None}}, False, "serving.kv_tokens: must be set"),
        (
            {"serving": {"kv_tokens": 300}},
            True,
            "serving.kv_tokens: 300 cannot hold one longest sequence of 400",
        ),
        (
            {"model": {"dtype": "fp32"}},
            True,
            "model.dtype: fp32: SGLang's attention on a GPU takes bf16 and fp16",
        ),
        (
            {"length": {"prompt_tokens": 300}},
            True,
            r"length: .* is 600, but .* has positions for 512",
        ),
    ],
)
def test_refused(tmp_path: Path, sections: dict[str, Any], cuda: bool, message: str) -> None:
    with pytest.raises(MegarlError, match=message):
        check(a_recipe(tmp_path, **sections), cuda)


def test_a_gpu_without_sglangs_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"sgl_kernel": None}
    monkeypatch.setattr(servable, "find_spec", installed.get)
    with pytest.raises(
        MegarlError, match=r"sglang-kernel\) are not installed; install requirements/gpu.txt"
    ):
        servable.check_kernels()
    monkeypatch.setattr(servable, "find_spec", lambda name: name)
    servable.check_kernels()


def test_decoding_is_captured_for_as_many_requests_as_the_recipe_allows(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, serving={"max_running_requests": 512})
    captured = [
        engine_arguments(recipe, 0, "127.0.0.1", 1, cuda).get("cuda_graph_max_bs_decode")
        for cuda in (True, False)
    ]
    assert captured == [512, None]


IN_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
FP8 = {"quantization": "fp8", "kv_tokens": 4096}
FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3", "kv_tokens": 4096}


def test_servers_in_fp8_make_fp8_parameters_of_a_bf16_directory(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, config=IN_BLOCKS, serving=FP8)
    said = precision_arguments(recipe, 9)
    config = json.loads(str(said["json_model_override_args"]))["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [FP8_BLOCK, FP8_BLOCK])
    assert precision_arguments(a_recipe(tmp_path, config=IN_BLOCKS, serving=FP8_CACHE), 9) == {
        "kv_cache_dtype": "fp8_e4m3"
    }
    assert precision_arguments(a_recipe(tmp_path), 9) == {}
    assert BLOCK == FP8_BLOCK


@pytest.mark.parametrize(
    ("major", "products"), [(8, "auto"), (9, "auto"), (10, "triton"), (12, "triton")]
)
def test_no_products_that_rewrite_the_scales(tmp_path: Path, major: int, products: str) -> None:
    """On Blackwell SGLang would choose DeepGEMM, which wants packed scales; later
    versions have FP32 ones.
    """
    recipe = a_recipe(tmp_path, config=IN_BLOCKS, serving=FP8)
    assert precision_arguments(recipe, major)["fp8_gemm_runner_backend"] == products


def test_a_users_variables_do_not_change_what_is_in_fp8(tmp_path: Path) -> None:
    names = {"SGLANG_FORCE_FP8_MARLIN": "0", "SGLANG_FP8_IGNORED_LAYERS": ""}
    with_fp8 = environment(a_recipe(tmp_path, config=IN_BLOCKS, serving=FP8), 0, [0], cuda=True)
    assert names.items() <= with_fp8.items()
    assert not names.keys() & environment(a_recipe(tmp_path), 0, [0], cuda=True).keys()


@pytest.mark.parametrize("serving", [FP8, FP8_CACHE])
def test_fp8_needs_a_gpu_that_has_it(tmp_path: Path, serving: dict[str, Any]) -> None:
    recipe = a_recipe(tmp_path, config=IN_BLOCKS, serving=serving)
    key = recipe.serving.fp8_keys[0]
    check(recipe, cuda=True)
    with pytest.raises(MegarlError, match=f"^{key}: SGLang has FP8 only on GPUs"):
        check(recipe, cuda=False)
    for capability in ("8.9", "9.0", "10.0", "12.0"):
        check_gpus(recipe, [capability])
    with pytest.raises(
        MegarlError, match=f"^{key}: a GPU of compute capability 8.0 has no FP8 products"
    ):
        check_gpus(recipe, ["9.0", "8.0"])
    check_gpus(a_recipe(tmp_path, config=IN_BLOCKS), ["8.0"])


@pytest.mark.parametrize(
    ("config", "ranks", "problem"),
    [
        ({}, 4, ""),
        ({"hidden_size": 192}, 1, "hidden_size is 192"),
        ({"intermediate_size": 320}, 1, "the width of an MLP is 320"),
        ({}, 8, "the width of q is 64"),
        ({"intermediate_size": 768}, 4, "the width of an MLP is 192"),
        ({"num_key_value_heads": 1}, 1, "the width of k is 64"),
        ({"num_key_value_heads": 2}, 1, ""),
        ({"architectures": ["Glm4MoeForCausalLM"]}, 1, "FP8 is for LlamaForCausalLM"),
    ],
)
def test_what_sglang_cannot_divide_into_blocks_is_refused(
    tmp_path: Path, config: dict[str, Any], ranks: int, problem: str
) -> None:
    moe: dict[str, Any] = {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    }
    moe |= {
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    }
    more = moe if "architectures" in config else {}
    recipe = a_recipe(
        tmp_path,
        config=IN_BLOCKS | {"num_key_value_heads": 8} | more | config,
        serving=FP8,
        resources={"server_tensor_parallel": ranks},
    )
    with (
        pytest.raises(MegarlError, match=f"serving.quantization: .*{problem}")
        if problem
        else nullcontext()
    ):
        check(recipe, cuda=True)


def test_sglang_refuses_the_same_shapes() -> None:
    """Its own check of joined maps, with the widths of q, k and v on one GPU."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    config = SimpleNamespace(weight_block_size=[BLOCK, BLOCK])
    layer = SimpleNamespace(tp_group=None)
    for heads, fits in ((2, True), (1, False)):
        parts = [512, heads * 64, heads * 64]
        with nullcontext() if fits else pytest.raises(ValueError, match="not divisible by"):
            Fp8LinearMethod.validate_block_quant_shapes(
                layer, config, 256, 256, sum(parts), sum(parts), parts
            )

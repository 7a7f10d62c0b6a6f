"""`megarl serve`: start one SGLang server of the policy from the recipe, or of any
model for others, such as a teacher.

    recipe + RUN/endpoints.json ──► checks (one MegarlError)
        ──► environment() + engine_arguments() ──► SGLang, in this process

A server that spans nodes (`Endpoints.meetings`) has such a process on each of them. The
first one's handles all requests, and SGLang passes them on to all ranks.

The server handles only token ids, no text. Only proxy.py gets the keys of
RUN/endpoints.json: SGLang logs its arguments.

SGLang's mem_fraction_static is a share of the memory that is free at its start, so a
server that restarts beside a learner would get less each time. Our share is always of
the whole GPU.
"""

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from functools import partial
from itertools import batched, cycle, islice
from pathlib import Path
from urllib.parse import urlsplit

from megarl.core.base import terminal
from megarl.core.base.architecture import in_directory
from megarl.core.base.device import of_process
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import KEPT_FROM_INPUT, ServerAddress
from megarl.core.base.model_directory import open_served_model
from megarl.core.base.process import (
    NODE_RANK,
    check_free,
    die_with_parent,
    importing,
    start_logging,
    without_proxy,
)
from megarl.core.base.rundir import Endpoints, LinkKeys, Meeting, RunDir
from megarl.core.client.client import LARGEST_SUPPORT, ServerClient, ServerSaid
from megarl.core.client.servable import (
    OWN_EVERYWHERE,
    check,
    check_gpus,
    check_kernels,
    running_requests,
)
from megarl.core.engine import copies, memory_saver, workers
from megarl.core.engine.proxy import Gate, OwnReplies
from megarl.core.engine.states import (
    DTYPES,
    check_state_room,
    check_states,
    state_arguments,
    state_environment,
)
from megarl.core.recipe import Recipe

WATCHDOG_MARGIN_S = 120.0
STREAM_INTERVAL = 64
"""Tokens per streamed chunk, the most that a request can lose with its server. Short
completions come in four chunks.
"""
WARM_UP_LIMIT_S = 600.0
MODELS = "megarl.core.engine.sglang_models"


def serve_model(recipe: Recipe, host: str, port: int, api_key: str) -> None:
    """Serve the recipe's model to whoever has the key, without a run, until killed."""
    endpoints = Endpoints(
        session="serve",
        controller="",
        servers=(f"http://{host}:{port}",),
        api_key=api_key,
        admin_key=secrets.token_hex(16),
        link=LinkKeys.new(),
        rendezvous_port=0,
    )
    serve(recipe, 0, port, host, endpoints)


def main(recipe: Recipe, index: int, port: int, host: str = "") -> None:
    """Serve as a role of the recipe's run until killed. The server is killed when its
    parent dies. host: the address to listen on; empty: the one in the endpoints.
    """
    die_with_parent()
    endpoints = RunDir(recipe.run.path).endpoints()
    host = host or str(urlsplit(endpoints.servers[index]).hostname)
    serve(recipe, index, port, host, endpoints)


def serve(recipe: Recipe, index: int, port: int, host: str, endpoints: Endpoints) -> None:
    """Serve until killed; the server's child processes die with it."""
    os.umask(0o077)  # SGLang's processes trust what they receive over sockets in the file system
    start_logging(f"server {index}")
    meeting = endpoints.meetings.get(f"server-{index}", Meeting(1, 0))
    node = int(os.environ[NODE_RANK]) if meeting.nodes > 1 else 0
    os.environ["OMP_NUM_THREADS"] = str(recipe.resources.threads)  # before torch is imported
    with importing():
        import torch

        cuda = torch.cuda.is_available()
        check(recipe, cuda)
        model = open_served_model(Path(recipe.model.path)).architecture
        capability = torch.cuda.get_device_capability() if cuda else (0, 0)
        if cuda:
            check_kernels()
            check_gpus(recipe, [".".join(map(str, capability))])
            if model.delta:
                check_state_room(recipe, model, free_and_total())
        if not node:
            check_free(host, port)
        os.environ.update(without_proxy(host))  # at the end of its start SGLang calls itself
        cores = sorted(os.sched_getaffinity(0))
        os.environ.update(environment(recipe, index, cores, cuda, meeting.nodes))
        os.environ.update(state_environment(recipe, model))
        if cuda and recipe.lends_memory:
            memory_saver.check_preload(memory_saver.installed_hook(), os.environ)
        patch_sglang(recipe)

        from sglang.srt.entrypoints.http_server import app, launch_server
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree

    handles = recipe.weights.transport == "cuda_ipc"
    app.add_middleware(OwnReplies, place=of_process())
    app.add_middleware(Gate, endpoints=endpoints, handles=handles, vocabulary=model.vocabulary)
    arguments = engine_arguments(recipe, index, host, port, cuda)
    arguments |= memory_arguments(recipe, cuda) | node_arguments(meeting, host, node)
    arguments |= precision_arguments(recipe, capability[0])
    fp8 = recipe.serving.quantization == "fp8"
    limits = (recipe.weights.timeout_s, recipe.start_limit_s)
    attention_copies = recipe.serving.attention_copies
    scheduler = partial(workers.scheduler, *limits, model.experts, fp8, attention_copies)
    try:
        launch_server(
            ServerArgs(**arguments),
            run_scheduler_process_func=scheduler,
            run_detokenizer_process_func=workers.no_detokenizer,
            execute_warmup_func=lambda _: warmed_up(recipe, f"http://{host}:{port}", endpoints),
        )
    except SystemExit:
        # Raised by Uvicorn if the port was taken since the check. Otherwise the warm-up
        # would go on for minutes.
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(1)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    if node:
        logging.getLogger(__name__).error("a rank of this node has ended, and so does the server")
        sys.exit(1)


def patch_sglang(recipe: Recipe) -> None:
    """Apply our patches of SGLang in this process, before its server is imported."""
    from megarl.shims import fp16_on_cpu, sglang_cpu

    sglang_cpu.install()
    sglang_cpu.patch()
    if recipe.model.dtype == "fp16":
        fp16_on_cpu.install()
    workers.own_ports()
    workers.own_requests()
    if recipe.serving.attention_copies > 1:
        copies.own_answers()
        copies.own_sockets()
        workers.own_processes()
    workers.own_further_nodes()


def warmed_up(recipe: Recipe, url: str, endpoints: Endpoints) -> bool:
    """Check the KV cache and the slots for states, whose sizes are known only now, and
    warm up, in a thread beside the HTTP server. If they are too small, end this process
    as `megarl` ends with a message.
    """
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.utils import kill_process_tree

    try:
        info = get_global_state().scheduler_info
        check_kv(recipe, info["max_req_input_len"])
        # With copies of the attention SGLang does not pass it on; none has states.
        most_running = info.get(workers.MOST_RUNNING, 0)
        check_states(recipe, in_directory(recipe.model.path), most_running)
    except MegarlError as error:
        terminal.say(f"megarl: {error}", file=sys.stderr, flush=True)
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(2)
    return asyncio.run(warm_up(url, endpoints, recipe.evaluation.top_p))


def check_kv(recipe: Recipe, most_input: int) -> None:
    """Raise MegarlError if a server's KV cache cannot hold the longest sequence: SGLang
    would cut requests short there, and refuse to continue them. most_input: its
    max_req_input_len, which counts what it keeps free.
    """
    longest = min(context_length(recipe), recipe.serving.sequence_kv_tokens or sys.maxsize)
    room = most_input + KEPT_FROM_INPUT - 1
    if room >= longest:
        return
    cache = "a server's KV cache"
    if recipe.serving.kv_tokens is None:
        cache = "the KV cache that fits beside the weights"
    raise MegarlError(
        f"serving: {cache} has {room} tokens, and the longest sequence (length.*) {longest};"
        " raise serving.memory_fraction or the GPUs per server, or shorten length.*"
    )


async def warm_up(url: str, endpoints: Endpoints, top_p: float) -> bool:
    """Generate one token, sampled from this nucleus, then make /health succeed.
    SGLang's own warm-up first sleeps for a second. If the request fails, SGLang reports
    the error and the server never becomes ready.
    """
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    address = ServerAddress(id=0, url=url)
    until = time.monotonic() + WARM_UP_LIMIT_S
    async with ServerClient(
        address, endpoints.api_key, endpoints.admin_key, WARM_UP_LIMIT_S
    ) as client:
        while time.monotonic() < until:
            try:
                await client.warm_up(top_p)
                get_global_state().tokenizer_manager.server_status = ServerStatus.Up
                return True
            except ServerSaid:
                logging.getLogger(__name__).exception("the first request failed")
                return False
            except MegarlError:  # the port is not open yet
                await asyncio.sleep(0.05)
    return False


def memory_arguments(recipe: Recipe, cuda: bool) -> dict[str, object]:
    """Return the ServerArgs for a GPU that the server shares with the learner."""
    if not cuda:
        return {}
    arguments: dict[str, object] = {"enable_memory_saver": recipe.lends_memory}
    share = recipe.serving.memory_fraction
    if share is not None:
        arguments["mem_fraction_static"] = static_fraction(share, free_and_total())
    return arguments


BLACKWELL = 10
"""The first major compute capability of Blackwell GPUs."""


def precision_arguments(recipe: Recipe, major: int) -> dict[str, object]:
    """Return the ServerArgs for what servers compute in FP8; empty if nothing. major:
    of the GPU's compute capability.

    SGLang makes FP8 parameters if config.json has a quantization_config; the directory
    is still the learner's, in bf16, and is quantised as it is read
    (workers.own_quantising). On Blackwell SGLang would choose DeepGEMM, and replace
    FP32 scales by packed ones of another shape
    (requant_block_scale_ue8m0_for_deepgemm), into which no later version could be
    loaded; Triton's kernel takes them as they are. On Hopper DeepGEMM does, too.
    """
    from megarl.core.sync.block_fp8 import CONFIG

    arguments: dict[str, object] = {}
    if recipe.serving.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = recipe.serving.kv_cache_dtype
    if recipe.serving.quantization == "fp8":
        arguments["json_model_override_args"] = json.dumps({"quantization_config": CONFIG})
        arguments["fp8_gemm_runner_backend"] = "triton" if major >= BLACKWELL else "auto"
    return arguments


def node_arguments(meeting: Meeting, host: str, node: int) -> dict[str, object]:
    """Return the ServerArgs of the `node`-th node of a server. host: the address of its
    first node.
    """
    if meeting.nodes == 1:
        return {}
    return {"nnodes": meeting.nodes, "node_rank": node, "dist_init_addr": f"{host}:{meeting.port}"}


def environment(
    recipe: Recipe, index: int, cores: list[int], cuda: bool, nodes: int = 1
) -> dict[str, str]:
    """Return environment variables for the server and its processes on one of its
    nodes, which has these cores.
    """
    common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Log-probs at the sampling temperature, whatever the user's shell asks for.
    common["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
    # Ranks bind themselves to their GPU's NUMA node. By default they are started by a
    # script that everyone may write, in /tmp, and never start where nothing may be
    # executed there (SGLang's issue 40627, open in November 2026).
    common["SGLANG_NUMA_BIND_V2"] = "0"
    # Else experts' rows would be permuted after loading. A copy that is swapped in has
    # them in the usual order, with equal checksums, and the experts would be wrong
    # (SGLang's unquant.py, _maybe_interleave_w13_for_fused_swiglu, which its guard for
    # derived weights does not cover).
    common["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"
    if recipe.serving.quantization == "fp8":
        # Whatever the user's shell asks for: the first would rewrite the weights, the
        # others leave some of them in bf16.
        common["SGLANG_FORCE_FP8_MARLIN"] = "0"
        common["SGLANG_FP8_IGNORED_LAYERS"] = ""
    if nodes > 1:
        # SGLang would broadcast objects by a queue that listens on another network,
        # instead of by the ranks' own group.
        common["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    if not cuda or in_directory(recipe.model.path).name in OWN_EVERYWHERE:
        common["SGLANG_EXTERNAL_MODEL_PACKAGE"] = MODELS
    if cuda:
        if recipe.lends_memory:
            common |= memory_saver.library_path()
        return common
    # SGLang compiles the choice of experts by biases; on a CPU it would run a C++
    # compiler for each number of tokens.
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    ranks = recipe.resources.server_tensor_parallel // nodes
    threads = recipe.resources.threads
    if recipe.resources.server_tensor_parallel > 1:
        first = index * ranks * threads
        owned = batched(islice(cycle(map(str, cores)), first, first + ranks * threads), threads)
        cpu["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(dict.fromkeys(rank)) for rank in owned
        )
        # The CUDA build of torch includes NCCL, which SGLang would try to use on the
        # CPU.
        cpu["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    return common | cpu


def context_length(recipe: Recipe) -> int:
    """Return SGLang's context_length. A token of the interruption phrase is at least
    one byte.
    """
    context = (
        recipe.length.context_tokens + len(recipe.length.interruption.encode()) + KEPT_FROM_INPUT
    )
    return min(context, in_directory(recipe.model.path).context)


def engine_arguments(
    recipe: Recipe, index: int, host: str, port: int, cuda: bool
) -> dict[str, object]:
    """Return SGLang's ServerArgs. Others keep its defaults (radix cache on, attention
    backend, CUDA graphs of decode steps).
    """
    arguments = model_arguments(recipe, index, host, port) | copies_arguments(recipe)
    arguments |= state_arguments(recipe, in_directory(recipe.model.path), cuda)
    if cuda:
        return arguments | cuda_arguments(recipe)
    return arguments | CPU_ARGUMENTS


def model_arguments(recipe: Recipe, index: int, host: str, port: int) -> dict[str, object]:
    """Return the ServerArgs that are the same with and without a GPU."""
    serving = recipe.serving
    weights = recipe.weights
    model = in_directory(recipe.model.path)
    return {
        "model_path": recipe.model.path,
        "dtype": DTYPES[recipe.model.dtype],
        "enable_fp32_lm_head": recipe.model.fp32_head in ("both", "server"),
        "context_length": context_length(recipe),
        "skip_tokenizer_init": True,
        # every request has its own settings; generation_config.json is not used
        "sampling_defaults": "openai",
        "sampling_mask_max_tokens": LARGEST_SUPPORT,
        "host": host,
        "port": port,
        "tp_size": recipe.resources.server_tensor_parallel,
        "ep_size": recipe.expert_ranks,
        "random_seed": recipe.run.seed * 1009 + index,
        "weight_version": "-1",  # of the directory; a published version is 0 or more
        "max_total_tokens": serving.sequence_kv_tokens,
        "max_running_requests": running_requests(recipe),
        "stream_interval": min(STREAM_INTERVAL, max(1, recipe.length.completion_tokens // 4)),
        "incremental_streaming_output": True,
        # A weight update may legitimately keep the scheduler busy for
        # weights.timeout_s.
        "watchdog_timeout": weights.timeout_s + WATCHDOG_MARGIN_S,
        "enable_metrics": recipe.monitor.prometheus,
        # For routing replay, and to compare the choices of both sides.
        "enable_return_routed_experts": bool(model.experts),
        # With fusion, the shared expert would be reported among the chosen experts of
        # every token.
        "disable_shared_experts_fusion": bool(model.shared_feed_forward),
        "log_level": "info",
        "log_level_http": "warning",
    }


def copies_arguments(recipe: Recipe) -> dict[str, object]:
    """Return the ServerArgs of a server with several copies of the attention."""
    attention_copies = recipe.serving.attention_copies
    if attention_copies == 1:
        return {}
    return {"attn_dp_size": attention_copies, "load_balance_method": "total_requests"}


CPU_ARGUMENTS: dict[str, object] = {
    "device": "cpu",
    # Torch's own attention reads the cache of sliding windows (Llama 4 with its vision
    # tower) at the wrong places.
    "disable_hybrid_swa_memory": True,
    # An idle scheduler would otherwise spin on a core that the learner could use; of
    # several ranks, each on its own. The first one sleeps until a message comes, and
    # the others wait for what it passes on.
    "sleep_on_idle": True,
    "decode_log_interval": 40,
}


def cuda_arguments(recipe: Recipe) -> dict[str, object]:
    """Return the ServerArgs of a server with GPUs."""
    experts = in_directory(recipe.model.path).experts
    serving = recipe.serving
    return {
        "device": "cuda",
        # By default SGLang captures graphs for up to 256 requests on an 80 GB GPU, 32
        # on a 40 GB one, and runs more without.
        "cuda_graph_max_bs_decode": -(-serving.max_running_requests // serving.attention_copies),
        # By default prefills replay graphs, too. On some models these computed wrong
        # tokens (SGLang's issues 37606 and 37448, open in November 2026), and the
        # servers' time goes into decoding.
        "cuda_graph_backend_prefill": "disabled",
        # On Blackwell SGLang would use kernels that choose the experts themselves and
        # do not report which.
        "moe_runner_backend": "triton" if experts else "auto",
        # A line for each 400 decode steps, about ten seconds, instead of 40.
        "decode_log_interval": 400,
    }


LIMIT_S = 30.0
MIB_A_GIB = 1024


def free_and_total() -> list[tuple[int, int]]:
    """Return free and total MiB of each visible GPU, from nvidia-smi, because a CUDA
    context would take some of it.
    """
    command = [
        "nvidia-smi",
        "--query-gpu=memory.free,memory.total",
        "--format=csv,noheader,nounits",
    ]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    sizes = []
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        for line in answer.stdout.splitlines():
            free, total = line.split(",")
            sizes.append((int(free), int(total)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MegarlError(
            "serving.memory_fraction: nvidia-smi does not say how much memory is free"
            f" ({error}); is the driver installed?"
        ) from None
    return sizes


def static_fraction(share: float, memory: list[tuple[int, int]]) -> float:
    """Return SGLang's mem_fraction_static for `share` of each whole GPU. memory: (free,
    total) of each.
    """
    free, total = min(memory, key=lambda gpu: gpu[0] / gpu[1])
    if share * total >= free:
        raise MegarlError(
            f"serving.memory_fraction: {share:g} of the GPU are {share * total / MIB_A_GIB:.1f}"
            f" GiB, and only {free / MIB_A_GIB:.1f} of {total / MIB_A_GIB:.1f} GiB are free; lower"
            " it, or learner.microbatch_tokens if the learner has taken the rest"
        )
    return share * total / free

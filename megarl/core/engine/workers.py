"""The processes of a server.

With a GPU, SGLang starts them with `spawn`, which imports this module first; without
one they are forked. The functions `own_…` put megarl's own code in the place of
SGLang's, in the process that calls them.
"""

import asyncio
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from megarl.core.base.process import die_with_parent, shared_memory_mark
from megarl.core.engine.copies import distribute, own_draws, own_sleep

EARLIER = 0.75
"""A server gives up waiting for a bucket after this share of the learner's limit, so
that its reply still arrives in time.
"""
MOST_RUNNING = "most_running"
"""The key under which a scheduler says, when it is ready, how many requests it runs at
most.
"""
POLL_S = 0.01
"""Interval at which the scheduler is asked, between two of its own steps, whether a
step of staging has ended.
"""


def scheduler(
    weights_limit_s: float,
    start_limit_s: float,
    experts: int,
    fp8: bool,
    copies: int,
    *args: object,
    **kwargs: object,
) -> None:
    """Run the process that owns the model. weights_limit_s: how long the learner waits
    for a bucket (weights.timeout_s). start_limit_s: of the server's start
    (Recipe.start_limit_s). experts: of the model in each layer, 0 if it is dense. fp8:
    its linear maps are in FP8 (serving.quantization). copies: of the attention
    (serving.attention_copies).
    """
    without_megatron()
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megarl.core.base import ranks

    ranks.bind_all()
    own_buffers()
    own_start(start_limit_s)
    own_staging(weights_limit_s * EARLIER)
    own_labels()
    own_batches()
    own_pauses()
    own_checksums()
    own_loading()
    if fp8:
        own_quantising()
    own_routing(experts)
    if copies > 1:
        own_draws()
        own_sleep()
    # It would warn at each bucket about all parameters that are not in it: 1.7 TB of
    # logs in a long run of Scout.
    logging.getLogger("sglang.srt.models.mllama4").setLevel(logging.ERROR)
    run_scheduler_process(*args, **kwargs)


def scheduler_of_a_copy(run: Callable[..., None], pipe: Any) -> None:
    """Run `scheduler`, which is told by the pipe what to serve. SGLang starts it so if
    there are several copies of the attention.
    """
    without_megatron()
    from sglang.srt.managers.data_parallel_controller import run_scheduler_process_with_init_pipe

    run_scheduler_process_with_init_pipe(run, pipe)


def distributor(*args: object, **kwargs: object) -> None:
    """Run the process that distributes requests to copies of the attention."""
    without_megatron()
    distribute(*args, **kwargs)


def own_processes() -> None:
    """Start the processes of several copies of the attention as megarl's own."""
    from sglang.srt.entrypoints import engine

    engine.run_scheduler_process_with_init_pipe = scheduler_of_a_copy
    engine.run_data_parallel_controller_process = distributor


def without_megatron() -> None:
    """Hide megatron from SGLang, whose dumper imports it in each scheduler, with
    Transformer Engine, for seconds.
    """
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]


def own_start(limit_s: float) -> None:
    """Let a rank that has loaded its part of the model wait this long for the slowest
    one. SGLang's 480 s, which nothing sets, are too few for hundreds of gigabytes on
    storage that serves one node before another (SGLang's issue 5457). When it is ready,
    it also says how many requests it runs at most (MOST_RUNNING).
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner_components import load_model_utils

    load_model_utils.UNBALANCED_MODEL_LOADING_TIMEOUT_S = limit_s
    tell = Scheduler.get_init_info

    def tell_more(self: Any) -> dict[str, Any]:
        return {**tell(self), MOST_RUNNING: self.max_running_requests}

    Scheduler.get_init_info = tell_more


def own_labels() -> None:
    """Label each token with the version that computed it, even if that was under way
    when a pause in place began.

    SGLang's scheduler processes a result while the next one is being computed. During
    the pause one result is left in its queue, and would count as computed by the new
    weights. The pause also waits until the GPU has computed that result, before the
    weights are replaced. However long it lasts (a large model is written to disk, a
    learner restarts), SGLang's watchdog must not take it for a batch that never ends,
    and kill the server.
    """
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    pause = Scheduler.pause_generation
    change = Scheduler.record_weight_version_change

    def pause_and_wait(self: Any, request: Any) -> None:
        pause(self, request)
        self.cur_batch_for_debug = None  # the batch that the watchdog waits for
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def change_after_what_is_queued(self: Any, new_version: str | None) -> None:
        """Record the change of version. A request with a result in the queue gets it
        after that result's token, which the old weights computed.
        """
        old_version = get_serving().weight_version
        change(self, new_version)
        if get_serving().weight_version == old_version:
            return
        for batch, _ in getattr(self, "result_queue", ()):
            for request in batch.reqs:
                # Chunks of a prompt yield no token.
                if request.finished() or request.inflight_middle_chunks > 0:
                    continue
                if request.output_ids:
                    request.weight_version_events.pop()
                tokens = len(request.output_ids) + 1
                event = WeightVersionEvent(old_version=old_version, num_output_tokens=tokens)
                request.weight_version_events.append(event)

    Scheduler.pause_generation = pause_and_wait
    Scheduler.record_weight_version_change = change_after_what_is_queued


def own_batches() -> None:
    """Let a running batch forget what was asked only by requests that have left it.

    When requests come in, SGLang joins what they need (top-k, top-p, a bias) with what
    the batch needs; when they leave, it keeps that. In PipelineRL a running batch is
    never empty. So after a single greedy evaluation every step would sort the
    vocabulary: on a CPU, 96 requests and 49,152 tokens then took five times as long.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    drop = ScheduleBatch.filter_batch

    def drop_and_forget(self: Any, *args: Any, **kwargs: Any) -> None:
        size_before = len(self.reqs)
        drop(self, *args, **kwargs)
        if 0 < len(self.reqs) < size_before:
            forget(self.sampling_info, [request.sampling_params for request in self.reqs])

    ScheduleBatch.filter_batch = drop_and_forget


def forget(batch: Any, sampling: list[Any]) -> None:
    """Set what a batch needs to what its requests ask for. batch: SamplingBatchInfo.
    sampling: their SamplingParams; not empty.
    """
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    top_ks = [parameters.top_k for parameters in sampling]
    largest = max(top_ks)
    smallest = min(top_ks)
    batch.is_all_greedy = largest <= 1
    batch.is_any_greedy = smallest <= 1
    batch.need_top_k_sampling = smallest != TOP_K_ALL
    batch.need_top_p_sampling = any(parameters.top_p != 1.0 for parameters in sampling)
    batch.need_min_p_sampling = any(parameters.min_p > 0 for parameters in sampling)
    batch.max_top_k = largest if largest < TOP_K_ALL else None
    batch.npu_top_k_top_p_eligible = largest <= 1024
    if all(parameters.logit_bias is None for parameters in sampling):
        batch.logit_bias = None


def own_pauses() -> None:
    """Let a paused scheduler sleep until a message comes, as an idle one does
    (sleep_on_idle). SGLang would spin: where server and learner share the cores, for
    the whole step to which the server lends its memory.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Any) -> None:
        record(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def own_staging(limit_s: float) -> None:
    """Make SGLang's workers receive weights by staging.py, over megarl's groups, whose
    waits end within limit_s. A step comes as SGLang's request to update from a group,
    with its name as load_format, and its arguments in JSON as first of the `names`.
    """
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from megarl.core.client.client import RUNNING, SWAP
    from megarl.core.sync.staging import Staging

    staging = Staging()

    def step(self: Any, request: Any) -> Any:
        """Carry out a step of staging on this rank, and answer for all ranks: the first
        error; RUNNING until each has a result; then their results, in JSON.
        """
        updater = self.tp_worker.model_runner.weight_updater
        error = ""
        result = None
        try:
            result = _run_step(staging, updater, request, limit_s)
        except Exception as failure:
            error = _step_error(request.load_format, failure)
            logging.getLogger(__name__).error("%s", error)
        outcomes: list[Any] = [None] * dist.get_world_size(self.tp_cpu_group)
        dist.all_gather_object(outcomes, (result, error), self.tp_cpu_group)
        results = [result for result, _ in outcomes]
        errors = [error for _, error in outcomes if error]
        if not errors and RUNNING in results:
            return UpdateWeightsFromDistributedReqOutput(success=True, message=RUNNING)
        staging.ended(_job_name(request))
        if errors:
            return UpdateWeightsFromDistributedReqOutput(success=False, message=errors[0])
        if request.load_format == SWAP:
            self.record_weight_version_after_update(request.weight_version)
        message = msgspec.json.encode(results).decode()
        return UpdateWeightsFromDistributedReqOutput(success=True, message=message)

    def leave(self: Any, group_name: str) -> tuple[bool, str]:
        if group := self._model_update_group.pop(group_name, None):
            group.close()
        return True, ""

    SchedulerWeightUpdaterManager.update_weights_from_distributed = step
    WeightUpdater.destroy_weights_update_group = leave


def _run_step(staging: Any, updater: Any, request: Any, limit_s: float) -> Any:
    """Swap, or start another step unless it is under way. Return its result; RUNNING
    while it has none.
    """
    from sglang.srt.runtime_context import get_serving

    from megarl.core.client.client import BEGIN, CHECKSUMS, JOIN, RECEIVE, RUNNING, SWAP

    live = updater.get_model()
    if request.load_format == SWAP:
        updater.begin_weight_update()
        staging.swap(live, request.weight_version)
        updater.end_weight_update(run_post_load=False)
        return None
    arguments = msgspec.json.decode(request.names[0])
    groups = updater._model_update_group
    steps: dict[str, Callable[[], Any]] = {
        BEGIN: lambda: staging.open_version(live, get_serving().weight_version, **arguments),
        JOIN: lambda: _join_group(updater, limit_s, **arguments),
        RECEIVE: lambda: staging.receive(groups[arguments["group"]]),
        CHECKSUMS: staging.checksums,
    }
    future = staging.job(_job_name(request), steps[request.load_format])
    return future.result() if future.done() else RUNNING


def _job_name(request: Any) -> str:
    """Return the name of a step with these arguments."""
    return f"{request.load_format} {request.names[0]}"


def _step_error(step: str, failure: Exception) -> str:
    """Return the text of an error. A learner tells by it whether the group failed."""
    from megarl.core.client.client import LET_DOWN
    from megarl.core.sync.staging import Unloadable

    if not isinstance(failure, Unloadable):
        step = LET_DOWN.get(step, step)
    return f"{step}: {failure}"


def _join_group(
    updater: Any,
    limit_s: float,
    name: str,
    master: str,
    port: int,
    first: int,
    world: int,
    backend: str,
) -> None:
    """Make this rank rank `first` + its own number of a process group."""
    from megarl.core.sync.broadcast import BroadcastGroup

    groups = updater._model_update_group
    rank = first + updater.tp_rank
    leave_lost_learners(groups, name)
    groups[name] = BroadcastGroup(name, rank, world, backend, (master, port), limit_s)


def leave_lost_learners(groups: dict[str, Any], joining: str) -> None:
    """Leave all groups but those of the learner that forms the group `joining`. A
    learner that was killed has told nobody, and each of its groups would keep a
    communicator and two buckets for as long as the server lives.
    """
    from megarl.core.sync.broadcast import in_thread

    learner = joining.rpartition("-")[0]
    for name in list(groups):
        if name.rpartition("-")[0] != learner:
            # In a thread, since a machine that is gone may hold it up.
            in_thread(partial(groups.pop(name).close, "its learner is gone"))


def own_requests() -> None:
    """Pass the steps of staging on at once, where SGLang would wait until no request is
    running, and poll until they end.
    """
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    from megarl.core.client.client import RUNNING, SWAP

    paused = TokenizerControlMixin.update_weights_from_distributed

    async def step(self: Any, request: Any, *arguments: object) -> tuple[bool, str]:
        """Pass a step on, again every POLL_S until it has ended; return whether it
        succeeded, and its message. A swap goes SGLang's own way.
        """
        if request.load_format == SWAP:
            return await paused(self, request, *arguments)
        self.auto_create_handle_loop()
        while True:
            success, message = FanOutCommunicator.merge_results(
                await self.update_weights_from_distributed_communicator(request)
            )
            if message != RUNNING:
                return success, message
            await asyncio.sleep(POLL_S)

    TokenizerControlMixin.update_weights_from_distributed = step


def own_checksums() -> None:
    """Answer /weights_checker with megarl's checksum of each parameter, which a learner
    can add up from the tensors it sends. A GPU also computes those of the copy in the
    host's memory, because SGLang gives torch only one CPU thread then. How the device
    computes them is tried once the scheduler is made, which has chosen its GPU.

    FP8 values and their scales are two parameters here; SGLang would sum the weight
    that they stand for.
    """
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.utils import weight_checker

    from megarl.core.sync.checksum import checksum_on, multiplies_exactly, written

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make = Scheduler.__init__

    def make_and_try(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        multiplies_exactly(torch.empty(0, device=device).device)

    Scheduler.__init__ = make_and_try
    weight_checker._hash_tensor = lambda tensor: written(int(checksum_on(device, tensor)))
    weight_checker._build_quantized_set = lambda model: {}


def own_loading() -> None:
    """Make all models also load deltas (sync/delta.py). SGLang's own hook for loaders
    works only within one machine.
    """
    from sglang.srt.model_loader import loader

    from megarl.core.sync.delta import load

    make = loader._initialize_model

    def make_and_wrap(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        kind = type(model)
        loader_of = kind.load_weights
        kind.load_weights = lambda self, tensors: load(self, partial(loader_of, self), tensors)
        return model

    loader._initialize_model = make_and_wrap


def own_quantising() -> None:
    """Quantise each weight that a model loads in another type than FP8: of the
    directory with which the server starts, and of those by which a learner publishes
    (weights.transport: disk). Before it serves, check that SGLang has left the
    parameters as they are loaded, since later versions are loaded into the same ones.
    """
    from sglang.srt.model_loader import loader

    make = loader._initialize_model
    finish = loader.DefaultModelLoader.postprocess_weights

    def make_and_wrap(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        kind = type(model)
        loader_of = kind.load_weights
        kind.load_weights = lambda self, tensors: loader_of(
            self, quantised_on(device_of(self), tensors)
        )
        return model

    def finish_and_check(model: Any, target_device: Any) -> None:
        finish(model, target_device)
        check_fp8(model)

    loader._initialize_model = make_and_wrap
    loader.DefaultModelLoader.postprocess_weights = staticmethod(finish_and_check)


def device_of(model: Any) -> Any:
    """Return the device of a model's parameters."""
    return next(model.parameters()).device


def quantised_on(device: Any, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors as a server holds them, quantised on this device: SGLang gives
    torch one CPU thread beside a GPU. What is published in FP8 stays where it is.
    """
    from megarl.core.sync.block_fp8 import VALUES, is_quantised, quantised

    def moved() -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors:
            if is_quantised(name) and tensor.dtype != VALUES:
                tensor = tensor.to(device)
            yield name, tensor

    return quantised(moved())


def check_fp8(model: Any) -> None:
    """Raise RuntimeError unless the model has weights in FP8, each with a FP32 scale
    for each block. SGLang's kernels for Blackwell and for GPUs without FP8 want other
    scales or another order, and it rewrites the parameters for them
    (process_weights_after_loading in its layers/quantization/fp8.py).
    """
    import torch

    from megarl.core.sync.block_fp8 import BLOCK, VALUES, scales_name

    parameters = dict(model.named_parameters())
    names = [name for name, parameter in parameters.items() if parameter.dtype == VALUES]
    if not names:
        raise RuntimeError("serving.quantization: fp8: SGLang has made no weight in FP8")
    for name in names:
        *experts, rows, columns = parameters[name].shape
        shape = [*experts, -(-rows // BLOCK), -(-columns // BLOCK)]
        scales = parameters.get(scales_name(name))
        actual = "none"
        if scales is not None:
            if scales.dtype == torch.float32 and list(scales.shape) == shape:
                continue
            actual = f"{list(scales.shape)} {scales.dtype}"
        raise RuntimeError(
            f"serving.quantization: fp8: scales of {name} should be {shape} FP32, and are {actual}"
        )


def own_routing(experts: int) -> None:
    """Make SGLang report the experts with which each token was sampled, even if its
    request was retracted since.

    When a retracted request resumes, SGLang computes its KV cache again, perhaps with
    newer weights, and would report the experts of that computation, while the tokens
    and log-probs are those that were sampled first. So the experts of the request's
    tokens, [tokens, layers, chosen], are saved before its places in the KV cache are
    freed, and overwrite the beginning of what SGLang reports.

    Each choice takes one byte, or two if there are more than 255 `experts`. SGLang
    would send four, and 32k tokens of Qwen3-30B-A3B would take 67 MB in base64. A
    choice of -1 stands for no expert. The learner reads the bytes without sign, as 255
    or 65535, which is no expert's number either.
    """
    import torch
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    release = schedule_batch.release_req
    collect = SchedulerBatchResultProcessor._maybe_collect_routed_experts
    dtype = torch.uint8 if experts < 256 else torch.int16

    def save_experts(req: Any, req_to_token_pool: Any) -> None:
        """Save the experts of those tokens of the request that have none saved."""
        capturer = get_global_experts_capturer()
        if capturer is None or not req.return_routed_experts or not req.output_ids:
            return
        saved = vars(req).get("saved_experts", ())
        start = req.routed_experts_start_len + len(saved)
        length = len(req.origin_input_ids) + len(req.output_ids)
        # The last token is sampled, but no layer has computed it, so it has no experts.
        if start >= length - 1:
            return
        chosen = capturer.get_topk(req.kv.req_pool_idx, length, req_to_token_pool, start)
        chosen = chosen.to(dtype)
        if len(saved):
            chosen = torch.cat([saved, chosen])
        req.saved_experts = chosen

    def save_and_release(*, req: Any, req_to_token_pool: Any, **options: Any) -> bool:
        save_experts(req, req_to_token_pool)
        return bool(release(req=req, req_to_token_pool=req_to_token_pool, **options))

    def collect_with_saved(self: Any, req: Any) -> None:
        collect(self, req)
        if req.routed_experts is None:
            return
        req.routed_experts = req.routed_experts.to(dtype)
        saved = vars(req).get("saved_experts")
        if saved is not None:
            req.routed_experts[: len(saved)] = saved

    schedule_batch.release_req = save_and_release
    SchedulerBatchResultProcessor._maybe_collect_routed_experts = collect_with_saved


def own_buffers() -> None:
    """Name shared-memory buffers between ranks after the server's session, not after
    the process that makes them.
    """
    from sglang.srt.distributed.device_communicators import shm_broadcast

    shm_broadcast.make_shm_name = lambda kind: (
        f"{shared_memory_mark(os.getsid(0))}{kind}-{uuid.uuid4().hex[:8]}"
    )


def own_ports() -> None:
    """Name the file in which a scheduler reports its load after the server's session,
    too.
    """
    from sglang.srt.server_args import PortArgs

    make = PortArgs.init_new

    def make_and_name(*args: object, **kwargs: object) -> PortArgs:
        ports = make(*args, **kwargs)
        return replace(ports, instance_id=f"{shared_memory_mark(os.getsid(0))}{ports.instance_id}")

    PortArgs.init_new = staticmethod(make_and_name)


def own_further_nodes() -> None:
    """On all nodes of a server but the first: open no port, and end when any rank of
    the node ends. SGLang would answer /health there, without a key, and wait for the
    ranks' ends one after the other.
    """
    from multiprocessing.connection import wait

    from sglang.srt.entrypoints import engine

    launch = engine.Engine._launch_scheduler_processes

    def launched(*args: Any, **kwargs: Any) -> Any:
        result, ranks = launch(*args, **kwargs)
        result.block_until_scheduler_exits = lambda: wait([rank.sentinel for rank in ranks])
        return result, ranks

    engine.Engine._launch_scheduler_processes = staticmethod(launched)
    engine.launch_dummy_health_check_server = lambda *_: None


def no_detokenizer(server_args: object, port_args: object) -> None:
    """Sleep in place of the detokenizer, which SGLang requires to be alive although it
    gets no work: there is no text.
    """
    die_with_parent()
    threading.Event().wait()

"""The learner's checkpoints: model, optimiser, next step and counts, written while training goes on, loaded at any layout.
A critic's are in the same one, so both are always of the same step.

    save()   plan and copy (the step stops for this) ──► a thread of each rank writes, and reads back for the checksums
    poll()   all ranks have written? ──► the directory appears, old ones go

megatron's own background writers are a forked or spawned process per rank. A forked one needs a manager process that
outlives a killed learner, a spawned one imports torch for seconds and refuses to run without a GPU. Writing files needs
neither: it releases the interpreter lock. A step uses no random numbers (no dropout), so none are kept.

megatron has one optimiser for a rank's experts and one for the rest, or a single one, depending on the layout. Their tensors
are stored by the model's names, which no layout changes. Of the rest only the count of Adam's steps is state, not settings.
"""

import gc
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import StateDict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megarl.core.algorithm.advantages import Moments
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import from_rank_0, gathered
from megarl.core.base.rundir import RunDir, complete, step_folder
from megarl.core.base.types import Batch
from megarl.core.journal.journal import JournalReader
from megarl.core.learner import microbatch_size
from megarl.core.learner.network import out_of_memory_named
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint
from megarl.core.models.hf import everywhere
from megarl.core.recipe import Recipe, load
from megarl.core.weights.offload import Offload

log = logging.getLogger(__name__)

COUNTS = ("step", "skipped_steps", "skipped_in_row", "scaler_skipped_steps")
"""The trainer's attributes that a checkpoint keeps under their names."""

AGAIN_S = (2.0, 20.0)
"""Pauses before a checkpoint that could not be read, and is not known to be damaged, is read again."""


class Checkpoints:
    """A trainer's RUN/checkpoints. Every method is collective over all ranks."""

    def __init__(self, folder: Path, keep: int, trainer: Trainer, hf_source: Path) -> None:
        self.folder, self.keep, self.trainer, self.hf_source = folder, keep, trainer, hf_source
        self._writing: tuple[Path, threading.Thread, list[Callable[[], None]]] | None = None

    def save(self) -> None:
        """Begin to write the state as it is now, unless it is on disk already. Wait for an earlier write first."""
        self.finish()
        trainer = self.trainer
        step, path = trainer.step, step_folder(self.folder, trainer.step)
        if step == 0 or from_rank_0(path in checkpoint.complete(self.folder)):
            return
        begin = time.monotonic()
        model, critic = trainer.recipe.model.model_dump(mode="json"), trainer.critic is not None
        meta = checkpoint.CheckpointMeta(
            step=step, version=step, hf_source=str(self.hf_source), model=model, critic=critic
        )
        with out_of_memory_named("learner.optimizer_offload", "gathering the optimiser for a checkpoint; set it"):
            state = _state(trainer, is_loading=False)
        request = checkpoint.begin(path, state, meta)
        thread = threading.Thread()  # does nothing, on a rank that has nothing to write
        if request.async_fn is not None:
            rank, live, results = request.async_fn_args
            arguments = (rank, _copied(live, request.preload_fn(), trainer), results)
            thread = threading.Thread(target=request.async_fn, args=arguments, name="checkpoint")
        thread.start()
        self._writing = path, thread, request.finalize_fns
        log.info("checkpoint %s: the step stopped for %.2f s", path.name, time.monotonic() - begin)

    def poll(self, blocking: bool = False) -> None:
        """Complete a write that all ranks have finished. blocking: wait until they have."""
        if self._writing is None:
            return
        path, thread, steps = self._writing
        if blocking:
            thread.join()
        if any(gathered(thread.is_alive())):
            return
        self._writing = None
        with checkpoint.whole_or_gone(path):
            for step in steps:  # megatron's, which raise on all ranks what a thread met, then ours
                step()
        if dist.get_rank() == 0:
            checkpoint.prune(self.folder, self.keep)

    def finish(self) -> None:
        """Wait for an unfinished write."""
        self.poll(blocking=True)

    def load_latest(self) -> bool:
        """Continue from the newest intact checkpoint and put damaged newer ones aside. Return False if there is none.

        An error that proves no damage is raised after some tries: storage may be away for a while. What a killed writer left is
        removed, so that the next checkpoint finds its room.
        """
        loaded = False
        corrupt: list[Path] = []
        for path in reversed(from_rank_0(checkpoint.complete(self.folder))):
            try:
                self._load_in_several_tries(path)
            except checkpoint.CorruptCheckpoint as error:
                log.error("%s", error)
                corrupt.append(path)
                continue
            everywhere(lambda: _put_aside(corrupt) if dist.get_rank() == 0 else None)
            log.info("continuing from %s", path)
            loaded = True
            break
        if corrupt and not loaded:
            advice = "move them away to train again from the beginning"
            raise MegarlError(f"{self.folder}: none of the {len(corrupt)} checkpoints is intact; {advice}")
        if dist.get_rank() == 0:
            checkpoint.prune(self.folder, self.keep)
        return loaded

    def _load_in_several_tries(self, path: Path) -> None:
        for pause_s in AGAIN_S:
            try:
                self.load(path)
            except checkpoint.CorruptCheckpoint:
                raise
            except MegarlError as error:
                log.warning("%s; trying again in %g s", error, pause_s)
                time.sleep(pause_s)
            else:
                return
        self.load(path)

    def load(self, path: Path) -> None:
        """Put the checkpoint's weights, optimiser state and step into the trainer, or raise on all ranks."""
        trainer = self.trainer
        if trainer.critic and not all(checkpoint.intact_everywhere(lambda: checkpoint.read_meta(path).critic)):
            raise MegarlError(
                f"{path}: has no critic, which batch.centring=critic asks for; start another run (run.name) from its weights "
                "(`python -m checkpoints_tools convert megatron-to-hf`), or set the centring it was trained with"
            )
        loaded: StateDict = {}
        checkpoint.intact_everywhere(lambda: loaded.update(checkpoint.load(path, _state(trainer, is_loading=True))))
        _restore(trainer.policy, loaded)
        if trainer.critic:
            _restore(trainer.critic, loaded["critic"])
        trainer.moments = Moments(**loaded["moments"])
        for name in COUNTS:
            setattr(trainer, name, loaded.get(name, 0))  # early checkpoints lack the last one


def replay_parent(recipe: Recipe, rundir: RunDir, offload: Offload) -> None:
    """Write the first checkpoint of a run that forks between two of its parent's (megarl/run/fork.py), unless there is one: the
    parent's, or model.path, and its batches from there on by its recipe. COLLECTIVE. offload: of the servers' memory.
    """
    if from_rank_0(bool(complete(rundir.checkpoints))):
        return
    before, (_, step) = load(str(rundir.parent.recipe)), recipe.run.forked
    source, keep, journal = Path(before.model.path), recipe.checkpoint.keep, JournalReader(rundir.parent.rollouts)
    trainer, admission = Trainer(before, source), journal.fold().admission
    Checkpoints(rundir.parent.checkpoints, keep, trainer, source).load_latest()
    longest, rollouts = before.length.context_tokens, before.batch.prompts * before.sampling.generations
    microbatch_size.settle(trainer, longest, longest * rollouts, None, within=offload.released(trainer.step))
    while trainer.step < step:  # every rank reads for itself: these batches are settled
        log.info("step %d is replayed, to fork from %s", trainer.step, recipe.run.fork)
        batch = Batch(step=trainer.step, groups=journal.groups(admission.batch(trainer.step) or ()))
        with offload.released(trainer.step):
            trainer.train_step(trainer.sequences(batch))
    checkpoints = Checkpoints(rundir.checkpoints, keep, trainer, source)
    checkpoints.save()
    checkpoints.finish()
    del trainer, checkpoints  # two trainers may be more than a GPU holds
    gc.collect()
    torch.cuda.empty_cache()


def _put_aside(corrupt: list[Path]) -> None:
    """Rename each to `.unreadable`, in place of an earlier one of its step."""
    for path in corrupt:
        aside = path.with_name(f"{path.name}.unreadable")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)


def _state(trainer: Trainer, is_loading: bool) -> StateDict:
    """Return the trainer's whole state. The critic's tensors are named `critic.` and then as the policy's are."""
    state = _network_state(trainer.policy, is_loading)
    if trainer.critic:
        state["critic"] = _network_state(trainer.critic, is_loading)
        add_prefix_for_sharding(state["critic"], checkpoint.CRITIC)
    return state | {name: getattr(trainer, name) for name in COUNTS} | {"moments": asdict(trainer.moments)}


def _network_state(network: TrainedNetwork, is_loading: bool) -> StateDict:
    """Return the state of weights and optimiser."""
    state: StateDict = checkpoint.model_state(network.chunks)
    optimizers = []
    for optimizer in network.optimizer.chained_optimizers:
        with _places_without_padding(optimizer), nullcontext() if is_loading else _gathered_alone(optimizer):
            sharded = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=checkpoint.metadata())
        optimizers.append(sharded)
    if network.loss_scale is not None:
        state["loss_scale"] = network.loss_scale.plain_state()
    return state | {
        "optimizer": {i: optimizer["param_state"] for i, optimizer in enumerate(optimizers)},
        "adam_steps": optimizers[0]["optimizer"]["param_groups"][0].get("step", 0),
    }


@contextmanager
def _places_without_padding(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within this context megatron finds parameters among the gathered ones, where it leaves out the padding between buckets.

    It looks where they would be with the padding. Where a bucket ends off a multiple of 128 numbers and of the data-parallel
    ranks, all further state would be stored shifted: with several buckets, or a tied head, which has a bucket of its own.
    """
    buffers = getattr(optimizer, "buffers", [])  # a rank without parameters has none
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        starts = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
        padding = [bucket.offset - start for bucket, start in zip(buffer.buckets, starts, strict=False)]
        buffer.param_index_map = {
            parameter: (start - padding[bucket], end - padding[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


@contextmanager
def _gathered_alone(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within this context a rank that shares its optimiser with no other gathers its state in 12 bytes of the host's memory a
    parameter, where megatron's way for many ranks (get_parameter_state_dp_zero) takes 32, or 8 of the GPU's and 24.
    """
    if not getattr(optimizer, "buffers", []) or optimizer.data_parallel_group.size() > 1:
        yield
        return

    def gather(**_: object) -> StateDict:
        state: StateDict = {"buckets_coalesced": True}
        names = ("param", *optimizer.optimizer_state_keys)
        for n, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
            ((dtype, buckets),) = ranges.items()
            whole = {name: torch.zeros(buffer.numel_unpadded) for name in names}
            starts = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
            for start, bucket in zip(starts, buckets, strict=False):
                for parameter, place in bucket["param_map"].items():
                    here = slice(start + place["gbuf_local"].start, start + place["gbuf_local"].end)
                    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                    for name in names:
                        whole[name][here].copy_(tensors[name].detach())
            state[n] = {dtype: whole | {"numel_unpadded": buffer.numel_unpadded}}
        return state

    optimizer.get_parameter_state_dp_zero = gather
    try:
        yield
    finally:
        del optimizer.get_parameter_state_dp_zero


def _restore(network: TrainedNetwork, loaded: StateDict) -> None:
    """Put a saved `_network_state` back."""
    checkpoint.set_model_state(network.chunks, loaded)
    kind = {"param_state_sharding_type": checkpoint.metadata()["distrib_optim_sharding_type"]}
    for i, optimizer in enumerate(network.optimizer.chained_optimizers):
        settings = optimizer.state_dict()
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = loaded["adam_steps"]
        optimizer.load_state_dict(settings | kind | {"param_state": loaded["optimizer"][i]})
        if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
            # Its parts have this count now. Kept here, it would be given to them again before every step.
            for group in optimizer.optimizer.param_groups:
                del group["step"]
    if network.loss_scale is not None and "loss_scale" in loaded:
        network.loss_scale.restore(loaded["loss_scale"])


type WriteBucket = tuple[str, str, tuple[list[object], list[tuple[object, Tensor]]]]
"""megatron's write bucket: file, key, and what goes into it: data, and tensors after their descriptions."""


def _copied(live: list[WriteBucket], preloaded: list[WriteBucket], trainer: Trainer) -> list[WriteBucket]:
    """Return buckets that the next step does not change. Preloading has copied weights from a GPU, but not from a CPU; what was
    gathered of the optimiser is nobody else's.
    """
    chunks = [chunk for network in trainer.trained for chunk in network.chunks]
    weights = {
        t.untyped_storage().data_ptr() for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers()) if t.is_cpu
    }
    buckets = []
    for (file, key, (data, tensors)), (_, _, (_, present)) in zip(preloaded, live, strict=True):
        own = [
            (i, t.clone() if t is now and t.untyped_storage().data_ptr() in weights else t)
            for (i, t), (_, now) in zip(tensors, present, strict=True)
        ]
        buckets.append((file, key, (data, own)))
    return buckets

"""The learner's checkpoints: model, optimiser, next step and counts, written while training goes on, loaded at any layout.
A critic's model and optimiser are in the same one, so both are always of the same step.

    save()   plan and copy (the step stops for this) ──► a thread of each rank writes, and reads back for the checksums
    poll()   all ranks have written? ──► the directory appears, old ones go

megatron's own background writers are a forked or spawned process a rank. A forked one needs a manager process that
outlives a killed learner, a spawned one imports torch for seconds and refuses to run without a GPU. Writing files needs
neither: it lets go of the interpreter lock. A step uses no random numbers (no dropout), so none are kept.

megatron has one optimiser for a rank's experts and one for the rest, or a single one, by the layout. Their tensors are stored
by the model's names, which no layout changes; of the rest only the count of Adam's steps is state, for the recipe has it all.
"""

import logging
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCaller, AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from megarl.core.algorithm.advantages import Moments
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import from_rank_0
from megarl.core.base.rundir import step_folder
from megarl.core.learner.guards import out_of_memory_in_checkpoint_named
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint
from megarl.core.models.hf import everywhere

log = logging.getLogger(__name__)


class Checkpoints:
    """RUN/checkpoints of a trainer. Every method is collective over all ranks."""

    def __init__(self, folder: Path, keep: int, trainer: Trainer, hf_source: Path) -> None:
        self.folder, self.keep, self.trainer, self.hf_source = folder, keep, trainer, hf_source
        self._calls = _ThreadCalls()
        self._writing = folder  # the latest that was begun

    def save(self) -> None:
        """Begin to write the state as it is now, unless it is on disk already. A write still under way is waited for."""
        self.finish()
        trainer = self.trainer
        path = step_folder(self.folder, trainer.step)
        if trainer.step == 0 or from_rank_0(path.exists()):
            return
        begin = time.monotonic()
        meta = checkpoint.Meta(
            step=trainer.step,
            version=trainer.step,
            hf_source=str(self.hf_source),
            model=trainer.recipe.model.model_dump(mode="json"),
            critic=trainer.critic is not None,
        )
        self._writing = path
        with out_of_memory_in_checkpoint_named():
            state = _state(trainer, is_loading=False)
        checkpoint.save(path, state, meta, self._calls)
        log.info("checkpoint %s: the step stopped for %.2f s", path.name, time.monotonic() - begin)

    def poll(self) -> None:
        """Complete a write that all ranks have finished."""
        self._complete(blocking=False)

    def finish(self) -> None:
        """Wait for a write under way."""
        self._complete(blocking=True)

    def load_latest(self) -> bool:
        """Continue from the newest checkpoint that can be read; False if there is none at all.

        Unreadable newer ones are put aside, so that their steps can be saved again.
        """
        paths = from_rank_0(checkpoint.complete(self.folder))
        unreadable: list[Path] = []
        for path in reversed(paths):
            try:
                self.load(path)
            except _WithoutCritic:
                raise
            except MegarlError as error:
                log.error("%s", error)
                unreadable.append(path)
                continue
            if dist.get_rank() == 0:
                for bad in unreadable:
                    os.replace(bad, bad.with_name(f"{bad.name}.unreadable"))
            dist.barrier()
            log.info("continuing from %s", path)
            return True
        if unreadable:
            raise MegarlError(
                f"{self.folder}: none of the {len(unreadable)} checkpoints can be loaded; move them away to "
                "train again from the beginning"
            )
        return False

    def load(self, path: Path) -> None:
        """Put the checkpoint's weights, optimiser state and step into the trainer, or raise on all ranks."""
        trainer = self.trainer
        if trainer.critic and not checkpoint.read_meta(path).critic:
            raise _WithoutCritic(
                f"{path}: has no critic, which batch.centring=critic asks for; start another run (run.name) from its weights "
                "(`python -m checkpoints_tools convert megatron-to-hf`), or set the centring it was trained with"
            )
        loaded: dict[str, Any] = {}

        def read() -> None:
            loaded.update(checkpoint.load(path, _state(trainer, is_loading=True)))

        everywhere(read)
        _restore(trainer.policy, loaded)
        if trainer.critic:
            _restore(trainer.critic.network, loaded["critic"])
        trainer.step, trainer.moments = loaded["step"], Moments(**loaded["moments"])
        trainer.skipped_steps, trainer.skipped_in_row = loaded["skipped_steps"], loaded["skipped_in_row"]
        trainer.scaler_skipped_steps = loaded.get("scaler_skipped_steps", 0)

    def _complete(self, blocking: bool) -> None:
        with checkpoint.whole_or_gone(self._writing):
            completed = self._calls.maybe_finalize_async_calls(blocking=blocking)
        if completed and dist.get_rank() == 0:
            checkpoint.prune(self.folder, self.keep)


def _state(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    """Sharded state dict of all that a trainer is. The critic's tensors are named `critic.` and then as the policy's are."""
    state = _network_state(trainer.policy, is_loading)
    if trainer.critic:
        state["critic"] = _network_state(trainer.critic.network, is_loading)
        add_prefix_for_sharding(state["critic"], checkpoint.CRITIC)
    return state | {
        "step": trainer.step,
        "skipped_steps": trainer.skipped_steps,
        "skipped_in_row": trainer.skipped_in_row,
        "scaler_skipped_steps": trainer.scaler_skipped_steps,
        "moments": asdict(trainer.moments),
    }


def _network_state(network: TrainedNetwork, is_loading: bool) -> dict[str, Any]:
    """Of weights and optimiser."""
    state = checkpoint.model_state(network.chunks)
    optimizers = [
        optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=checkpoint.metadata())
        for optimizer in network.optimizer.chained_optimizers
    ]
    if network.loss_scale is not None:
        state["loss_scale"] = network.loss_scale.plain_state()
    return state | {
        "optimizer": {i: optimizer["param_state"] for i, optimizer in enumerate(optimizers)},
        "adam_steps": optimizers[0]["optimizer"]["param_groups"][0].get("step", 0),
    }


def _restore(network: TrainedNetwork, loaded: dict[str, Any]) -> None:
    """Put what was saved of `_network_state` back."""
    checkpoint.set_model_state(network.chunks, loaded)
    for i, optimizer in enumerate(network.optimizer.chained_optimizers):
        settings = optimizer.state_dict()
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = loaded["adam_steps"]
        kind = {"param_state_sharding_type": checkpoint.metadata()["distrib_optim_sharding_type"]}
        optimizer.load_state_dict(settings | kind | {"param_state": loaded["optimizer"][i]})
    if network.loss_scale is not None and "loss_scale" in loaded:
        network.loss_scale.restore(loaded["loss_scale"])


class _WithoutCritic(MegarlError):
    """A whole checkpoint of a run without one: an older one would be no better."""


class _ThreadCalls(AsyncCallsQueue):
    """megatron's queue of writes under way, each in a thread of this process."""

    def _get_async_caller(self) -> AsyncCaller:
        return _ThreadCaller()


class _ThreadCaller(AsyncCaller):
    """One write. Errors come back through the results queue and are raised on all ranks when the write is completed."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        if async_req.async_fn is None:  # this rank has nothing to write
            return
        rank, live, results = async_req.async_fn_args
        buckets = _copied(live, async_req.preload_fn())
        self._thread = threading.Thread(target=async_req.async_fn, args=(rank, buckets, results), name="checkpoint")
        self._thread.start()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if blocking and self._thread is not None:
            self._thread.join()
        alive = int(self._thread is not None and self._thread.is_alive())
        return not alive if no_dist else self.sync_all_async_calls(alive)

    def close(self, abort: bool = False) -> None:
        if self._thread is not None:
            self._thread.join()

    def __del__(self) -> None: ...


def _copied(live: list[Any], preloaded: list[Any]) -> list[Any]:
    """Write buckets the next step does not change: preloading copies from a GPU, but leaves a CPU's tensors as they are."""
    return [
        (
            file,
            key,
            (data, [(i, t.clone() if t is now else t) for (i, t), (_, now) in zip(tensors, present, strict=True)]),
        )
        for (file, key, (data, tensors)), (*_, (_, present)) in zip(preloaded, live, strict=True)
    ]

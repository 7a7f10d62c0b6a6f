"""The learner's checkpoints: model, optimiser, next step and counts, written while
training goes on, loaded at any layout. A critic's state is in the same checkpoint, so
both are always of the same step.

    save()   plan and copy (training stops for this)
               └─► a thread on each rank writes, and reads back for the checksums
    poll()   all ranks have written?
               └─► the directory appears, old ones are deleted

On a CPU a rank that has all of AdamW's state copies none of it, which would double the
learner's memory: it writes from the state itself, while the next gradients are
computed. The next update waits until that is done.

megatron's own background writers are a forked or spawned process per rank. A forked one
needs a manager process that outlives a killed learner; a spawned one imports torch for
seconds and refuses to run without a GPU. A thread is enough, since writing files
releases the interpreter lock. A step uses no random numbers (no dropout), so no
generator's state is saved.

Depending on the layout, megatron has one optimiser for a rank's experts and one for the
rest, or a single one. Their tensors are stored under the model's names, which are the
same at every layout (optimizer.py corrects how they are gathered). The only other state
of an optimiser is Adam's step count; the rest are settings.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import override

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import StateDict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megarl.core.algorithm.advantages import Moments
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import from_rank_0, gathered
from megarl.core.base.retention import Milestone, milestone_checkpoints, scored_checkpoints
from megarl.core.base.rundir import step_folder
from megarl.core.learner.network import out_of_memory_named
from megarl.core.learner.optimizer import written_in_place
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint
from megarl.core.models.hf import everywhere

log = logging.getLogger(__name__)

COUNTS = ("step", "skipped_steps", "skipped_in_row", "scaler_skipped_steps")
"""The trainer's attributes that a checkpoint keeps under their names."""

AGAIN_S = (2.0, 20.0)
"""Pauses before reading a checkpoint again that could not be read but is not known to
be damaged.
"""


LOOK_S = 1.0
"""Pause between looks at whether all ranks have written."""
MOST_FAILURES = 3
"""Failed writes in a row after which the learner ends. Before that training goes on,
since the file system may fail only for a moment, and the steps since the last
checkpoint would be trained again.
"""


class _PartWriter(threading.Thread):
    """Writes this rank's part. end: when it has ended, by time.monotonic()."""

    end = 0.0

    @override
    def run(self) -> None:
        try:
            super().run()
        finally:
            self.end = time.monotonic()


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is being written."""

    path: Path
    start: float  # time.monotonic()
    thread: "_PartWriter"
    # Megatron's, which raise a thread's error on all ranks, then ours.
    finish: list[Callable[[], None]]


class Checkpoints:
    """A trainer's RUN/checkpoints; collective over all ranks. milestones: besides the
    `keep` newest, these stay (retention.py), and with keep_best that of the best score.
    failures: of writes in a row; if any, call `save` again soon. write_seconds: how
    long the newest took to be whole on disk; None before the first.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        trainer: Trainer,
        hf_source: Path,
        milestones: Sequence[Milestone] = (),
        keep_best: bool = False,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.trainer = trainer
        self.hf_source = hf_source
        self.milestones = milestones
        self.keep_best = keep_best
        self._writing: _Write | None = None
        self.failures = 0
        self.write_seconds: float | None = None

    def has_begun(self) -> bool:
        """Return whether the present state is being written."""
        path = step_folder(self.folder, self.trainer.step)
        return self._writing is not None and self._writing.path == path

    def save(self) -> None:
        """Begin to write the present state, unless it is on disk already. First wait
        for an earlier write to end.
        """
        self.poll(blocking=True)
        trainer = self.trainer
        path = step_folder(self.folder, trainer.step)
        # step 0 is the model that the run starts from
        if trainer.step == 0 or from_rank_0(path in checkpoint.complete(self.folder)):
            return
        start = time.monotonic()
        with out_of_memory_named(
            "learner.optimizer_offload", "gathering the optimiser for a checkpoint; set it"
        ):
            state = _state(trainer, is_loading=False)
        try:
            request = checkpoint.start_save(path, state, self._meta())
        except MegarlError as error:
            return self._failed(error)
        thread = _PartWriter()  # does nothing: for a rank that has nothing to write
        if request.async_fn is not None:
            rank, _, results = request.async_fn_args
            arguments = (rank, request.preload_fn(), results)
            thread = _PartWriter(target=request.async_fn, args=arguments, name="checkpoint")
        thread.start()
        self._writing = _Write(path, start, thread, request.finalize_fns)
        if any(written_in_place(network.optimizer) for network in trainer.trained):
            trainer.before_update = self._wait_for_own_part
        log.info("checkpoint %s: the step stopped for %.2f s", path.name, time.monotonic() - start)

    def _meta(self) -> checkpoint.CheckpointMeta:
        """Return what the checkpoint says of itself."""
        trainer = self.trainer
        return checkpoint.CheckpointMeta(
            step=trainer.step,
            version=trainer.step,
            hf_source=str(self.hf_source),
            model=trainer.recipe.model.model_dump(mode="json"),
            critic=trainer.critic is not None,
        )

    def poll(self, blocking: bool = False) -> None:
        """Complete a write that all ranks have finished. blocking: wait until they
        have. If a rank could not write its part, all ranks count that in `failures`, or
        raise at the last one.
        """
        writing = self._writing
        if writing is None:
            return
        while any(gathered(writing.thread.is_alive())):
            if not blocking:
                return
            # Not to its end: a rank that waits for others in a collective gives up
            # after its limit.
            writing.thread.join(LOOK_S)
        self._writing = None
        write_seconds = max(gathered(writing.thread.end - writing.start))
        finish_start = time.monotonic()
        try:
            with checkpoint.whole_or_gone(writing.path):
                for finish in writing.finish:
                    finish()
        except MegarlError as error:
            return self._failed(error)
        self.failures = 0
        self.write_seconds = write_seconds + time.monotonic() - finish_start
        if dist.get_rank() == 0:
            self._prune()
            self._warn_if_disk_is_full(writing.path)

    def _warn_if_disk_is_full(self, path: Path) -> None:
        """Warn if another checkpoint as large as `path` would not fit on the disk."""
        size = sum(file.stat().st_size for file in path.iterdir())
        free = shutil.disk_usage(path).free
        if free < size:
            text = (
                "the next checkpoint, of %.1f GB, will not fit on the disk, which has %.1f GB"
                " left; free some"
            )
            log.warning(f"%s: {text}", self.folder, size / 1e9, free / 1e9)

    def _wait_for_own_part(self) -> None:
        """Wait until this rank has written the tensors that an update changes. Usually
        computing the gradients takes longer.
        """
        if self._writing is None:
            return
        start = time.monotonic()
        self._writing.thread.join()
        waited = time.monotonic() - start
        if waited > LOOK_S:
            log.info(
                "the update waited %.1f s for the checkpoint, which is written from the weights"
                " themselves",
                waited,
            )

    def _prune(self) -> None:
        """Delete the checkpoints that need not be kept. Only on rank 0."""
        to_keep = list(milestone_checkpoints(self.folder, self.milestones).values())
        if self.keep_best:
            to_keep += scored_checkpoints(self.folder)
        checkpoint.prune(self.folder, self.keep, to_keep)

    def _failed(self, error: MegarlError) -> None:
        """Count a failed write. Raise its error if it is the last one, or if other
        ranks may not know of it.
        """
        self.failures += 1
        # Our own errors and torch's of checkpoints are raised on all ranks, any other
        # perhaps on this one alone.
        cause = error.__cause__
        all_ranks_know = cause is None or isinstance(cause, (CheckpointException, MegarlError))
        if self.failures == MOST_FAILURES or not all_ranks_know:
            raise error
        if dist.get_rank() == 0:
            log.error("%s; training goes on, and the checkpoint of the next step is written", error)

    def finish(self) -> None:
        """Wait for an unfinished write. MegarlError if it failed."""
        self.poll(blocking=True)
        if self.failures:
            raise MegarlError(
                f"{self.folder}: the newest checkpoint could not be written; see the errors above"
            )

    def load_latest(self) -> bool:
        """Continue from the newest intact checkpoint and put damaged newer ones aside.
        Return False if there is no checkpoint. An error that does not prove damage is
        raised only after some tries, since storage may be unavailable for a while.
        """
        paths = from_rank_0(checkpoint.complete(self.folder))
        corrupt: list[Path] = []
        while paths:
            try:
                self._load_in_several_tries(paths[-1])
                break
            except checkpoint.CorruptCheckpoint as error:
                log.error("%s", error)
                corrupt.append(paths.pop())
        if paths:
            everywhere(lambda: _put_aside(corrupt) if dist.get_rank() == 0 else None)
            log.info("continuing from %s", paths[-1])
        elif corrupt:
            advice = "move them away to train again from the beginning"
            raise MegarlError(
                f"{self.folder}: none of the {len(corrupt)} checkpoints is intact; {advice}"
            )
        if dist.get_rank() == 0:
            self._prune()
        return bool(paths)

    def _load_in_several_tries(self, path: Path) -> None:
        """Load the checkpoint, again after each pause of AGAIN_S if that fails.
        CorruptCheckpoint at once if it is damaged; else the last error.
        """
        for pause_s in AGAIN_S:
            try:
                self.load(path)
                return
            except checkpoint.CorruptCheckpoint:
                raise
            except MegarlError as error:
                log.warning("%s; trying again in %g s", error, pause_s)
                time.sleep(pause_s)
        self.load(path)

    def load(self, path: Path) -> None:
        """Put the checkpoint's weights, optimiser state and step into the trainer, or
        raise on all ranks.
        """
        trainer = self.trainer
        if trainer.critic:
            _check_has_critic(path)
        loaded: StateDict = {}
        checkpoint.intact_everywhere(
            lambda: loaded.update(checkpoint.load(path, _state(trainer, is_loading=True)))
        )
        _restore(trainer.policy, loaded)
        if trainer.critic:
            _restore(trainer.critic, loaded["critic"])
        trainer.moments = Moments(**loaded["moments"])
        for name in COUNTS:
            setattr(trainer, name, loaded[name])


def _check_has_critic(path: Path) -> None:
    """MegarlError on all ranks if the checkpoint has no critic."""
    if not all(checkpoint.intact_everywhere(lambda: checkpoint.read_meta(path).critic)):
        raise MegarlError(
            f"{path}: has no critic, which batch.centring=critic asks for; start another run"
            " (run.name) from its weights (`megarl export`), or set the centring it was"
            " trained with"
        )


def _put_aside(corrupt: list[Path]) -> None:
    """Rename each checkpoint to `.unreadable`, replacing an earlier one of the same
    step.
    """
    for path in corrupt:
        aside = path.with_name(f"{path.name}.unreadable")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)


def _state(trainer: Trainer, is_loading: bool) -> StateDict:
    """Return the trainer's whole state. The names of the critic's tensors are `critic.`
    plus those of the policy's.
    """
    state = _network_state(trainer.policy, is_loading)
    if trainer.critic:
        state["critic"] = _network_state(trainer.critic, is_loading)
        add_prefix_for_sharding(state["critic"], checkpoint.CRITIC)
    for name in COUNTS:
        state[name] = getattr(trainer, name)
    state["moments"] = asdict(trainer.moments)
    return state


def _network_state(network: TrainedNetwork, is_loading: bool) -> StateDict:
    """Return the state of a network and its optimiser, by name. is_loading: a
    checkpoint is read into it; else it is written, with the weights of the last update.
    """
    if not is_loading:
        network.gather_weights()
    state: StateDict = checkpoint.model_state(network.chunks)
    optimizers = [
        optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=checkpoint.metadata())
        for optimizer in network.optimizer.chained_optimizers
    ]
    if not is_loading:
        _copy_what_megatron_would_not(state)
    if network.loss_scale is not None:
        state["loss_scale"] = network.loss_scale.plain_state()
    state["optimizer"] = {i: part["param_state"] for i, part in enumerate(optimizers)}
    state["adam_steps"] = optimizers[0]["optimizer"]["param_groups"][0].get("step", 0)
    return state


def _copy_what_megatron_would_not(model_state: StateDict) -> None:
    """Copy the tensors that megatron would write from where they are, so that the next
    step does not change what is being written. megatron itself copies those on a GPU,
    and views of a buffer, as most parameters are; the others are tensors on a CPU with
    a storage of their own, such as routers' biases.
    """
    for part in model_state.values():
        for tensor in part.values():
            data = tensor.data
            if data.is_cpu and data.untyped_storage().nbytes() == data.nbytes:
                tensor.data = data.clone()


def _restore(network: TrainedNetwork, loaded: StateDict) -> None:
    """Put a state as `_network_state` has it into the network and its optimiser."""
    checkpoint.set_model_state(network.chunks, loaded)
    format_of_state = {
        "param_state_sharding_type": checkpoint.metadata()["distrib_optim_sharding_type"]
    }
    for i, optimizer in enumerate(network.optimizer.chained_optimizers):
        settings = optimizer.state_dict()
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = loaded["adam_steps"]
        loaded_state = {"param_state": loaded["optimizer"][i]}
        optimizer.load_state_dict(settings | format_of_state | loaded_state)
        if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
            # Its parts have this count now. If it stayed here, it would be copied to
            # them before every step.
            for group in optimizer.optimizer.param_groups:
                del group["step"]
    if network.loss_scale is not None and "loss_scale" in loaded:
        network.loss_scale.restore(loaded["loss_scale"])

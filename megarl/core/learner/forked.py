"""The first checkpoint of a run that forks between two checkpoints of its parent (megarl/run/fork.py).

    RUN/parent/checkpoints/step-C, or model.path ─► a trainer by RUN/parent/recipe.yaml ─► RUN/checkpoints/step-S
                  RUN/parent/rollouts: batches C … S−1 ──┘

The trainer of the fork's own recipe is made afterwards, and loads that checkpoint as any that it would resume from. A learner
that dies on the way begins here again. The parent's recipe decides everything, so on a CPU the weights are the parent's, bit
for bit. Nothing is generated meanwhile: the controller waits, and servers that share the learner's GPUs give up their memory.

Every rank reads the batches for itself: they are settled, and the run directory is on storage that all nodes see.
"""

import gc
import logging
from pathlib import Path

import torch

from megarl.core.base.ranks import from_rank_0
from megarl.core.base.rundir import RunDir, complete
from megarl.core.base.types import Batch
from megarl.core.journal.journal import JournalReader
from megarl.core.learner import microbatch_size
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.recipe import Recipe, load
from megarl.core.weights.offload import Offload

log = logging.getLogger(__name__)


def replay_parent(recipe: Recipe, rundir: RunDir, offload: Offload) -> None:
    """Bring the run to the step at which it forks, unless it has a checkpoint. COLLECTIVE. offload: of the servers' memory."""
    _, step = recipe.run.forked
    if from_rank_0(bool(complete(rundir.checkpoints))):
        return
    before = load(str(rundir.parent.recipe))
    source, keep = Path(before.model.path), recipe.checkpoint.keep
    trainer = Trainer(before, source)
    Checkpoints(rundir.parent.checkpoints, keep, trainer, source).load_latest()
    longest, rollouts = before.length.context_tokens, before.batch.prompts * before.sampling.generations
    microbatch_size.settle(trainer, longest, longest * rollouts, None, within=offload.released(trainer.step))
    start = trainer.step
    _replay(trainer, JournalReader(rundir.parent.rollouts), step, offload)
    checkpoints = Checkpoints(rundir.checkpoints, keep, trainer, source)
    checkpoints.save()
    checkpoints.finish()
    log.info("forked from %s, by replay of %d steps", recipe.run.fork, step - start)
    del trainer, checkpoints  # two trainers may be more than a GPU holds
    gc.collect()
    torch.cuda.empty_cache()


def _replay(trainer: Trainer, journal: JournalReader, step: int, offload: Offload) -> None:
    """Train the journal's batches up to `step`."""
    admission = journal.fold().admission
    while trainer.step < step:
        log.info("step %d of the parent is replayed, to fork at %d", trainer.step, step)
        batch = Batch(step=trainer.step, groups=journal.groups(admission.batch(trainer.step) or ()))
        with offload.released(trainer.step):
            trainer.train_step(trainer.sequences(batch))

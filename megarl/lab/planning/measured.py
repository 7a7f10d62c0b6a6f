"""Lengths of completions that a run's journal holds, for a plan of the next run."""

from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.journal.journal import JournalReader
from megarl.lab.planning.workload import Measured

MOST_GROUPS = 500


def lengths_of(run: Path) -> Measured:
    """Of the latest groups, sampled tokens only."""
    rundir = RunDir(run)
    if not rundir.rollouts.is_dir():
        raise MegarlError(f"--lengths: {run} has no journal ({rundir.rollouts}); give a run directory")
    reader = JournalReader(rundir.rollouts)
    groups = reader.groups(reader.finished()[-MOST_GROUPS:])
    lengths = tuple(r.trained_tokens for g in groups for r in g.rollouts if r.trained_tokens)
    if not lengths:
        raise MegarlError(f"--lengths: the journal of {run} has no finished rollout yet")
    return Measured(lengths)

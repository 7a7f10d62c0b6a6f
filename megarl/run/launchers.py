"""Which launcher starts a run's roles."""

import logging
import os
import shutil

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe
from megarl.run.launcher import Launcher, LocalLauncher
from megarl.run.pods import PODS, PodLauncher
from megarl.run.srun import STEP_COMMAND, SrunLauncher

log = logging.getLogger(__name__)

LAUNCHER = "MEGARL_LAUNCHER"
"""Environment variable. local: processes here; srun: steps of a job; auto (default):
steps if several nodes or a container.
"""


PROGRAMS = ("srun", "scontrol", "squeue", "sinfo")


def choose_launcher(recipe: Recipe, rundir: RunDir) -> Launcher:
    """Return the launcher that MEGARL_LAUNCHER asks for. MegarlError if it asks for a
    Slurm job and there is none.
    """
    kind = os.environ.get(LAUNCHER, "auto")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "0"))
    if kind not in ("auto", "local", "srun"):
        raise MegarlError(f"{LAUNCHER}: {kind!r} is not a launcher; set auto, local or srun")
    if kind == "auto" and PODS in os.environ:
        return PodLauncher(rundir, recipe.run.interface)
    parts = int(os.environ.get("SLURM_HET_SIZE", "1"))
    if parts > 1 and kind != "local":
        log.warning(
            "this Slurm job has %d parts (--het-group): the run uses the nodes of one part alone",
            parts,
        )
    if kind == "srun" and not nodes:
        raise MegarlError(
            f"{LAUNCHER}: srun works inside a Slurm job (there is no SLURM_JOB_NUM_NODES here); see"
            " launch/slurm/ and `megarl submit`, or set local"
        )
    in_container = STEP_COMMAND in os.environ
    needs_steps = nodes > 1 or (nodes > 0 and in_container)
    if kind == "local" or (kind == "auto" and not needs_steps):
        return LocalLauncher(recipe.run.interface)
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise MegarlError(
            f"{LAUNCHER}: {', '.join(missing)} cannot be found, which steps of a Slurm job need;"
            " `megarl train` runs on the host, the roles in the container"
            " (launch/slurm/common.sh)"
        )
    return SrunLauncher(rundir, recipe.run.interface)

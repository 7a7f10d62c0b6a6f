"""`stand_in_megarl.py train RECIPE key=value …`: the real supervisor in a real Slurm
job, with small processes as the roles.

The run's last step is run.steps. See tests/unit/run/stand_in_role.py for what the roles
do.
"""

import dataclasses
import functools
import sys
from pathlib import Path

from megarl.checks import inputs, start
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe, load
from megarl.run import launchers, train
from megarl.run.devices import HostBytes
from megarl.run.launcher import RoleCommand
from megarl.run.srun import SrunLauncher, SrunStep
from megarl.run.watch import Watch

ROLE = Path(__file__).parents[1] / "unit" / "run" / "stand_in_role.py"


class StandInLauncher(SrunLauncher):
    """Starts the real way what is not the real thing."""

    def __init__(self, recipe: Recipe, rundir: RunDir) -> None:
        super().__init__(rundir, recipe.run.interface)
        self._steps = str(recipe.run.steps)

    def start(self, task: RoleCommand) -> SrunStep:
        run = str(task.rundir.path)
        words = (str(ROLE), task.role.kind, str(task.role.index), run, self._steps)
        return super().start(dataclasses.replace(task, arguments=words))


if __name__ == "__main__":
    launchers.choose_launcher = StandInLauncher
    train.Watch = functools.partial(Watch, stopped_s=1.0)  # type: ignore[misc, assignment]
    train.WATCH_S = 0.5
    # There is no model and no data; a report takes seconds of matplotlib.
    start.check_served = lambda recipe, placed: None
    start.check_disk = lambda recipe, rundir, folder: None
    recipe = load(sys.argv[2], sys.argv[3:])
    facts = inputs.facts_of(recipe) | {"fingerprints": {}, "host_bytes": HostBytes(0, 0)}
    sys.exit(train.main(recipe, facts, inputs.check_start, lambda rundir: None))

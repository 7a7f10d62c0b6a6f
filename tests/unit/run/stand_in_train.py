"""`stand_in_train.py RECIPE [report]`: the real supervisor, with small processes in the
place of the roles.
"""

import dataclasses
import functools
import sys
from pathlib import Path

from megarl.checks.inputs import check_inputs, check_start
from megarl.cli import write_report
from megarl.core import recipe as recipes
from megarl.core.base.rundir import RunDir
from megarl.run import launchers, restart, train
from megarl.run.launcher import LocalLauncher, LocalProcess, RoleCommand
from megarl.run.process import have_streams
from megarl.run.watch import Watch

ROLE = Path(__file__).with_name("stand_in_role.py")


class StandInLauncher(LocalLauncher):
    """Starts the real way what is not the real thing."""

    def __init__(self, run: Path, steps: str) -> None:
        super().__init__()
        self.run = run
        self.steps = steps

    def start(self, task: RoleCommand, n: int = 0) -> LocalProcess:
        command = (str(ROLE), task.role.kind, str(task.role.index), str(self.run), self.steps)
        process = super().start(dataclasses.replace(task, arguments=command), n)
        process.node_state = lambda: "down" if (self.run / "lost").exists() else "up"
        return process


if __name__ == "__main__":
    have_streams()
    loaded = recipes.load(sys.argv[1])
    launchers.choose_launcher = lambda recipe, rundir: StandInLauncher(
        RunDir(loaded.run.path).path, str(loaded.run.steps)
    )
    train.Watch = functools.partial(Watch, stopped_s=1.0)  # type: ignore[misc, assignment]
    train.WATCH_S = 0.2
    restart.LONGEST_DELAY_S = 0.1
    report = (
        write_report if sys.argv[2:] == ["report"] else lambda rundir: None
    )  # seconds of matplotlib, seen once
    sys.exit(train.main(loaded, check_inputs(loaded), check_start, report))

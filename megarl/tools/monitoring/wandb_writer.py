"""Writes to Weights & Biases if `WANDB_PROJECT` is set: the same scalars as to
TensorBoard, under the same names.

It never stops a run: without a network the run is written offline to RUN/wandb, for
`wandb sync`; otherwise W&B sends data from a process of its own. A thread hands them to
that process, which may hang. wandb reads the project and the key (WANDB_API_KEY) from
the environment. The run's id is kept in RUN/wandb/run-id, so that a resumed run
continues the same W&B run.
"""

import logging
import os
import queue
import secrets
import threading
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, write_atomically
from megarl.core.recipe import Recipe

log = logging.getLogger(__name__)

INIT_LIMIT_S = 30.0
FINISH_LIMIT_S = 60.0
"""Seconds after which the run is begun offline instead, and for sending the rest at the
end; what is left is in RUN/wandb.
"""
MOST_WAITING = 1000
"""Rows that wait while wandb takes none; those that come after them are dropped."""


def project() -> str:
    """Return the project to write to, or "" if there is none."""
    return os.environ.get("WANDB_PROJECT", "")


def check() -> None:
    """Raise MegarlError if the environment names a project, but wandb or the key for it
    is missing.
    """
    if not project():
        return
    if find_spec("wandb") is None:
        raise MegarlError(
            f"WANDB_PROJECT: {project()!r}, but wandb is not installed; `pip install wandb`, or"
            " unset it"
        )
    if os.environ.get("WANDB_MODE", "online") == "online" and not os.environ.get("WANDB_API_KEY"):
        raise MegarlError(
            "WANDB_PROJECT: needs WANDB_API_KEY in the environment; export it, or export"
            " WANDB_MODE=offline"
        )


class WandbWriter:
    """A writer of scalars to W&B, from a thread: whatever wandb raises, or waits for,
    the run goes on.
    """

    def __init__(self, recipe: Recipe, rundir: RunDir) -> None:
        # None: no more rows come.
        self._rows: queue.Queue[Mapping[str, float] | None] = queue.Queue()
        self._thread = threading.Thread(
            target=self._send, args=(recipe, rundir), name="wandb", daemon=True
        )
        self._thread.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the scalars of a step; drop them if too many wait."""
        if self._thread.is_alive() and self._rows.qsize() < MOST_WAITING:
            self._rows.put({**scalars, "step": step})

    def begin_again(self, step: int) -> None:
        """Do nothing: replayed steps are logged again. To W&B, `step` is an ordinary
        axis; it draws later points on top.
        """

    def close(self) -> None:
        """Wait until everything is sent, at most FINISH_LIMIT_S. After that, as long
        again is left for Python to exit, which waits for wandb's process.
        """
        self._rows.put(None)
        self._thread.join(FINISH_LIMIT_S)
        if self._thread.is_alive():
            log.warning(
                "W&B has not received everything within %g s; send the rest with `wandb sync`",
                FINISH_LIMIT_S,
            )
            ending = threading.Timer(FINISH_LIMIT_S, _end_process)
            ending.daemon = True
            ending.start()

    def _send(self, recipe: Recipe, rundir: RunDir) -> None:
        """Send rows until None comes, in the thread. Whatever wandb raises ends it,
        with a warning.
        """
        try:
            run = _start(recipe, rundir)
            while (row := self._rows.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:
            log.warning("W&B has failed and gets no more data: %s: %s", type(error).__name__, error)


def _end_process() -> None:
    """Kill wandb's process, for whose end wandb waits without a limit as Python
    exits.
    """
    for child in psutil.Process().children():
        if child.name() == "wandb-core":
            child.kill()


def _start(recipe: Recipe, rundir: RunDir) -> Any:
    """Start the run of W&B, or go on with it; offline if W&B cannot be reached. Return
    wandb's Run.
    """
    import wandb

    id_file = rundir.path / "wandb" / "run-id"
    id_file.parent.mkdir(exist_ok=True)
    if not id_file.exists():
        write_atomically(id_file, secrets.token_hex(4).encode())
    quiet = wandb.Settings(
        init_timeout=INIT_LIMIT_S, console="off", silent=True, disable_git=True, save_code=False
    )
    without_keys = {"data": {"services"}}  # a URL may contain a key
    start = partial(
        wandb.init,
        name=recipe.run.name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(rundir.path),
        config=recipe.model_dump(mode="json", exclude=without_keys),
        settings=quiet,
    )
    try:
        run = start()
    except wandb.Error as error:
        log.warning(
            "W&B cannot be reached, the run is written offline (`wandb sync` sends it): %s", error
        )
        wandb.teardown()  # wandb's process still holds the id
        run = start(mode="offline")
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run

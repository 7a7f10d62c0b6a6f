"""What the controller measures: how busy servers are, metrics of each task
(`pass_rate_train/math`) and of turns, and compute. Compute is devices held x wall time,
over all lives of the supervisor; a new life continues from the total of the journal or,
where that is more, of the status that the last one left.
"""

import os
import time
from dataclasses import dataclass

import numpy as np

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.rundir import RunDir
from megarl.core.base.types import Batch
from megarl.core.journal.records import Session, State, clock
from megarl.core.recipe import Recipe, Resources
from megarl.core.sampling.places import Places


class Meter:
    """How busy servers were since the last step, and since the last second."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._step = self._second = self._mark()

    def step(self) -> dict[str, float]:
        """Return metrics over all servers since the last call."""
        then = self._step
        self._step = self._mark()
        rates = np.array(list(_rates(then, self._step).values()))
        _, busy, running, *_ = rates.mean(axis=0).tolist()
        reusable, cached = (
            np.array(list(_grown(then, self._step).values()))[:, -2:].sum(axis=0).tolist()
        )
        clean = self._places.membership.clean()
        joined = self._places.membership.joined()
        stats = {
            "servers": float(len(clean)),
            "servers_joined": float(len(clean.keys() & joined.keys())),
        }
        stats |= {"rollout_tokens_per_second": float(rates[:, 0].sum()), "server_busy_share": busy}
        stats |= {"server_running_mean": running}
        stats |= {
            "server_places_mean": sum(use.limit for use in self._places.use.values()) / len(rates)
        }
        return stats | ({"cached_prompt_share": cached / reusable} if reusable else {})

    def totals(self) -> dict[int, dict[str, float]]:
        """Return totals of each server since the controller's start."""
        totals = self._mark()[1].items()
        return {
            server: {"tokens": float(tokens), "busy_seconds": float(busy)}
            for server, (tokens, busy, *_) in totals
        }

    def second(self) -> dict[int, dict[str, float]]:
        """Return each server's figures since the last call."""
        then = self._second
        self._second = self._mark()
        rates = _rates(then, self._second)
        uses = self._places.use
        return {
            server: {
                "running": uses[server].running,
                "tokens_per_second": float(tokens),
                "busy_share": float(busy),
            }
            for server, (tokens, busy, *_) in rates.items()
        }

    def _mark(self) -> "Mark":
        for use in self._places.use.values():
            use.change(0)  # brings the totals of seconds up to date
        totals = {
            s: np.array((u.tokens, u.busy_seconds, u.place_seconds, u.reusable, u.cached))
            for s, u in self._places.use.items()
        }
        return time.monotonic(), totals


type Mark = tuple[float, dict[int, np.ndarray]]
"""A time in seconds, and each server's totals at that time, [5]: tokens, busy seconds,
place-seconds, input tokens that could have been in its cache, and input tokens that
were.
"""


def _grown(then: Mark, now: Mark) -> dict[int, np.ndarray]:
    """Return the growth of the totals, [5], by server; a server that joined in between
    started from 0.
    """
    return {s: np.maximum(totals - then[1].get(s, 0.0), 0.0) for s, totals in now[1].items()}


def _rates(then: Mark, now: Mark) -> dict[int, np.ndarray]:
    """Return the growth of the totals per second, [5], by server."""
    seconds = max(now[0] - then[0], 1e-9)
    return {s: grown / seconds for s, grown in _grown(then, now).items()}


OF_EACH_TASK = (
    "pass_rate_train",
    "reward_mean",
    "reward_gap",
    "zero_variance_share",
    "groups_in_loss",
    "void_groups",
    "truncation_rate",
    "interruption_rate",
    "format_error_rate",
    "grader_timeout_rate",
    "grader_error_rate",
    "completion_tokens_mean",
    "completion_tokens_right_mean",
    "completion_tokens_wrong_mean",
    "generated_tokens",
)


def task_statistics(batch: Batch, recipe: Recipe) -> dict[str, float]:
    """Return metrics of each task's groups in the batch; rates are NaN for a task
    without groups in it.
    """
    played = [name for name, task in recipe.data.tasks.items() if task.environment or task.agent]
    metrics = turn_statistics(batch) if played else {}
    if len(recipe.data.tasks) == 1:
        return metrics
    for task in recipe.data.tasks:
        of_task = Batch(
            step=batch.step, groups=tuple(g for g in batch.groups if g.prompt.task == task)
        )
        statistics = batch_statistics(of_task, recipe)
        rewards = [name for name in statistics if name.startswith("reward/")]
        metrics |= {f"{name}/{task}": statistics[name] for name in (*OF_EACH_TASK, *rewards)}
        if task in played:
            metrics |= {f"{name}/{task}": value for name, value in turn_statistics(of_task).items()}
    return metrics


def turn_statistics(batch: Batch) -> dict[str, float]:
    """Return metrics of rollouts with an environment or an agent; NaN if there are
    none, or none made a call.
    """
    episodes = [r.episode for g in batch.groups for r in g.rollouts if r.episode is not None]
    calls = sum(e.calls for e in episodes)
    return {
        "turns_mean": float(np.mean([e.turns for e in episodes])) if episodes else float("nan"),
        "turn_limit_rate": (
            float(np.mean([e.limited for e in episodes])) if episodes else float("nan")
        ),
        "tool_error_rate": sum(e.errors for e in episodes) / calls if calls else float("nan"),
        "tool_seconds": sum(e.seconds for e in episodes) / calls if calls else float("nan"),
    }


def session_of(rundir: RunDir) -> Session:
    """Return the journal record of the supervisor's present life, which began when it
    wrote the endpoints.
    """
    endpoints = rundir.endpoints()
    return Session(
        session=endpoints.session,
        time=rundir.endpoints_file.stat().st_mtime,
        devices=endpoints.gpus or os.cpu_count() or 1,
        compute_unit="gpu" if endpoints.gpus else "core",
        spent=endpoints.spent,
    )


@dataclass(frozen=True)
class Spent:
    """Device hours so far."""

    total: float
    startup: (
        float  # in each life of the supervisor, until weights were first published, replay included
    )
    evaluation: (
        float  # of servers held for evaluations; time that others waited for them is not counted
    )

    def row(self) -> dict[str, float]:
        """Return the columns for a row of metrics, without the total."""
        rest = self.total - self.startup - self.evaluation
        return {
            "startup_hours": self.startup,
            "evaluation_hours": self.evaluation,
            "training_hours": rest,
        }


class _DeviceHours:
    """Hours of a changing number of devices. Setting the wall clock does not affect
    them.
    """

    def __init__(self, hours: float, devices: int = 0) -> None:
        self._since = time.monotonic()
        self._before = hours
        self.devices = devices

    def total(self) -> float:
        return self._before + self.devices * (time.monotonic() - self._since) / 3600

    def change(self, devices: int) -> None:
        self._before, self.devices, self._since = self.total(), devices, time.monotonic()


class ComputeClock:
    """Counts device-hours: `hours()` is the total so far, `spent()` its breakdown.
    held: number of devices now.
    """

    def __init__(self, state: State, resources: Resources) -> None:
        assert state.session is not None
        self._state = state
        self.unit = state.session.compute_unit
        # The state counts these hours only when the next record is written.
        self._own = _DeviceHours(state.compute_hours(clock.now()), state.session.devices)
        self._joined, self._evaluation = (
            _DeviceHours(state.joined_hours),
            _DeviceHours(state.evaluation_hours),
        )
        self._server_devices = resources.server_tensor_parallel * (
            1 if self.unit == "gpu" else resources.threads
        )

    @property
    def held(self) -> int:
        return self._own.devices + self._joined.devices

    def hours(self) -> float:
        return self._own.total() + self._joined.total()

    def join(self, servers: int) -> None:
        """Note how many joined servers there are from now on."""
        self._joined.change(servers * self._server_devices)

    def joined_hours(self) -> float:
        """Return the hours of joined servers, over all lives."""
        return self._joined.total()

    def hold(self, servers: int) -> None:
        """Note how many servers are held for evaluations from now on."""
        self._evaluation.change(min(servers * self._server_devices, self.held))

    def spent(self) -> Spent:
        """Return the hours so far. A life of the supervisor is starting up until its
        first record of a publication.
        """
        state = self._state
        own = self._own.total()
        starting = 0.0 if state.session_published else own - state.earlier_hours
        return Spent(
            own + self._joined.total(), state.startup_hours + starting, self._evaluation.total()
        )

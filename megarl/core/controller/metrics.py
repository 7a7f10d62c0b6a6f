"""What the controller measures: how busy servers are, metrics of each task
(`pass_rate_train/math`) and of turns, and compute. Compute is devices held x wall time,
over all lives of the supervisor; a new life continues from the total of the journal or,
where that is more, of the status that the last one left.
"""

import math
import os
import time
from dataclasses import dataclass
from statistics import fmean

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.rundir import RunDir
from megarl.core.base.types import Batch
from megarl.core.journal.records import Session, State, clock
from megarl.core.recipe import Recipe, Resources
from megarl.core.sampling.places import Places


@dataclass(frozen=True)
class ServerTotals:
    """A server's totals since the controller's start, or their growth."""

    tokens: float = 0.0
    busy_seconds: float = 0.0
    place_seconds: float = 0.0
    reusable: float = 0.0  # input tokens that could have been in its cache
    cached: float = 0.0  # input tokens that were

    def since(self, earlier: "ServerTotals") -> "ServerTotals":
        """Return the growth since `earlier`; never negative, though a server that left
        and came back starts from 0.
        """
        return ServerTotals(
            tokens=max(self.tokens - earlier.tokens, 0.0),
            busy_seconds=max(self.busy_seconds - earlier.busy_seconds, 0.0),
            place_seconds=max(self.place_seconds - earlier.place_seconds, 0.0),
            reusable=max(self.reusable - earlier.reusable, 0.0),
            cached=max(self.cached - earlier.cached, 0.0),
        )


@dataclass(frozen=True)
class MeterReading:
    """All servers' totals at a time, in seconds of the monotonic clock."""

    time: float
    servers: dict[int, ServerTotals]

    def growth(self, earlier: "MeterReading") -> dict[int, ServerTotals]:
        """Return each server's growth since `earlier`; one that joined since then
        started from 0.
        """
        return {
            server: totals.since(earlier.servers.get(server, ServerTotals()))
            for server, totals in self.servers.items()
        }

    def seconds(self, earlier: "MeterReading") -> float:
        """Return the time since `earlier`, never 0."""
        return max(self.time - earlier.time, 1e-9)


class Meter:
    """How busy servers were since the last step, and since the last second."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._last_step = self._read()
        self._last_second = self._last_step

    def step(self) -> dict[str, float]:
        """Return metrics over all servers since the last call."""
        earlier = self._last_step
        self._last_step = self._read()
        seconds = self._last_step.seconds(earlier)
        growth = list(self._last_step.growth(earlier).values())
        limits = [use.limit for use in self._places.use.values()]
        clean = self._places.membership.clean()
        joined_servers = self._places.membership.joined_servers()
        metrics = {
            "servers": float(len(clean)),
            "servers_joined": float(len(clean.keys() & joined_servers.keys())),
            "rollout_tokens_per_second": sum(server.tokens for server in growth) / seconds,
            "server_busy_share": fmean(server.busy_seconds for server in growth) / seconds,
            "server_running_mean": fmean(server.place_seconds for server in growth) / seconds,
            "server_places_mean": fmean(limits),
        }
        reusable = sum(server.reusable for server in growth)
        if reusable:
            metrics["cached_prompt_share"] = sum(server.cached for server in growth) / reusable
        return metrics

    def totals(self) -> dict[int, dict[str, float]]:
        """Return totals of each server since the controller's start."""
        return {
            server: {"tokens": totals.tokens, "busy_seconds": totals.busy_seconds}
            for server, totals in self._read().servers.items()
        }

    def second(self) -> dict[int, dict[str, float]]:
        """Return each server's figures since the last call."""
        earlier = self._last_second
        self._last_second = self._read()
        seconds = self._last_second.seconds(earlier)
        return {
            server: {
                "running": self._places.use[server].running,
                "tokens_per_second": growth.tokens / seconds,
                "busy_share": growth.busy_seconds / seconds,
            }
            for server, growth in self._last_second.growth(earlier).items()
        }

    def _read(self) -> MeterReading:
        """Return each server's totals up to now."""
        servers = {}
        for server, use in self._places.use.items():
            use.change(0)  # brings the totals of seconds up to date
            servers[server] = ServerTotals(
                tokens=float(use.tokens),
                busy_seconds=use.busy_seconds,
                place_seconds=use.place_seconds,
                reusable=float(use.reusable),
                cached=float(use.cached),
            )
        return MeterReading(time.monotonic(), servers)


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
    tasks = recipe.data.tasks
    with_turns = [name for name, task in tasks.items() if task.environment or task.agent]
    metrics: dict[str, float] = {}
    if with_turns:
        metrics |= turn_statistics(batch)
    if len(tasks) == 1:
        return metrics
    for task in tasks:
        groups = tuple(group for group in batch.groups if group.prompt.task == task)
        task_batch = Batch(step=batch.step, groups=groups)
        statistics = batch_statistics(task_batch, recipe)
        rewards = [name for name in statistics if name.startswith("reward/")]
        for name in (*OF_EACH_TASK, *rewards):
            metrics[f"{name}/{task}"] = statistics[name]
        if task in with_turns:
            for name, value in turn_statistics(task_batch).items():
                metrics[f"{name}/{task}"] = value
    return metrics


def turn_statistics(batch: Batch) -> dict[str, float]:
    """Return metrics of rollouts with an environment or an agent; NaN if there are
    none, or none made a call.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    metrics = dict.fromkeys(
        ("turns_mean", "turn_limit_rate", "tool_error_rate", "tool_seconds"), math.nan
    )
    if episodes:
        metrics["turns_mean"] = fmean(episode.turns for episode in episodes)
        metrics["turn_limit_rate"] = fmean(episode.limited for episode in episodes)
    calls = sum(episode.calls for episode in episodes)
    if calls:
        metrics["tool_error_rate"] = sum(episode.errors for episode in episodes) / calls
        metrics["tool_seconds"] = sum(episode.seconds for episode in episodes) / calls
    return metrics


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
    # In each life of the supervisor until weights were first published, with replay.
    startup: float
    # Of servers held for evaluations. Time that others waited for them is not counted.
    evaluation: float

    def row(self) -> dict[str, float]:
        """Return the columns for a row of metrics, without the total."""
        return {
            "startup_hours": self.startup,
            "evaluation_hours": self.evaluation,
            "training_hours": self.total - self.startup - self.evaluation,
        }


class _DeviceHours:
    """Hours of a changing number of devices. Setting the wall clock does not affect
    them.
    """

    def __init__(self, hours: float, devices: int = 0) -> None:
        self._since = time.monotonic()
        self._hours_before = hours
        self.devices = devices

    def total(self) -> float:
        """Return the hours so far."""
        elapsed_hours = (time.monotonic() - self._since) / 3600
        return self._hours_before + self.devices * elapsed_hours

    def change(self, devices: int) -> None:
        """Count this many devices from now on."""
        self._hours_before = self.total()
        self._since = time.monotonic()
        self.devices = devices


class ComputeClock:
    """Counts device-hours: `hours()` is the total so far, `spent()` its breakdown.
    devices: their number now.
    """

    def __init__(self, state: State, resources: Resources) -> None:
        assert state.session is not None
        self._state = state
        self.unit = state.session.compute_unit
        # Up to now: by itself the state has the hours up to its last record.
        self._started = _DeviceHours(state.compute_hours(clock.read()), state.session.devices)
        self._joined = _DeviceHours(state.joined_hours)
        self._evaluation = _DeviceHours(state.evaluation_hours)
        self._server_devices = resources.server_tensor_parallel
        if self.unit == "core":
            self._server_devices *= resources.threads

    @property
    def devices(self) -> int:
        """The devices of the run's own roles and of joined servers."""
        return self._started.devices + self._joined.devices

    def hours(self) -> float:
        """Return the device-hours so far."""
        return self._started.total() + self._joined.total()

    def join(self, servers: int) -> None:
        """Note how many joined servers there are from now on."""
        self._joined.change(servers * self._server_devices)

    def joined_hours(self) -> float:
        """Return the hours of joined servers, over all lives."""
        return self._joined.total()

    def hold(self, servers: int) -> None:
        """Note how many servers are held for evaluations from now on."""
        held_devices = servers * self._server_devices
        # on CPUs the servers may have more threads than there are cores
        self._evaluation.change(min(held_devices, self.devices))

    def spent(self) -> Spent:
        """Return the hours so far. A life of the supervisor is starting up until its
        first record of a publication.
        """
        state = self._state
        startup = state.startup_hours
        if not state.session_published:
            startup += self._started.total() - state.earlier_hours
        return Spent(self.hours(), startup, self._evaluation.total())

"""`megarl learn` as a process, one rank and two, told what to do over the real
protocol.

The controller is scripted: a real one has nothing to train without servers (tests/e2e
has all roles). Nothing is published.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from megarl.core import recipe as recipes
from megarl.core.base.messages import (
    Ack,
    Experts,
    Next,
    RecordedExperts,
    Reply,
    Request,
    Stop,
    Stopped,
    Train,
    Wait,
    from_frames,
    to_frames,
)
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import (
    Endpoints,
    LinkKeys,
    RunDir,
    append_jsonl,
    complete,
    latest_rows,
    read_jsonl,
    step_of,
)
from megarl.core.base.types import Batch
from megarl.run.process import free_ports
from megarl.tools.report.trace import read
from tests.damage import cut_in_half, flip_a_bit
from tests.parallel.test_learner_layouts import make_batch
from tests.parallel.test_routing_replay import with_routing
from tests.processes import LEARNERS, Forked
from tests.recorded import fetch_from, outlined
from tests.tiny import tiny_llama, tiny_qwen3_moe

LIMIT_S = 180
ROOT = Path(__file__).parents[2]


class ScriptedController(threading.Thread):
    """Batch s for step s, one Wait in between, Stop after `steps`; `asked` is every
    step somebody asked for. batch: with recorded experts or without.
    """

    def __init__(self, address: str, keys: LinkKeys, steps: int, batch: Batch) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.keys = keys
        self.steps = steps
        self.asked: list[int] = []
        self.stopped: list[int] = []
        self.end = threading.Event()
        self.broken: set[int] = set()  # steps whose batch has a log-prob that is no number
        self.saved: set[int] = set()  # steps before which the learner is to write a checkpoint
        self.batch = batch
        self.withheld: int | None = None  # the step whose experts are not sent
        self.experts_asked: list[int] = []
        self.held: int | None = (
            None  # the step whose batch is not complete until this is None again
        )

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.curve_secretkey = self.keys.controller_secret.encode()
            socket.curve_server = True
            socket.bind(self.address)
            while not self.end.is_set():
                if socket.poll(100):
                    peer, empty, *frames = socket.recv_multipart()
                    request = from_frames(frames, Request)
                    data: list[bytes] = []
                    if isinstance(request, Experts):
                        self.experts_asked.append(request.step)
                        if request.step == self.withheld:
                            continue
                        data = fetch_from(self.batch)(request.ticket, request.rollouts)
                    frames = to_frames(self._reply(request))
                    socket.send_multipart([peer, empty, *frames, *data])

    def _reply(self, request: Request) -> Reply:
        if isinstance(request, Stopped):
            self.stopped.append(request.step)
            return Ack()
        if isinstance(request, Experts):
            return RecordedExperts()
        assert isinstance(request, Next)
        self.asked.append(request.step)
        if self.asked.count(request.step) % 2 or request.step == self.held:
            return Wait(reason="batch not complete")
        if request.step == self.steps:
            return Stop(reason="the last step is done")
        batch = with_rewards_of(request.step, outlined(self.batch))
        if request.step in self.broken:
            batch = with_a_broken_rollout(batch)
        stats = {"generated_tokens": 321.0}
        save = request.step in self.saved
        return Train(batch=batch, compute_hours=1.0, compute_devices=2, stats=stats, save=save)


def with_rewards_of(step: int, batch: Batch) -> Batch:
    """The batch of that step, whose rewards lie step + 1 times as far apart."""
    groups = tuple(
        msgspec.structs.replace(
            g,
            rollouts=tuple(
                msgspec.structs.replace(r, reward=r.reward * (step + 1)) for r in g.rollouts
            ),
        )
        for g in batch.groups
    )
    return msgspec.structs.replace(batch, step=step, groups=groups)


def with_a_broken_rollout(batch: Batch) -> Batch:
    """Sample 1 of the first ticket."""
    group = batch.groups[0]
    rollout = group.rollouts[1]
    segment = rollout.segments[0]
    segment = msgspec.structs.replace(segment, logprobs=np.full_like(segment.logprobs, np.nan))
    rollout = msgspec.structs.replace(rollout, segments=(segment, *rollout.segments[1:]))
    rollouts = (group.rollouts[0], rollout, *group.rollouts[2:])
    group = msgspec.structs.replace(group, rollouts=rollouts)
    return msgspec.structs.replace(batch, groups=(group, *batch.groups[1:]))


class Run:
    """A run directory, its controller, and learners started in it."""

    def __init__(self, folder: Path, model: Path, steps: int, /, **overrides: Any) -> None:
        tree: dict[str, Any] = {
            "run": {"name": "r", "dir": str(folder), "steps": steps, "resume": "auto"},
            "model": {"path": str(model), "dtype": "fp32"},
            "batch": {"prompts": 4},
            "checkpoint": {"every": 2},
            "learner": {"microbatch_tokens": 64, "optimizer": {"lr": 1e-3, "warmup_steps": 0}},
        }
        for section, values in overrides.items():
            tree[section] = tree.get(section, {}) | values
        recipe = recipes.from_tree(tree)
        self.rundir = RunDir(recipe.run.path)
        self.rundir.create()
        self.rundir.recipe.write_text(recipes.dump(recipe))
        controller, rendezvous = free_ports(2)
        keys = LinkKeys.new()
        address = f"tcp://127.0.0.1:{controller}"
        self.rundir.write_endpoints(
            Endpoints(
                session="s",
                controller=address,
                servers=(),
                api_key="",
                admin_key="",
                link=keys,
                rendezvous_port=rendezvous,
            )
        )
        batch = make_batch()
        if recipe.model.moe.routing_replay:
            batch = with_routing(batch, layers=4, chosen=2)
        self.controller = ScriptedController(address, keys, steps, batch)
        self.controller.start()
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def learn(
        self, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes] | Forked:
        """Forked, if its Python needs no other environment."""
        arguments = ["learn", str(self.rundir.recipe)]
        log = self.rundir.logs / "learner.log"
        if environment is None:
            env = {"PYTHONPATH": str(ROOT)} | os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = LEARNERS.megarl(arguments, Path.cwd(), env, log)
            return self.process
        command = [sys.executable, "-W", "ignore", "-m", "megarl", *arguments]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                env={"PYTHONPATH": str(ROOT)} | dict(environment) | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self.process

    def log(self) -> str:
        return (self.rundir.logs / "learner.log").read_text()[-4000:]

    def rows(self) -> list[dict[str, Any]]:
        return latest_rows(self.rundir.metrics)

    def wait_for_step(self, step: int) -> None:
        self._wait_for(lambda: step in self.controller.asked)

    def wait_for_checkpoint(self, step: int) -> None:
        self._wait_for(lambda: step in map(step_of, complete(self.rundir.checkpoints)))

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until, self.log()
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self.controller.end.set()
        self.controller.join(10)


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop") / "model"
    tiny_llama(path, vocab_size=131)
    return path


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.close()


def trained(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("step", "weight_version", "loss", "grad_norm", "entropy", "advantage_std")
    return [tuple(row[n] for n in names) for row in rows]


@pytest.mark.faults
def test_a_learner_that_lost_its_steps_replays_them_bit_for_bit(
    tmp_path: Path, model: Path, runs: list[Run]
) -> None:
    running = {"advantage": "running"}
    straight = Run(tmp_path / "straight", model, 5, batch=running, checkpoint={"keep_best": True})
    killed = Run(tmp_path / "killed", model, 5, batch=running)
    runs += [straight, killed]
    straight.controller.saved = {3}
    scores = {"n_prompts": 9, "samples": 1, "compute_hours": 1.0, "compute_unit": "core"}
    for step, score in ((2, 0.5), (3, 0.9), (4, 0.6)):
        append_jsonl(straight.rundir.eval, scores | {"step": step, "pass_rate": score})
    assert straight.learn().wait(LIMIT_S) == 0, straight.log()
    rows = straight.rows()
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    assert straight.controller.stopped == [5]
    kept = sorted(p.name for p in straight.rundir.checkpoints.iterdir())
    assert kept == [
        "step-0000003",
        "step-0000004",
        "step-0000005",
    ], "the best, which was asked for, and checkpoint.keep"
    for step, row in enumerate(rows):  # centred rewards are 0 on average and lie step + 1 from it
        squares = np.mean((np.arange(step + 1) + 1) ** 2)
        assert row["advantage_std"] == pytest.approx((step + 1) / np.sqrt(squares))
    for row in rows:
        assert row["compute_unit"] == "core"
        assert 1.0 <= row["compute_hours"] < 1.1
        assert row["tokens_per_second"] == pytest.approx(321 / row["step_seconds"])
        assert 0 <= row["learner_idle_share"] <= 1

    learner = killed.learn()
    killed.wait_for_step(4)  # checkpoint 2 is behind it, and perhaps 4
    os.killpg(learner.pid, signal.SIGKILL)
    learner.wait(10)
    before = len(killed.controller.asked)
    assert killed.learn().wait(LIMIT_S) == 0, killed.log()
    assert killed.controller.asked[before] in (2, 4)
    assert trained(killed.rows()) == trained(rows)

    for damage in (cut_in_half, flip_a_bit):
        (file,) = (killed.rundir.checkpoints / "step-0000005").glob("*.distcp")
        damage(file)
        before = len(killed.controller.asked)
        assert killed.learn().wait(LIMIT_S) == 0, killed.log()
        assert f"{file}: its checksum is " in killed.log()
        aside = killed.rundir.checkpoints / "step-0000005.unreadable"
        assert aside.exists()
        assert killed.controller.asked[before] == 4
        assert killed.controller.asked[-2:] == [5, 5]
        assert trained(killed.rows()) == trained(rows)
        shutil.rmtree(aside)

    shutil.rmtree(killed.rundir.checkpoints)
    killed.rundir.checkpoints.mkdir()
    tiny_llama(tmp_path / "other", seed=1, vocab_size=131)
    killed.rundir.recipe.write_text(
        killed.rundir.recipe.read_text().replace(str(model), str(tmp_path / "other"))
    )
    written = killed.rundir.metrics.read_bytes()
    assert killed.learn().wait(LIMIT_S) == 2, "other weights than those that made the rows"
    assert "step 0: trained_logprob_diff is " in killed.rundir.failure_file.read_text()
    assert killed.rundir.metrics.read_bytes() == written
    assert not list(killed.rundir.checkpoints.iterdir())


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_of_slurm_or_a_terminal_has_a_rank_save(
    tmp_path: Path, model: Path, runs: list[Run], number: signal.Signals
) -> None:
    """torchrun passes them on to its ranks."""
    run = Run(tmp_path, model, 50)
    runs.append(run)
    run.controller.held = 2
    learner = run.learn()
    run.wait_for_step(2)
    learner.send_signal(number)
    assert learner.wait(LIMIT_S) == 0, run.log()
    assert run.controller.stopped == [2]
    assert [step_of(path) for path in complete(run.rundir.checkpoints)] == [2]
    assert run.rundir.stop_signal() == number


@pytest.mark.slow
def test_ranks_that_wait_for_experts_stop_and_replay_them_bit_for_bit(
    tmp_path: Path, runs: list[Run]
) -> None:
    tiny_qwen3_moe(tmp_path / "model", vocab_size=131)
    keys = {
        "model": {"moe": {"routing_replay": True}, "expert_parallel": 2},
        "resources": {"learner_ranks": 2},
    }
    straight, stopped = (Run(tmp_path / name, tmp_path / "model", 3, **keys) for name in "ab")
    runs += [straight, stopped]
    assert straight.learn().wait(LIMIT_S) == 0, straight.log()
    rows = straight.rows()
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert all(0.9 < r["routing_replayed"] < 1 for r in rows)

    stopped.controller.withheld = 1
    learner = stopped.learn()
    stopped._wait_for(lambda: 1 in stopped.controller.experts_asked)
    stopped.rundir.stop_file.touch()
    assert learner.wait(LIMIT_S) == 0, stopped.log()
    assert stopped.controller.stopped == [1]
    assert [step_of(path) for path in complete(stopped.rundir.checkpoints)] == [1]
    stopped.rundir.stop_file.unlink()
    stopped.controller.withheld = None
    assert stopped.learn().wait(LIMIT_S) == 0, stopped.log()
    assert trained(stopped.rows()) == trained(rows)


@pytest.mark.slow
def test_two_ranks_save_when_told_to_stop_and_go_on(
    tmp_path: Path, model: Path, runs: list[Run]
) -> None:
    run = Run(tmp_path, model, 4, resources={"learner_ranks": 2}, monitor={"profile_steps": [1, 1]})
    runs.append(run)
    learner = run.learn()
    run.wait_for_step(3)
    run.rundir.stop_file.touch()
    assert learner.wait(LIMIT_S) == 0, run.log()
    (saved,) = run.controller.stopped
    assert saved in (3, 4)
    assert (run.rundir.checkpoints / f"step-{saved:07}" / "megarl.json").exists()
    run.rundir.stop_file.unlink()
    assert run.learn().wait(LIMIT_S) == 0, run.log()
    assert [r["step"] for r in run.rows()] == [0, 1, 2, 3]
    profiles = {path.name for path in run.rundir.profile.iterdir()}
    assert profiles == {f"step-0000001-rank-{rank}.json.gz" for rank in range(2)}, (
        "each rank, that step, one life"
    )
    spans, _ = read(run.rundir.trace)
    assert [s.args["step"] for s in spans if s.name.startswith("step")] == [
        0,
        1,
        2,
        3,
    ], "rank 0's, of both lives"


@pytest.mark.faults
def test_the_third_step_in_a_row_without_a_finite_loss_ends_the_run(
    tmp_path: Path, model: Path, runs: list[Run]
) -> None:
    run = Run(tmp_path, model, 9)
    runs.append(run)
    run.controller.broken = {1, 3, 4, 5}
    assert run.learn().wait(LIMIT_S) == 2, run.log()
    assert [row["skipped"] for row in run.rows()] == [0, 1, 0, 1, 1, 1]
    assert run.rows()[-1]["skipped_steps"] == 4
    bad = list(read_jsonl(run.rundir.bad_rollouts))
    assert bad == [
        {"step": step, "ticket": 0, "sample": 1, "cause": "loss"} for step in (1, 3, 4, 5)
    ]
    assert "steps 3 to 5 were skipped" in run.rundir.failure_file.read_text()
    assert (run.rundir.checkpoints / "step-0000006" / "megarl.json").exists()
    assert run.controller.stopped == []

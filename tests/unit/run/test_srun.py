"""Steps of a Slurm job, as far as no Slurm is needed: the choice, the command, nodes,
reports. tests/slurm has the rest.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import psutil
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe
from megarl.run import nodes, srun
from megarl.run.launcher import LocalLauncher, RoleCommand
from megarl.run.launchers import choose_launcher
from megarl.run.nodes import Node, this_node
from megarl.run.placement import Place
from megarl.run.restart import Role
from megarl.run.srun import OF_THE_JOB, SrunLauncher, SrunStep, checked, command, is_broken


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SLURM_JOB_NUM_NODES",
        "MEGARL_STEP_COMMAND",
        "MEGARL_STEP_OPTIONS",
        "SLURM_LAUNCH_NODE_IPADDR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def choice(recipe: Recipe, launcher: str = "auto") -> type:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_LAUNCHER", launcher)
        return type(choose_launcher(recipe, RunDir(recipe.run.path)))


def test_choice(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choice(recipe) is LocalLauncher
    with pytest.raises(MegarlError, match="MEGARL_LAUNCHER: srun works inside a Slurm job"):
        choice(recipe, "srun")
    with pytest.raises(
        MegarlError, match="MEGARL_LAUNCHER: 'slurm' is not a launcher; set auto, local or srun"
    ):
        choice(recipe, "slurm")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert choice(recipe) is LocalLauncher
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MegarlError, match=r"srun, scontrol, squeue, sinfo cannot be found"):
        choice(recipe, "srun")
    for program in ("srun", "scontrol", "squeue", "sinfo"):
        (tmp_path / program).touch(0o755)
    assert choice(recipe, "srun") is SrunLauncher
    monkeypatch.setenv("MEGARL_STEP_COMMAND", "apptainer exec x.sif python")
    assert choice(recipe) is SrunLauncher
    monkeypatch.delenv("MEGARL_STEP_COMMAND")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "10")
    assert choice(recipe) is SrunLauncher
    assert choice(recipe, "local") is LocalLauncher
    assert not caplog.messages
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert choice(recipe) is SrunLauncher
    assert ["this Slurm job has 2 parts" in text for text in caplog.messages] == [True]


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = command(["n1", "n2"], "learner-0", ["-m", "x"])
    assert words[-3:] == [sys.executable, "-m", "x"]
    assert {"--nodelist=n1,n2", "--nodes=2", "--ntasks=2", "--overlap"} <= set(words)
    monkeypatch.setenv(
        "MEGARL_STEP_OPTIONS", "--container-image=a#b:1 --container-mounts='/s h:/s h'"
    )
    monkeypatch.setenv("MEGARL_STEP_COMMAND", "python3")
    words = command(["n1"], "server-0", ["-m", "x"])
    assert words[-5:] == [
        "--container-image=a#b:1",
        "--container-mounts=/s h:/s h",
        "python3",
        "-m",
        "x",
    ]


def test_srun_is_not_told_the_options_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nenv > {tmp_path}/said\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in OF_THE_JOB:
        monkeypatch.setenv(name, "1")
    place = Place((Node("n1", "vm", "127.0.0.1", "lo", (), 2, 0, ()),), (), 1)
    SrunLauncher(RunDir(tmp_path), "lo").start(
        RoleCommand(Role("learner"), (), {}, place, RunDir(tmp_path))
    ).wait_gone()
    told = {line.partition("=")[0] for line in (tmp_path / "said").read_text().splitlines()}
    assert "SLURM_JOB_ID" in told
    assert not told & set(OF_THE_JOB)


def test_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    node = this_node(3, "")
    assert (node.address, node.interface, node.gpus) == ("127.0.0.1", "lo", ())
    assert len(set(node.ports)) == 3
    assert this_node(0, "lo").address == "127.0.0.1"
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    assert this_node(0, "slurm") == this_node(0, "")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    assert (this_node(0, "slurm").address, this_node(0, "slurm").interface) == ("127.0.0.1", "lo")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "fd00::1")
    with pytest.raises(
        MegarlError,
        match=r"run\.interface: slurm: no IPv4 route to fd00::1.* name an IPv4 interface",
    ):
        this_node(0, "slurm")
    with pytest.raises(
        MegarlError, match=r"run\.interface: 'ib7' is not a network interface .* which has .*lo"
    ):
        this_node(0, "ib7")
    assert nodes.gathered(["welcome to node 1"]) == {}
    assert nodes.main(["2", "", str(tmp_path)]) == 2
    assert (
        f"{tmp_path} is not there; run.dir must be on a file system that all nodes share"
        in capfdbinary.readouterr().err.decode()
    )
    (tmp_path / ".lock").touch()
    assert nodes.main(["2", "lo", str(tmp_path)]) == 0
    told = nodes.gathered(capfdbinary.readouterr().out.decode().splitlines())[node.name]
    assert replace(told, ports=()) == replace(node, ports=())
    assert len(told.ports) == 2


def test_memory_is_what_the_job_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(nodes, "CGROUPS", tmp_path)
    whole = nodes.memory()
    assert whole == psutil.virtual_memory().total
    step = tmp_path / "slurm" / "job_1" / "step_0"
    step.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/slurm/job_1/step_0\n")
    (step / "memory.max").write_text("max\n")
    assert nodes.memory() == whole
    (step.parent / "memory.max").write_text("64000000\n")
    assert nodes.memory() == 64_000_000
    (tmp_path / "cgroup").write_text("3:cpuset:/\n2:cpu,memory:/slurm/job_1\n")
    (tmp_path / "memory" / "slurm" / "job_1").mkdir(parents=True)
    (tmp_path / "memory" / "slurm" / "job_1" / "memory.limit_in_bytes").write_text("32000000\n")
    assert nodes.memory() == 32_000_000


def test_nodes_of_many_gpus_and_ports_say_so_in_short_lines() -> None:
    """srun mixes lines of several nodes if they are longer than 1,024 bytes."""
    gpus = tuple(f"MIG-{n:08}-1234-1234-1234-123456789012" for n in range(56))
    name = "a-node-with-a-name-of-fifty-five-letters-as-clouds-have"
    one = Node(
        name,
        name,
        "10.100.100.100",
        "enp225s0f0np0",
        gpus,
        256,
        4 << 40,
        tuple(range(50_000, 52_000)),
    )
    other = replace(one, name="other", gpus=("0", "1"), ports=())
    lines = [list(nodes.encoded_lines(node)) for node in (one, other)]
    assert max(map(len, lines[0])) < 1024
    mixed = [
        line.decode() for pair in zip_longest(*lines, fillvalue=b"a prologue") for line in pair
    ]
    assert nodes.gathered(mixed) == {one.name: one, other.name: other}


def test_a_node_whose_answer_is_not_whole_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node("n1", "vm", "127.0.0.1", "lo", (), 2, 0, (1, 2, 3))
    said = b"".join(
        [*nodes.encoded_lines(node), *nodes.encoded_lines(replace(node, name="n2", ports=(1, 2)))]
    )
    (tmp_path / "said").write_bytes(said)
    asked: list[str] = []

    def command(_names: object, _step: str, arguments: tuple[str, ...], _more: object) -> list[str]:
        asked.extend(arguments)
        return ["cat", str(tmp_path / "said")]

    monkeypatch.setattr(srun, "command", command)
    monkeypatch.setattr(srun, "hosts", str.split)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1 n2")
    with pytest.raises(MegarlError, match="no complete answer from n2"):
        SrunLauncher(RunDir(Path("runs/a")), "lo").survey(3)
    # From the working directory, as roles look for it: a container may see this path to
    # it and no other.
    assert asked[-1] == "runs/a"


def test_nodes_must_reach_each_other_and_share_no_port() -> None:
    first = Node("n1", "vm", "127.0.0.1", "lo", (), 2, 0, (1, 2, 3))
    second = replace(first, name="n2", ports=(3, 4))
    assert [node.ports for node in checked([first, second])] == [(1, 2, 3), (4,)]
    with pytest.raises(
        MegarlError, match=r"node n1: its address is 127\.0\.0\.1, which no other node can reach"
    ):
        checked([first, replace(second, host="other", address="10.0.0.2")])


def test_a_step_of_many_nodes_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner has 16 of 100 nodes of eight GPUs, with all the ports that each
    offers.
    """
    srun_itself = tmp_path / "srun"
    srun_itself.write_text("#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus = tuple(f"GPU-{n}-1234-1234-1234-123456789012" for n in range(8))
    ports = tuple(range(20_000, 21_352))
    names = [f"gpu-h100-{n:03}" for n in range(16)]
    place = Place(
        tuple(Node(name, name, "10.0.0.1", "ib0", gpus, 96, 2 << 40, ports) for name in names),
        gpus,
        8,
    )
    learner = RoleCommand(Role("learner"), ("-c", ""), {}, place, RunDir(tmp_path / "run"))
    with pytest.raises(MegarlError, match=r"^srun cannot be started: Permission denied$"):
        SrunLauncher(RunDir(tmp_path), "ib0").start(learner)
    srun_itself.chmod(0o755)
    SrunLauncher(RunDir(tmp_path), "ib0").start(learner).wait_gone()


@pytest.mark.parametrize(
    ("state", "broken"),
    [
        ("mixed", False),
        ("allocated", False),
        ("draining", False),
        ("down*", True),
        ("DOWN", True),
        ("failing", True),
    ],
)
def test_states(state: str, broken: bool) -> None:
    assert is_broken(state) is broken


def step(lines: list[str], ending: str = "") -> SrunStep:
    """A stand-in for an srun that says these lines, and then ends so or waits."""
    code = (
        f"import os, sys, time; print({chr(10).join(lines)!r}, flush=True);"
        f" {ending or 'time.sleep(600)'}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if ending:
        process.wait(60)
    return SrunStep(process, ["n1", "n2"])


def test_what_nodes_report() -> None:
    ended = step(
        ['{"node": "n1", "status": 0}', "a prologue", '{"node": "n2", "status": -11}'],
        "sys.exit(139)",
    )
    assert ended.status() == -11
    assert ended.answered
    both = ['{"node": "n1"}', '{"node": "n2"}']
    assert step(both, "sys.exit(137)").status() == -9
    assert step(both, "sys.exit(255)").status() == 255
    assert step(['{"node": "n1", "status": 0}', both[1]], "sys.exit(0)").status() == 1, (
        "n2 was lost"
    )
    assert (
        step(['{"node": "n1", "status": 0}', '{"node": "n2", "status": 0}'], "sys.exit(0)").status()
        == 0
    )


def test_an_srun_that_ends_alone_may_have_left_its_step_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = ['{"node": "n1"}', '{"node": "n2"}']
    deserted = [step(both, "os.kill(os.getpid(), 9)"), step(["slurmd died"], "sys.exit(232)")]
    assert [(s.status(), s.why_stuck()) for s in deserted] == [(None, None)] * 2
    monkeypatch.setattr(srun, "DESERTED_S", 0.0)
    assert [s.status() for s in deserted] == [-9, 232]


def test_a_task_of_an_array_looks_at_its_own_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has the array's own id, and squeue would list all tasks; scontrol
    makes no sense of several lines.
    """
    for name, answers in {
        "squeue": "case $3 in 7_2) echo n1,n2 ;; *) printf 'n9\\nn1,n2\\n' ;; esac",
        "scontrol": 'case "$3" in n1,n2) printf "n1\\nn2\\n" ;; *) exit 1 ;; esac',
        "sinfo": "printf 'mixed\\nmixed\\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answers}\n")
        (tmp_path / name).chmod(0o755)
    ended = step(['{"node": "n1"}', '{"node": "n2"}'], "sys.exit(1)")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert ended.node_state() == "down"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    while not ended.answered:
        time.sleep(0.01)
    assert ended.node_state() == "up"


def test_a_step_that_does_not_move_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = step(['{"node": "n1", "stopped": true}'])
    end = time.monotonic() + 60
    while stopped.why_stuck() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert (stopped.status(), stopped.answered, stopped.why_stuck()) == (None, False, "stopped")
    monkeypatch.setattr(srun, "DESERTED_S", 0.0)
    stopped.kill()
    stopped.wait_gone()
    stopped.terminate()  # nobody listens any more
    assert stopped.status() == -15

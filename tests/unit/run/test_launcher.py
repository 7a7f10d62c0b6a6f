"""Local processes: their log, their environment, and that nothing of them outlives
`kill` or the supervisor.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from megarl.core.base.process import shared_memory_mark
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe
from megarl.predict.planning.hardware import GPUS
from megarl.run import devices
from megarl.run.launcher import LocalLauncher, LocalProcess, RoleCommand, alike, task
from megarl.run.nodes import this_node
from megarl.run.placement import Place
from megarl.run.restart import Role, RoleKind
from tests.processes import alive, wait_until_gone

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(600)"
PARENT = (
    "import subprocess, sys; print('child', subprocess.Popen([sys.executable, '-c',"
    f" {SLEEP!r}]).pid, flush=True)"
)
ROLE = (
    "import os; from megarl.run.process import die_with_supervisor; die_with_supervisor();"
    " print('role', os.getpid())"
)


HERE = Place((this_node(0, ""),))


def start(
    code: str, folder: Path, kind: RoleKind = "server", **environment: str | None
) -> LocalProcess:
    return LocalLauncher().start(
        RoleCommand(Role(kind), ("-c", code), environment, HERE, RunDir(folder))
    )


def log_in(folder: Path) -> Path:
    return RunDir(folder).log("server", HERE.nodes[0].name, 0)


def wait_for_line(log: Path, mark: str) -> str:
    limit = time.monotonic() + 60
    while True:
        for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
            if line.startswith(mark) and line.endswith(
                "\n"
            ):  # what is not buffered arrives word by word
                return line.removeprefix(mark).strip()
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.02)


def test_log_is_appended_to(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for word in ("first", "second"):
        process = start(f"import sys; print('{word}'); print('problem', file=sys.stderr)", tmp_path)
        assert process._process.wait(60) == 0
    lines = [line for line in log.read_text().splitlines() if not line.startswith("---")]
    assert lines == ["first", "problem", "second", "problem"] or sorted(lines) == [
        "first",
        "problem",
        "problem",
        "second",
    ]


def test_status_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = (
        "import os, sys; sys.exit(int(os.environ['N']) + ('PYTHONDONTWRITEBYTECODE' in os.environ))"
    )
    process = start(code, tmp_path, N="5", PYTHONDONTWRITEBYTECODE=None)
    assert process._process.wait(60) == 5
    assert process.status() == 5


def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    family = f"{PARENT}; {SLEEP}"
    process = start(family, tmp_path)
    child = int(wait_for_line(log, "child"))
    process.kill()
    process.wait_gone()
    assert process.status() == -9
    wait_until_gone([child])


def test_kill_ends_what_a_dead_leader_left(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    family = (
        "import subprocess, sys; print('child', subprocess.Popen([sys.executable, '-c',"
        f" {SLEEP!r}]).pid, flush=True)"
    )
    process = start(family, tmp_path)
    child = int(wait_for_line(log, "child"))
    assert process._process.wait(60) == 0
    assert alive(child)
    process.kill()
    wait_until_gone([child])


def test_what_a_killed_role_leaves_in_shared_memory_is_removed(tmp_path: Path) -> None:
    """And nothing of anybody else's."""
    code = (
        "import os; from megarl.core.base.process import shared_memory_mark; mark ="
        " shared_memory_mark(os.getsid(0)); open(f'/dev/shm/sglang_loads_{mark}x.shm', 'w');"
        " open(f'/dev/shm/{mark}mq-1', 'w'); print('mark', mark, flush=True)"
    )
    process = start(f"{code}; {SLEEP}", tmp_path)
    mark = wait_for_line(log_in(tmp_path), "mark")
    other = Path(f"/dev/shm/sglang_loads_{mark.replace('megarl', 'megarl-test')}.shm")
    other.touch()
    try:
        assert len(list(Path("/dev/shm").glob(f"*{mark}*"))) == 2
        process.kill()
        process.wait_gone()
        assert not list(Path("/dev/shm").glob(f"*{mark}*"))
        assert other.exists()
    finally:
        other.unlink()


def test_role_dies_with_its_supervisor(tmp_path: Path) -> None:
    """The supervisor is killed with SIGKILL: no handler of it runs."""
    log = log_in(tmp_path)
    role = f"{ROLE}; {SLEEP}"
    supervisor = f"""
import sys, time
from pathlib import Path
from megarl.core.base.rundir import RunDir
from megarl.run.launcher import LocalLauncher, RoleCommand
from megarl.run.nodes import this_node
from megarl.run.placement import Place
from megarl.run.restart import Role
task = RoleCommand(Role("server"), ("-u", "-c", {role!r}), {{}}, Place((this_node(0, ""),)), RunDir(Path({str(tmp_path)!r})))
LocalLauncher().start(task)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", supervisor])
    pid = int(wait_for_line(log, "role"))
    parent.kill()
    parent.wait()
    wait_until_gone([pid])


def test_role_whose_supervisor_is_dead_already_ends_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"MEGARL_SUPERVISOR_PID": "1"}
    code = f"from megarl.run.process import die_with_supervisor; die_with_supervisor(); {SLEEP}"
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=240).returncode == -9
    )


def test_task_of_a_server(recipe: Recipe, tmp_path: Path) -> None:
    made = task(recipe, RunDir(tmp_path), Role("server", 1), 4001, Place(HERE.nodes, ("2", "3")))
    assert (
        " ".join(made.arguments) == f"-m megarl serve {tmp_path}/recipe.yaml --index 1 --port 4001"
    )
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert made.environment["PYTHONDONTWRITEBYTECODE"] is None
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in made.environment  # SGLang's own
    assert made.log() == tmp_path / "logs" / "server" / f"{HERE.nodes[0].name}.1.log"


@pytest.mark.parametrize(
    ("name", "said", "becomes"),
    [
        ("PYTORCH_ALLOC_CONF", "", "pinned_max_round_threshold_mb:1"),
        (
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "expandable_segments:True,pinned_max_round_threshold_mb:1",
        ),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:64",
            "max_split_size_mb:64,pinned_max_round_threshold_mb:1",
        ),
        (
            "PYTORCH_ALLOC_CONF",
            "pinned_max_round_threshold_mb:8",
            "pinned_max_round_threshold_mb:8",
        ),
    ],
)
def test_pinned_memory_is_not_rounded_up_to_a_power_of_two(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
    becomes: str,
) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, said)
    made = task(recipe, RunDir(tmp_path), Role("server"), 1, Place(HERE.nodes, ("0",)))
    assert made.environment["PYTORCH_ALLOC_CONF"] == becomes
    torch._C._accelerator_setAllocatorSettings(becomes)  # torch knows the key
    assert (
        "PYTORCH_ALLOC_CONF"
        not in task(recipe, RunDir(tmp_path), Role("server"), 1, HERE).environment
    )


@pytest.mark.parametrize(
    ("transport", "said", "becomes"),
    [
        ("process_group", "", "pinned_max_round_threshold_mb:1,expandable_segments:True"),
        (
            "disk",
            "expandable_segments:False",
            "expandable_segments:False,pinned_max_round_threshold_mb:1",
        ),
        ("cuda_ipc", "", "pinned_max_round_threshold_mb:1"),
    ],
)
def test_a_learners_memory_grows_in_one_piece(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    said: str,
    becomes: str,
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", said)
    other = recipe.model_copy(
        update={"weights": recipe.weights.model_copy(update={"transport": transport})}
    )
    made = task(other, RunDir(tmp_path), Role("learner"), 0, Place(HERE.nodes, ("0",)))
    assert made.environment["PYTORCH_ALLOC_CONF"] == becomes
    torch._C._accelerator_setAllocatorSettings(becomes)


@pytest.mark.parametrize(
    ("layout", "capabilities", "ordered"),
    [
        ({"tensor_parallel": 2}, ("9.0",), True),
        ({"context_parallel": 2}, ("8.0",), True),
        ({"tensor_parallel": 2}, (), True),
        ({"tensor_parallel": 2}, ("10.0", "9.0"), True),
        ({"tensor_parallel": 2}, ("10.0",), False),
        ({"tensor_parallel": 1}, ("9.0",), False),
    ],
)
def test_a_learners_kernels_start_in_order_where_megatron_needs_it(
    recipe: Recipe,
    tmp_path: Path,
    layout: dict[str, int],
    capabilities: tuple[str, ...],
    ordered: bool,
) -> None:
    """Tensor or context parallelism, on a GPU before Blackwell or an unknown one."""
    model = recipe.model.model_copy(update=layout)
    node = replace(HERE.nodes[0], gpus=("0", "1"), capabilities=capabilities)
    place = Place((node,), node.gpus, 2)
    run = RunDir(tmp_path)
    made = task(recipe.model_copy(update={"model": model}), run, Role("learner"), 0, place)
    assert made.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("1" if ordered else None)


def test_megatron_states_where_kernels_must_start_in_order() -> None:
    """Its own check of arguments, which megarl does not call: the rule of the test
    above.
    """
    megatron = find_spec("megatron")
    assert megatron is not None
    assert megatron.submodule_search_locations is not None
    folders = map(Path, megatron.submodule_search_locations)
    (file,) = (file for folder in folders if (file := folder / "training/arguments.py").exists())
    source = file.read_text()
    rule = (
        "if (args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1) and"
        " get_device_arch_version() < 10:"
    )
    assert rule in " ".join(source.replace("\\\n", " ").split())
    assert "require setting the environment variable" in source


@pytest.mark.parametrize("name", GPUS)
def test_nvlink_reaches_as_far_as_is_planned(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Beyond a machine where hardware.yaml has a domain of more GPUs than a machine
    has, for all roles; unless the user says otherwise.
    """
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    gpu = GPUS[name]
    node = replace(HERE.nodes[0], gpus=("0",), kinds=(f"NVIDIA {name.upper()}",))
    place = Place((node,), node.gpus)
    kinds: tuple[RoleKind, ...] = ("learner", "server")
    run = RunDir(tmp_path)

    def said() -> set[str | None]:
        return {
            task(recipe, run, Role(k), 1, place).environment["NCCL_CUMEM_ENABLE"] for k in kinds
        }

    assert said() == {"1" if gpu.nvlink_gpus > gpu.node_gpus else "0"}
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert said() == {"0"}


def test_nvlink_ends_at_the_machine_if_not_all_nodes_are_of_a_rack() -> None:
    of_a_rack = replace(HERE.nodes[0], kinds=("NVIDIA GB300",))
    other = replace(HERE.nodes[0], kinds=("NVIDIA H200",))
    unknown = replace(HERE.nodes[0], kinds=())
    assert alike([of_a_rack, of_a_rack])["NCCL_CUMEM_ENABLE"] == "1"
    assert alike([of_a_rack, other])["NCCL_CUMEM_ENABLE"] == "0"
    assert alike([of_a_rack, unknown])["NCCL_CUMEM_ENABLE"] == "0"


def test_threads_sleep_while_they_wait(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says otherwise."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for said in ("passive", "active"):
        made = task(recipe, RunDir(tmp_path), Role("learner"), 0, HERE)
        assert made.environment["OMP_WAIT_POLICY"] == said
        assert made.environment["OMP_THREAD_LIMIT"] is None
        monkeypatch.setenv("OMP_WAIT_POLICY", "active")


def test_symbols_are_bound_when_they_are_used(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a site's LD_BIND_NOW=1, Transformer Engine could not be imported."""
    monkeypatch.setenv("LD_BIND_NOW", "1")
    made = task(recipe, RunDir(tmp_path), Role("learner"), 0, HERE)
    code = "import os, sys; sys.exit('LD_BIND_NOW' in os.environ)"
    process = start(code, tmp_path, "learner", **made.environment)
    assert process._process.wait(60) == 0
    assert start(code, tmp_path, "learner")._process.wait(60) == 1


@pytest.mark.parametrize(("kind", "seen"), [("learner", "stopped"), ("controller", None)])
def test_a_stopped_rank_is_seen_and_a_stopped_program_is_not(
    tmp_path: Path, kind: RoleKind, seen: str | None
) -> None:
    """torchrun's ranks lead sessions of their own, and so do the programs that a grader
    runs.
    """
    child = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}],"
        f" start_new_session=True); {SLEEP}"
    )
    process = start(child, tmp_path, kind)
    try:
        limit = time.monotonic() + 60
        while (
            not (children := psutil.Process(process.pid).children())
            or os.getsid(children[0].pid) != children[0].pid
        ):
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert process.why_stuck() is None
        children[0].suspend()
        while children[0].status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert process.why_stuck() == seen
    finally:
        for child_process in children:
            child_process.kill()
        process.kill()
        process.wait_gone()


def test_stopped_process_is_seen(tmp_path: Path) -> None:
    process = start(SLEEP, tmp_path)
    try:
        assert process.why_stuck() is None
        os.kill(process.pid, signal.SIGSTOP)
        limit = time.monotonic() + 60
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert process.why_stuck() == "stopped"
    finally:
        process.kill()
        process.wait_gone()


def test_compiled_kernels_are_kept_on_the_node_and_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in devices.CACHES:  # torch sets its own as soon as it compiles
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    found = devices.kernel_caches()
    (folder,) = tmp_path.iterdir()
    assert set(found) == set(devices.CACHES) - {"TRITON_CACHE_DIR"}
    assert all(Path(path).parent == folder for path in found.values())
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    folder.chmod(0o777)  # others could leave their code there, as in torch's own folder in /tmp
    found = devices.kernel_caches()
    assert {Path(path).parent.parent for path in found.values()} == {tmp_path / "home" / ".cache"}


def test_no_kernel_is_kept_where_none_may_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardened nodes mount /tmp so: then each has a folder in the home directory, if
    that can be written.
    """
    hardened = os.statvfs_result(
        (*os.statvfs(tmp_path)[:8], os.ST_NOEXEC, *os.statvfs(tmp_path)[9:])
    )
    monkeypatch.setattr(os, "statvfs", lambda _: hardened)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for name in devices.CACHES:
        monkeypatch.delenv(name, raising=False)
    assert set(devices.kernel_caches()) == set(devices.CACHES)
    (folder,) = (tmp_path / "home" / ".cache").iterdir()
    assert folder.name.startswith("megarl-kernels-")
    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    assert devices.kernel_caches() == {}


def test_temporary_files_of_a_role_have_a_folder_that_it_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container does not have the job's folder, and a socket's path has at most 107
    characters.
    """
    monkeypatch.delenv("TMPDIR", raising=False)
    assert devices.temporary_folder() == {}
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, "/nowhere/job-1")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert devices.temporary_folder() == {"TMPDIR": "/tmp"}
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/of/mine")
    assert devices.temporary_folder() == {"TMPDIR": "/scratch/of/mine"}
    monkeypatch.setattr(tempfile, "tempdir", f"/{'s' * devices.LONGEST_TEMPORARY}")
    assert devices.temporary_folder() == {"TMPDIR": "/tmp"}


def test_gpus_have_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reads the names as integers when it sets up the all-reduce of a server of
    several GPUs.
    """
    (tmp_path / "nvidia-smi").write_text("""#!/bin/sh
case "$1" in *uuid) printf 'GPU-aa\nGPU-bb\n' ;; *index) printf '0\n1\n' ;; esac
""")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for visible, names in {
        "GPU-bb,GPU-aa": ("1", "0"),
        "3, 2": ("3", "2"),
        "MIG-aa": ("MIG-aa",),
        "GPU-b": ("GPU-b",),  # CUDA takes the beginning of a UUID, too
        "": (),
        "-1": (),
        "NoDevFiles": (),  # Slurm's, in a job that asked for none
        "1,-1,0": ("1",),
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices.gpus() == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.gpus() == ("0", "1")


def test_a_node_says_of_what_kind_its_gpus_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (HERE.nodes[0].kinds, HERE.nodes[0].capabilities) == ((), ())
    (tmp_path / "nvidia-smi").write_text("""#!/bin/sh
case "$1" in *=name) printf 'NVIDIA GB200\nNVIDIA GB200\n' ;; *=compute_cap) printf '10.0\n10.0\n' ;; esac
""")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    node = this_node(0, "")
    assert (node.kinds, node.capabilities) == (("NVIDIA GB200",), ("10.0",))


def test_what_compiles_kernels_is_found_and_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang calls ninja by name, and a batch script activates no environment. Even on
    a CPU SGLang makes folders as it is imported, by default in the home directory,
    which may be read-only on compute nodes.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    start(
        "import os; print('has', os.environ['PATH'], os.environ['TORCHINDUCTOR_CACHE_DIR'])",
        tmp_path,
    )
    path, folder = wait_for_line(log_in(tmp_path), "has").split()
    assert path == f"/usr/bin:/bin:{Path(sys.executable).parent}"
    assert Path(folder).parent.parent == tmp_path


def test_the_toolkit_of_an_nvcc_that_is_a_link_or_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang links kernels with ../lib64/libcudart.so, as seen from nvcc."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    other = tmp_path / "bin"
    for folder in (nvcc.parent, tmp_path / "cuda" / "lib64", other):
        folder.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    (tmp_path / "cuda" / "lib64" / "libcudart.so").touch()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "TOOLKIT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert devices.toolkit() == {}
    monkeypatch.setenv("PATH", str(other))
    assert devices.toolkit() == {}
    (other / "nvcc").symlink_to(nvcc)
    assert devices.toolkit() == {"CUDA_HOME": str(tmp_path / "cuda")}
    (other / "nvcc").unlink()
    (other / "nvcc").write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    (other / "nvcc").chmod(0o755)
    assert devices.toolkit() == {}
    monkeypatch.setattr(devices, "TOOLKIT", tmp_path / "cuda")
    assert devices.toolkit() == {"CUDA_HOME": str(tmp_path / "cuda")}
    monkeypatch.setenv("CUDA_HOME", "/theirs")
    assert devices.toolkit() == {}


def test_no_kernel_of_sglang_is_compiled_into_the_home_directory() -> None:
    """Its folders are one of its variables or follow another one; unset, each of these
    leads to ~/.cache.
    """
    variables = (Path(find_spec("sglang").origin).parent / "srt" / "environ.py").read_text()  # type: ignore[union-attr, arg-type]
    home = re.findall(
        r"^    (SGLANG_\w*CACHE_DIR) = EnvStr\((?!lambda)", variables, flags=re.MULTILINE
    )
    assert len(home) == 2
    assert set(home) <= set(devices.CACHES)


def test_shared_memory_of_roles_without_a_supervisor_is_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    """Not that of a session which is there, nor that of another PID namespace, such as
    a container's.
    """
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    names = [
        shared_memory_mark(ended.pid),
        shared_memory_mark(os.getsid(0)),
        f"megarl-1-{ended.pid}-",
    ]
    files = [Path(f"/dev/shm/{name}test") for name in names]
    for file in files:
        file.touch()
    try:
        start(SLEEP, tmp_path).kill()
        assert [file.exists() for file in files] == [False, True, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)

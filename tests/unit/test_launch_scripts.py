"""The scripts of launch/: shellcheck is content, and those for Slurm start what they
say, in and out of containers.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.core.recipe import load, shipped
from megarl.predict.planning import command
from megarl.predict.planning.layouts import as_written
from megarl.run.devices import needed
from megarl.run.srun import OF_THE_JOB

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "launch" / "slurm"
BATCH = sorted(SLURM.glob("*.sbatch"))
SHELLCHECK = (
    shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    or "shellcheck"
)


def directives(text: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, flags=re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_a_job_has_its_node_or_says_what_it_takes_of_one(script: Path) -> None:
    """Slurm grants a single core by default, and the memory that goes with it; of a
    node for one job, all cores and as much memory as was asked for.
    """
    asked = directives(script.read_text())
    assert {"cpus-per-task", "mem"} <= asked.keys() or (
        "exclusive" in asked and asked["mem"] == "0"
    )


def test_shellcheck() -> None:
    folders = ("launch", "benchmarks", "tests")
    scripts = [*BATCH, *(script for folder in folders for script in (ROOT / folder).rglob("*.sh"))]
    done = subprocess.run([SHELLCHECK, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(BATCH) == 7


@pytest.mark.parametrize("name", ["scalerl_8b", "scalerl_17bx16"])
def test_nodes_are_as_many_as_the_recipe_needs(name: str) -> None:
    asked = directives((SLURM / f"{name}.sbatch").read_text())
    asked_for = int(asked["nodes"]) * int(asked["gpus-per-node"])
    base = name.replace("_", "-")
    for recipe in [each for each in shipped() if each.startswith(base)]:
        assert needed(load(recipe)) == asked_for == 80, recipe


def run(
    script: str,
    tmp_path: Path,
    *words: str,
    stand_in: str = '#!/bin/sh\nprintf "%s\\n" "$@"\n',
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """With a stand-in for srun, which prints its words."""
    (tmp_path / "srun").write_text(stand_in)
    (tmp_path / "srun").chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "1",
    }
    return subprocess.run(
        ["bash", SLURM / script, *words],
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
    )


def test_without_a_container(tmp_path: Path) -> None:
    done = run("convert.sbatch", tmp_path, FROM="runs/a", TO="out dir", MEGARL="/my v/bin/megarl")
    words = [
        "/my v/bin/python",
        "-m",
        "checkpoints_tools",
        "convert",
        "megatron-to-hf",
        "runs/a",
        "out dir",
    ]
    assert done.stdout.splitlines()[-7:] == words


def test_servers_that_join(tmp_path: Path) -> None:
    done = run("servers.sbatch", tmp_path, RUN="runs/a", MEGARL="/v/bin/megarl")
    words = ["/v/bin/python", "-m", "megarl", "serve", "--join", "runs/a", "--interface", "slurm"]
    assert done.stdout.splitlines()[-8:] == words
    assert "RUN: the directory of a run" in run("servers.sbatch", tmp_path).stderr


def test_no_step_takes_over_an_option_of_the_job(tmp_path: Path) -> None:
    """Two of SLURM_MEM_PER_… end srun, and a hint against hyper-threads would leave the
    step one core.
    """
    removed = re.findall(
        r"^unset (SLURM_.*)$", (SLURM / "common.sh").read_text(), flags=re.MULTILINE
    )
    assert sorted(" ".join(removed).split()) == sorted(OF_THE_JOB)
    variables = {
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_MEM_PER_NODE": "2",
        "SLURM_HINT": "nomultithread",
        "FROM": "a",
        "TO": "b",
    }
    stand_in = "#!/bin/sh\nenv | grep ^SLURM_\n"
    assert run("convert.sbatch", tmp_path, stand_in=stand_in, **variables).stdout.splitlines() == [
        "SLURM_JOB_ID=1",
        f"SLURM_SUBMIT_DIR={ROOT}",
    ]


def test_pyxis(tmp_path: Path) -> None:
    done = run(
        "sft.sbatch", tmp_path, "a=1", CONTAINER="pyxis", IMAGE="reg#t/m:1", MOUNTS="/data,/home"
    )
    words = done.stdout.splitlines()
    assert "--container-image=reg#t/m:1" in words
    assert "--container-mounts=/data:/data,/home:/home,/tmp:/tmp" in words
    assert "--container-name=megarl-1:no_exec" in words
    assert words[-6:] == ["python", "-m", "megarl", "sft", "scalerl-8b", "a=1"]


def test_apptainer(tmp_path: Path) -> None:
    done = run(
        "eval.sbatch",
        tmp_path,
        CONTAINER="apptainer",
        IMAGE="/m.sif",
        MOUNTS="/my dàta's",
        MODEL="m",
        SUITE="math",
    )
    words = done.stdout.splitlines()
    assert words[words.index("apptainer") :] == [
        "apptainer",
        "exec",
        "--bind",
        "/my dàta's:/my dàta's",
        "--pwd",
        str(ROOT),
        "/m.sif",
        "python",
        "-m",
        "megarl",
        "eval",
        "--model",
        "m",
        "--suite",
        "math",
    ]


@pytest.mark.parametrize(
    ("mounts", "full"),
    {
        "/a:/a": "/a:/a",
        " /a , /b:/c:ro+x ,": "/a:/a,/b:/c:ro+x",
        "/a/,data,./d e,~/x": (
            f"/a:/a,{ROOT}/data:{ROOT}/data,{ROOT}/d e:{ROOT}/d e,/home/me/x:/home/me/x"
        ),
        "/a::ro": None,
        "/a:b": None,
        "/a:ro": None,
        "/a:/a:ro:x": None,
        " , ": None,
        "/a\n/b": None,
    }.items(),
)
@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
def test_mounts(tmp_path: Path, container: str, mounts: str, full: str | None) -> None:
    chosen = {
        "CONTAINER": container,
        "IMAGE": "/m.sif",
        "MODEL": "m",
        "SUITE": "math",
        "HOME": "/home/me",
    }
    done = run("eval.sbatch", tmp_path, MOUNTS=mounts, **chosen)
    if full is None:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("megarl: MOUNTS")
    else:
        assert (
            f"--container-mounts={full},/tmp:/tmp" if container == "pyxis" else full
        ) in done.stdout.splitlines()


def test_a_mount_at_the_containers_tmp_takes_the_place_of_the_nodes(tmp_path: Path) -> None:
    done = run(
        "sft.sbatch", tmp_path, "a=1", CONTAINER="pyxis", IMAGE="m", MOUNTS="/scratch:/tmp,/data"
    )
    assert "--container-mounts=/scratch:/tmp,/data:/data" in done.stdout.splitlines()


def test_the_home_directorys_packages_do_not_hide_those_of_apptainers_image(tmp_path: Path) -> None:
    done = run(
        "eval.sbatch",
        tmp_path,
        stand_in="#!/bin/sh\nenv\n",
        CONTAINER="apptainer",
        IMAGE="/m.sif",
        MODEL="m",
        SUITE="math",
    )
    assert "APPTAINERENV_PYTHONNOUSERSITE=1" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("container", "kept"), [("none", True), ("pyxis", False), ("apptainer", False)]
)
def test_compilers_of_the_host_do_not_hide_those_of_an_image(
    tmp_path: Path, container: str, kept: bool
) -> None:
    """Apptainer and pyxis hand the host's variables on, and apptainer's take precedence
    over the image's.
    """
    host = {
        "CC": "/opt/gcc/bin/gcc",
        "CXX": "/opt/gcc/bin/g++",
        "CUDA_HOME": "/opt/cuda-12.4",
        "CUDNN_HOME": "/opt/cudnn",
    }
    chosen = {"CONTAINER": container, "IMAGE": "/m.sif", "MODEL": "m", "SUITE": "math"}
    done = run("eval.sbatch", tmp_path, stand_in="#!/bin/sh\nenv\n", **host, **chosen)
    assert {f"{name}={value}" in done.stdout.splitlines() for name, value in host.items()} == {kept}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CONTAINER": "docker"}, "megarl: CONTAINER=docker: none, pyxis or apptainer"),
        ({"CONTAINER": "pyxis"}, "IMAGE: CONTAINER=pyxis needs IMAGE"),
        ({}, "MODEL: a run, checkpoint or Hugging Face directory"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    done = run("eval.sbatch", tmp_path, **environment)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_missing_megarl_is_said_and_nothing_else(tmp_path: Path) -> None:
    done = run("scalerl_8b.sbatch", tmp_path, MEGARL="/nowhere/megarl")
    assert done.returncode == 127
    (said,) = done.stderr.splitlines()
    assert said.endswith("/nowhere/megarl: No such file or directory")


def quickstart(folder: Path, *words: str) -> list[str]:
    """What the script calls, and the GPUs that each call may use. Only what shows the
    recipe is run.
    """
    (folder / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "quickstart.sh", folder / "launch")
    for name in (
        "runs/quickstart-data/products-agent-sft.jsonl",
        "runs/quickstart-data/init-moe/config.json",
        "runs/quickstart-sft/config.json",
        ".venv/bin/megarl",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / ".venv/bin/megarl").write_text(f"""#!/bin/sh
echo "$*, GPUs: $CUDA_VISIBLE_DEVICES" >> calls
if [ "$1" = recipes ]; then exec {sys.executable} -m megarl "$@"; fi
""")
    (folder / ".venv/bin/megarl").chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0,1"}
    subprocess.run(
        ["bash", folder / "launch/quickstart.sh", *words],
        env=variables,
        capture_output=True,
        timeout=240,
    )
    return (folder / "calls").read_text().splitlines()


def test_quickstart_warms_the_model_up_that_it_trains(tmp_path: Path) -> None:
    words = ("model.path=runs/other", "run.seed=1", "sft.steps=5")
    _, warm, train = quickstart(tmp_path, *words)
    assert warm == "sft quickstart model.path=runs/other sft.steps=5, GPUs: "
    assert (
        train == f"train quickstart run.resume=auto run.name=quickstart {' '.join(words)}, GPUs: "
    )


def test_quickstart_keeps_the_warm_start_that_is_there(tmp_path: Path) -> None:
    assert [call.split()[0] for call in quickstart(tmp_path)] == ["recipes", "train"]


def test_quickstart_has_the_run_say_what_is_wrong_with_its_overrides(tmp_path: Path) -> None:
    assert [call.split()[0] for call in quickstart(tmp_path, "wrong=1")] == ["recipes", "train"]


def test_submit_writes_what_is_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.sbatch"
    words = [
        "submit",
        "scalerl-8b",
        "--nodes",
        "10",
        "--out",
        str(file),
        "--gpu",
        "h100",
        "--model-config",
        "llama-3.1-8b",
    ]
    assert main([*words, "run.seed=3"]) == 0
    text = file.read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert directives(text) == directives((SLURM / "scalerl_8b.sbatch").read_text())
    assert "# node 10: learner ranks 16-23" in text
    assert re.search(r"^# a step takes [\d.]+ s", text, flags=re.MULTILINE)
    assert (
        text.splitlines()[-1]
        == 'until_done "$MEGARL" train scalerl-8b run.resume=auto run.interface=slurm run.seed=3'
    )
    assert subprocess.run([SHELLCHECK, file]).returncode == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--container", "pyxis"],
            "--container pyxis needs --image, such as registry.example.org#team/megarl:1",
        ),
        (
            ["--container", "apptainer"],
            "--container apptainer needs --image, such as /shared/megarl.sif",
        ),
        (["--image", "/m.sif"], "--image /m.sif is of no use without --container"),
    ],
)
def test_a_container_and_its_image_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    """Without, the job would end when it begins, hours later."""
    file = tmp_path / "job.sbatch"
    assert main(["submit", "scalerl-8b", "--nodes", "10", "--out", str(file), *more]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"megarl: {said}")
    assert not file.exists()


def test_submit_takes_the_plan_where_the_recipe_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.sbatch"
    words = [
        "submit",
        "scalerl-8b",
        "--nodes",
        "4",
        "--out",
        str(file),
        "--container",
        "apptainer",
        "--image",
        "/m.sif",
    ]
    assert main(words) == 2
    assert "--gpu NAME has `megarl plan` choose a layout for 4 nodes" in capsys.readouterr().err
    assert not file.exists()
    assert main([*words, "--gpu", "h100", "--model-config", "llama-3.1-8b"]) == 0
    last = file.read_text().splitlines()[-1]
    chosen = load(
        "scalerl-8b", [word for word in last.split() if "=" in word and not word.startswith("run.")]
    )
    assert needed(chosen) <= 32
    assert "export IMAGE=/m.sif" in file.read_text()


def test_submit_keeps_no_layout_that_the_gpus_have_no_memory_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout of the 17Bx16 for H200 does not fit 80 GB a GPU, though 80 GPUs are
    enough by number.
    """
    file = tmp_path / "job.sbatch"
    words = [
        "submit",
        "scalerl-17bx16",
        "--nodes",
        "10",
        "--out",
        str(file),
        "--model-config",
        "llama-4-scout",
    ]
    assert main([*words, "--gpu", "h100"]) == 0
    text = file.read_text()
    assert "# the layout is the plan's; as written it does not fit: learner: does not fit" in text
    changed = [
        word
        for word in text.splitlines()[-1].split()
        if "=" in word and not word.startswith("run.")
    ]
    recipe = load("scalerl-17bx16", changed)
    planned = as_written(command.problem(recipe, 80, "h100", "llama-4-scout", command.work(recipe)))
    assert not isinstance(planned, str), planned
    capsys.readouterr()
    file.unlink()
    assert main([*words[:3], "1", *words[4:], "--gpu", "h100", "--yes"]) == 2
    assert "no layout fits 1 nodes of 8 GPUs" in capsys.readouterr().err
    assert not file.exists()

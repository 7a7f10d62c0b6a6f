"""What the doctor finds and concludes."""

from pathlib import Path

import pytest

from megarl.checks import doctor
from megarl.checks.doctor import Finding
from megarl.core.base.device import cudnn_of_torch
from megarl.core.recipe import Recipe
from megarl.run import devices
from megarl.tasks.data import template_environment

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_this_machine_can_run_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    shown = capsys.readouterr().out
    for name in (
        "Python",
        "torch",
        "megatron-core",
        "sglang",
        "CUDA",
        "Transformer Engine",
        "bf16 on the CPU",
        "/dev/shm",
        "ports",
        "bubblewrap",
    ):
        assert name in shown
    assert "Runs on the CPU are possible" in shown


@pytest.mark.parametrize(
    ("info", "found", "grade"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16\n", "AMX", "good"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", "AVX512-BF16", "good"),
        ("model name: amx_bf16\nflags\t\t: fpu avx512f\n", "emulated", "note"),
        (None, "emulated", "note"),
    ],
)
def test_what_bf16_runs_on(
    info: str | None, found: str, grade: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    (finding,) = (f for f in doctor.machine() if f.name == "bf16 on the CPU")
    assert (finding.text, finding.grade) == (found, grade)


def test_a_template_that_loops_is_named(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(recipe.model.path)
    monkeypatch.setattr(template_environment, "MOST_STEPS", 1000)
    ends = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    loops = "{% for a in range(99) %}{% for b in range(99) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(ends)
    assert doctor.chat_template(model).text.startswith("agents can use it")
    (model / "chat_template.jinja").write_text(loops + ends)
    assert doctor.chat_template(model).text == "agents cannot use it"
    assert "steps" in doctor.chat_template(model).advice


def test_every_shortcoming_has_advice() -> None:
    assert all(f.advice for f in doctor.examine() if f.grade != "good")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PINS, "no-such-package", "1.0")
    found = doctor.package("no-such-package")
    assert (found.grade, found.text) == ("bad", "not installed")
    assert "make setup" in found.advice


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PINS, "sglang", "0.0.1")
    found = doctor.package("sglang")
    assert found.grade == "note"
    assert "0.0.1" in found.advice


def engine(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> Finding:
    """What is found where a Transformer Engine runs this code when it is imported."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text(code)
    (folder / "transformer_engine" / "pytorch.py").touch()
    (folder / "transformer_engine-2.20.2.dist-info").mkdir()
    (folder / "transformer_engine-2.20.2.dist-info" / "METADATA").write_text(
        "Name: transformer-engine\nVersion: 2.20.2\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return doctor.transformer_engine()


def test_a_whole_transformer_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = engine(tmp_path, "", monkeypatch)
    assert (found.grade, found.text) == ("good", "2.20.2")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError('libcudnn.so.9: not found')", "OSError: libcudnn.so.9: not found"),
        ("import os; os.kill(os.getpid(), 11)", "Python ended with -11"),
    ],
)
def test_a_broken_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, said: str
) -> None:
    found = engine(tmp_path, code, monkeypatch)
    assert (found.grade, found.text) == ("note", "cannot be imported")
    assert found.advice.startswith(said)


def test_a_transformer_engine_gets_the_cudnn_that_a_learner_gives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn-9.12-for-cuda-12")
    found = engine(tmp_path, "import os; raise OSError(os.environ['CUDNN_HOME'])", monkeypatch)
    assert found.advice.startswith(f"OSError: {cudnn_of_torch()['CUDNN_HOME']};")


def test_a_transformer_engine_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "IMPORT_S", 0.1)
    found = engine(tmp_path, "import time; time.sleep(9)", monkeypatch)
    assert (found.grade, found.text) == ("note", "not imported within 0.1 s")


def test_what_compiles_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang needs nvcc and ninja as it starts; ninja may be in the environment of a
    Python that is called by its path.
    """

    def program(file: Path, said: str = "") -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {said}\n")
        file.chmod(0o755)

    program(tmp_path / "bin" / "c++")
    program(tmp_path / "env" / "ninja")
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: tmp_path)
    found = doctor.compilers()
    assert (found.grade, found.text) == ("note", "no nvcc")
    assert "CUDA_HOME" in found.advice
    program(tmp_path / "cuda" / "bin" / "nvcc", "'Cuda compilation tools, release 12.4, V12.4.131'")
    assert doctor.compilers().text == "no lib64/libcudart.so above nvcc"
    (tmp_path / "cuda" / "lib64").mkdir()
    (tmp_path / "cuda" / "lib64" / "libcudart.so").touch()
    assert "set CUDA_HOME to a toolkit 13.0" in doctor.compilers().advice
    program(tmp_path / "cuda" / "bin" / "nvcc", "'Cuda compilation tools, release 13.0, V13.0.88'")
    found = doctor.compilers()
    assert (found.grade, found.text) == ("good", "nvcc 13.0")
    (tmp_path / "env" / "ninja").unlink()
    (tmp_path / "Python.h").unlink()
    assert doctor.compilers().text == "no ninja, Python.h"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.compilers().grade == "good"


GOOD = [
    Finding(name, "good", "")
    for name in ("Python", "CUDA", "Transformer Engine", doctor.KERNELS, doctor.COMPILERS)
]


@pytest.mark.parametrize(
    ("findings", "gpus", "status", "said"),
    [
        (GOOD, 8, 0, "GPU runs are possible on 8 GPUs"),
        (
            [*GOOD[:2], Finding("Transformer Engine", "note", ""), *GOOD[3:]],
            8,
            0,
            "possible on 8 GPUs, without Transformer Engine",
        ),
        (
            [*GOOD[:3], Finding(doctor.KERNELS, "note", ""), GOOD[4]],
            8,
            0,
            "GPU runs are not yet: SGLang's kernels.",
        ),
        (
            [GOOD[0], Finding("CUDA", "note", "no GPU"), GOOD[2]],
            0,
            0,
            "Runs on the CPU are possible",
        ),
        ([Finding("Python", "bad", "3.9"), *GOOD[1:]], 0, 1, "Nothing can be run here yet: Python"),
    ],
)
def test_verdict(findings: list[Finding], gpus: int, status: int, said: str) -> None:
    text, found = doctor.verdict(findings, gpus)
    assert found == status
    assert said in text


def test_a_slow_network_beside_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(speeds: dict[str, int]) -> Finding:
        monkeypatch.setattr(doctor, "networks", lambda: speeds)
        return next(finding for finding in doctor.fabric() if finding.name == "network")

    assert found({"eth0": 1000, "ib0": 200_000}).advice.endswith("set run.interface=ib0")
    assert found({"eth0": 25_000, "ib0": 200_000}).grade == "good"
    assert found({"eth0": 1000}).grade == "good"  # there is no other


def test_infiniband_that_a_container_does_not_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found() -> list[Finding]:
        return [finding for finding in doctor.fabric() if finding.name == "InfiniBand"]

    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path / "class")
    monkeypatch.setattr(doctor, "DEVICES", tmp_path / "dev")
    assert found() == []
    (tmp_path / "class" / "mlx5_0").mkdir(parents=True)
    assert "--device=/dev/infiniband" in found()[0].advice
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    monkeypatch.setattr(doctor, "loads", lambda library: library != "libibverbs.so.1")
    assert "install libibverbs1 and ibverbs-providers" in found()[0].advice
    monkeypatch.setattr(doctor, "loads", lambda _: True)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (65536, 65536))
    assert "memlock" in found()[0].advice
    monkeypatch.setattr(
        doctor.resource, "getrlimit", lambda _: (doctor.resource.RLIM_INFINITY,) * 2
    )
    assert (found()[0].grade, found()[0].text) == ("good", "mlx5_0")


def test_a_library_loads_or_not() -> None:
    assert doctor.loads("libc.so.6")
    assert not doctor.loads("libnowhere.so.1")


@pytest.mark.parametrize(
    ("version", "old"), [("570.195.03", True), ("580.65.06", False), ("", False)]
)
def test_a_driver_before_cuda_13(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, old: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{version}\\n{version}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # which torch cannot use
    finding = doctor.cuda()
    assert finding.text == "2 GPUs that torch cannot use"
    assert finding.advice.startswith(
        f"the driver is {version}; update it to 580" if old else "replace torch's build"
    )


@pytest.mark.parametrize(
    ("status", "found"), [("GPU 0: …\n\t Link 0: 26.562 GB/s", "between the GPUs"), ("", "none")]
)
def test_gpus_without_nvlink(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, found: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{status}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (finding,) = [finding for finding in doctor.fabric() if finding.name == "NVLink"]
    assert finding.text == found
    assert bool(finding.advice) == (found == "none")

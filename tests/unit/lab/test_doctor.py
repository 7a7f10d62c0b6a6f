"""What the doctor finds and concludes."""

import pytest

from megarl.lab import doctor
from megarl.lab.doctor import Finding


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


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
        "NVIDIA Apex",
        "/dev/shm",
        "ports",
        "bubblewrap",
    ):
        assert name in shown
    assert "Runs on the CPU are possible" in shown


def test_every_shortcoming_has_advice() -> None:
    assert all(f.advice for f in doctor.examine() if f.grade != "good")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PINS, "no-such-package", "1.0")
    found = doctor.package("no-such-package")
    assert (found.grade, found.found) == ("bad", "not installed")
    assert "make setup" in found.advice


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PINS, "sglang", "0.0.1")
    found = doctor.package("sglang")
    assert found.grade == "note"
    assert "0.0.1" in found.advice


GOOD = [Finding(name, "good", "") for name in ("Python", "CUDA", "Transformer Engine")]


@pytest.mark.parametrize(
    ("findings", "gpus", "status", "said"),
    [
        (GOOD, 8, 0, "GPU runs are possible on 8 GPUs"),
        (
            [*GOOD[:2], Finding("Transformer Engine", "note", "")],
            8,
            0,
            "possible on 8 GPUs, without Transformer Engine",
        ),
        ([GOOD[0], Finding("CUDA", "note", "no GPU"), GOOD[2]], 0, 0, "Runs on the CPU are possible"),
        ([Finding("Python", "bad", "3.9"), *GOOD[1:]], 0, 1, "Nothing can be run here yet: Python"),
    ],
)
def test_verdict(findings: list[Finding], gpus: int, status: int, said: str) -> None:
    text, found = doctor.verdict(findings, gpus)
    assert found == status
    assert said in text

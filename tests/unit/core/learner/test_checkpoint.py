"""A learner's checkpoints when they are damaged, or when storage fails."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from rich.console import Console

from megarl.checks.start import check_disk
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, append_jsonl
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint
from megarl.core.recipe import from_tree
from megarl.run.process import StopRequest
from megarl.tools import sft
from tests.damage import cut_in_half, flip_a_bit
from tests.full_disk import files_no_larger_than
from tests.tiny import tiny_llama
from tests.unit.tools.test_sft_batches import TRACES


@pytest.fixture
def checkpoints(tmp_path: Path, one_rank: None) -> Checkpoints:
    """Those of steps 1 and 2."""
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    recipe = from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "fp32"}})
    made = Checkpoints(tmp_path / "run", 3, Trainer(recipe, tmp_path / "hf"), tmp_path / "hf")
    for step in (1, 2):
        save(made, step)
    return made


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.trainer.step = step
    checkpoints.save()
    checkpoints.finish()


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def damage(checkpoints: Checkpoints, step: int, how: Callable[[Path], None] = flip_a_bit) -> None:
    (file,) = (checkpoints.folder / f"step-{step:07}").glob("*.distcp")
    how(file)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_its_size_is_what_a_start_requires_of_the_disk(
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hf = tmp_path / "hf"
    run = RunDir(tmp_path / "run")
    tiny_llama(hf, num_hidden_layers=1, hidden_size=256, intermediate_size=1024)
    recipe = from_tree({"model": {"path": str(hf), "dtype": dtype}, "checkpoint": {"keep": 1}})
    made = Checkpoints(run.checkpoints, 1, Trainer(recipe, hf), hf)
    save(made, 1)
    size = sum(file.stat().st_size for file in (run.checkpoints / "step-0000001").iterdir())
    assert not caplog.messages
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.02 * size))
    check_disk(recipe, run, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0.95 * size))
    with pytest.raises(MegarlError, match="of which up to 2 are there"):
        check_disk(recipe, run, tmp_path)
    save(made, 2)
    assert [text for text in caplog.messages if "will not fit on the disk" in text]


def test_how_long_a_checkpoint_took_until_it_was_whole(checkpoints: Checkpoints) -> None:
    """Not until the next step looked, which may take minutes."""
    checkpoints.trainer.step = 3
    start = time.monotonic()
    checkpoints.save()
    writing = checkpoints._writing
    assert writing is not None
    writing.thread.join()
    assert start <= writing.start < writing.thread.end <= time.monotonic()
    writing.thread.end = writing.start + 100.0
    checkpoints.finish()
    assert checkpoints.write_seconds is not None
    assert 100.0 <= checkpoints.write_seconds < 200.0


def test_a_step_that_is_damaged_again_takes_the_place_of_the_one_put_aside(
    checkpoints: Checkpoints,
) -> None:
    for _ in range(2):
        damage(checkpoints, 2)
        assert checkpoints.load_latest()
        assert checkpoints.trainer.step == 1
        assert names(checkpoints) == ["step-0000001", "step-0000002.unreadable"]
        save(checkpoints, 2)


@pytest.mark.parametrize("how", [flip_a_bit, cut_in_half, Path.unlink])
def test_what_is_damaged_is_put_aside(
    checkpoints: Checkpoints, how: Callable[[Path], None]
) -> None:
    damage(checkpoints, 2, how)
    assert checkpoints.load_latest()
    assert (checkpoints.trainer.step, names(checkpoints)) == (
        1,
        ["step-0000001", "step-0000002.unreadable"],
    )


def test_without_an_intact_checkpoint_none_is_put_aside(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        damage(checkpoints, step)
    with pytest.raises(MegarlError, match="none of the 2 checkpoints is intact; move them away"):
        checkpoints.load_latest()
    assert names(checkpoints) == ["step-0000001", "step-0000002"]


def stale(*_: Any) -> int:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def full(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("module", "name", "fault", "said"),
    [
        (checkpoint, "checksum", stale, os.strerror(errno.ESTALE)),
        (
            checkpoint,
            "_MetadataUnpickler",
            stale,
            rf"\.metadata: cannot be read: .*{os.strerror(errno.ESTALE)}",
        ),
        (
            dist_checkpointing,
            "load",
            stale,
            f"step-0000002: its files are intact, but .*{os.strerror(errno.ESTALE)}",
        ),
        (
            dist_checkpointing,
            "load",
            full,
            "step-0000002: its files are intact, but .*OutOfMemoryError",
        ),
    ],
)
def test_what_proves_no_damage_is_tried_again_and_then_ends_the_learner(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    fault: Callable[..., Any],
    said: str,
) -> None:
    slept: list[float] = []
    with monkeypatch.context() as failing:
        failing.setattr(time, "sleep", slept.append)
        failing.setattr(module, name, fault)
        with pytest.raises(MegarlError, match=said):
            checkpoints.load_latest()
    assert slept == [2.0, 20.0]
    checkpoints.trainer.step = 0
    with monkeypatch.context() as failing:
        failing.setattr(module, name, fault)
        failing.setattr(time, "sleep", lambda _: failing.undo())
        assert checkpoints.load_latest()
    assert (checkpoints.trainer.step, names(checkpoints)) == (2, ["step-0000001", "step-0000002"])


def test_a_checkpoint_of_another_schema_is_left(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA_VERSION", checkpoint.SCHEMA_VERSION + 1)
    monkeypatch.setattr("megarl.core.learner.checkpoint.AGAIN_S", ())
    with pytest.raises(
        MegarlError,
        match=r"step-0000002/megarl.json: written in schema version 4, this version of megarl reads 5; use",
    ):
        checkpoints.load_latest()
    assert names(checkpoints) == ["step-0000001", "step-0000002"]


def test_a_checkpoint_that_cannot_be_removed_is_removed_after_a_later_one(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First somebody has protected it, then NFS keeps a file that is open elsewhere."""
    checkpoints.keep = 1
    oldest = checkpoints.folder / "step-0000001"
    remove_file = Path.unlink
    remove_folder = os.rmdir

    def protected(path: Path, missing_ok: bool = False) -> None:
        if path.parent == oldest:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        remove_file(path, missing_ok)

    def in_use(path: Any, **more: Any) -> None:
        if Path(path).name == oldest.name:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        remove_folder(path, **more)

    for step, module, name, fault, whole in (
        (3, Path, "unlink", protected, True),
        (4, os, "rmdir", in_use, False),
    ):
        with monkeypatch.context() as failing:
            failing.setattr(module, name, fault)
            save(checkpoints, step)
        assert names(checkpoints) == ["step-0000001", f"step-{step:07}"]
        assert (oldest in checkpoint.complete(checkpoints.folder)) == whole
        assert f"{oldest}: cannot be removed, trying again later: " in caplog.text
        caplog.clear()
    save(checkpoints, 5)
    assert names(checkpoints) == ["step-0000005"]


def test_milestones_stay_beside_the_newest_also_after_a_restart(checkpoints: Checkpoints) -> None:
    """A step, and compute, which the checkpoint of step 4 is the first to
    have passed.
    """
    run = RunDir(checkpoints.folder.parent)
    checkpoints.keep = 1
    checkpoints.milestones = (2, "6.5 core-hours")
    for step in (3, 4, 5, 6):
        append_jsonl(
            run.metrics, {"step": step - 1, "compute_hours": 2.0 * step, "compute_unit": "core"}
        )
        save(checkpoints, step)
    assert names(checkpoints) == ["step-0000002", "step-0000004", "step-0000006"]
    again = Checkpoints(
        checkpoints.folder, 1, checkpoints.trainer, checkpoints.hf_source, checkpoints.milestones
    )
    assert again.load_latest()
    assert (again.trainer.step, names(again)) == (
        6,
        ["step-0000002", "step-0000004", "step-0000006"],
    )
    again.milestones = ()
    assert again.load_latest()
    assert names(again) == ["step-0000006"], "without them they are old"


def test_the_best_score_stays_beside_the_newest_also_after_a_restart(
    checkpoints: Checkpoints,
) -> None:
    """Step 2 is the best until step 5; step 6 is still evaluated when step 7 is
    written.
    """
    run = RunDir(checkpoints.folder.parent)
    checkpoints.keep = 1
    checkpoints.keep_best = True
    asked = {"n_prompts": 9, "samples": 1, "compute_hours": 1.0, "compute_unit": "core"}
    for step, score, best in ((2, 0.8, 2), (3, 0.7, 2), (4, 0.1, 2), (5, 0.9, 5)):
        append_jsonl(run.eval, asked | {"step": step, "pass_rate": score})
        save(checkpoints, step)
        if step > 2:
            assert names(checkpoints)[0] == f"step-{best:07}"
    (run.evaluations / "step-0000006").mkdir(parents=True)
    save(checkpoints, 6)
    save(checkpoints, 7)
    assert names(checkpoints) == ["step-0000005", "step-0000006", "step-0000007"]
    again = Checkpoints(
        checkpoints.folder, 1, checkpoints.trainer, checkpoints.hf_source, keep_best=True
    )
    assert again.load_latest()
    assert (again.trainer.step, names(again)) == (7, names(checkpoints))
    again.keep_best = False
    assert again.load_latest()
    assert names(again) == ["step-0000007"], "without it they are old"


def test_a_checkpoint_that_is_being_written_has_begun(checkpoints: Checkpoints) -> None:
    checkpoints.trainer.step = 3
    assert not checkpoints.has_begun()
    checkpoints.save()
    assert checkpoints.has_begun()
    checkpoints.trainer.step = 4
    assert not checkpoints.has_begun()
    checkpoints.finish()


def test_what_killed_writers_left_is_removed_before_anything_is_saved(
    checkpoints: Checkpoints,
) -> None:
    left = checkpoints.folder / ".step-0000003.partial"
    left.mkdir()
    (checkpoints.folder / "step-0000002" / checkpoint.META).unlink()
    assert checkpoints.load_latest()
    assert (checkpoints.trainer.step, names(checkpoints)) == (1, ["step-0000001"])
    save(checkpoints, 2)
    assert names(checkpoints) == ["step-0000001", "step-0000002"]

    shutil.rmtree(checkpoints.folder)
    assert not checkpoints.load_latest()
    left.mkdir(parents=True)  # by one that was killed in its first checkpoint
    assert not checkpoints.load_latest()
    assert names(checkpoints) == []


def test_a_write_that_fails_is_repeated_with_the_next_step_and_ends_the_learner_at_the_third(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """A moment's failure of the file system would otherwise cost all steps since the
    last checkpoint.
    """

    def fails(step: int) -> None:
        checkpoints.trainer.step = step
        with files_no_larger_than(2000):
            checkpoints.save()
            checkpoints.poll(blocking=True)

    fails(3)
    fails(4)
    assert (checkpoints.failures, names(checkpoints)) == (2, ["step-0000001", "step-0000002"])
    assert "step-0000003: the checkpoint could not be written (is the disk full?)" in caplog.text
    save(checkpoints, 5)
    assert (checkpoints.failures, names(checkpoints)) == (
        0,
        ["step-0000001", "step-0000002", "step-0000005"],
    )
    fails(6)
    with pytest.raises(MegarlError, match="checkpoint could not be written"):
        checkpoints.finish()
    fails(7)
    with pytest.raises(MegarlError, match="step-0000008: the checkpoint could not be written"):
        fails(8)
    assert names(checkpoints) == ["step-0000001", "step-0000002", "step-0000005"]


@pytest.mark.parametrize("what", ["read_config", "checksum", "copy_description", "seal"])
def test_so_is_one_that_fails_as_it_begins_or_ends(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoints.trainer.step = 3
    with monkeypatch.context() as failing:
        failing.setattr(checkpoint, what, fails)
        checkpoints.save()
        checkpoints.poll(blocking=True)
    assert (checkpoints.failures, names(checkpoints)) == (1, ["step-0000001", "step-0000002"])
    save(checkpoints, 4)
    assert (checkpoints.failures, names(checkpoints)) == (
        0,
        ["step-0000001", "step-0000002", "step-0000004"],
    )


def test_a_warm_start_whose_checkpoints_cannot_be_written_still_ends(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained model is written elsewhere."""
    recipe = from_tree({"sft": {"steps": 3}, "checkpoint": {"every": 1}})
    trainer = checkpoints.trainer
    batches = sft.batches(TRACES, 20, 1)
    trainer.train_step(
        next(batches)
    )  # imports all modules, whose bytecode is written to files, too
    checkpoints.folder = tmp_path / "unfinished"
    trainer.step = 0
    silent = Console(quiet=True)  # output of another would be written to a file
    monkeypatch.setattr(sft.terminal, "console", lambda quiet=False: silent)
    with files_no_larger_than(2000):
        assert sft.train(trainer, batches, checkpoints, recipe, StopRequest()) == 0
    assert (checkpoints.failures, names(checkpoints)) == (2, [])

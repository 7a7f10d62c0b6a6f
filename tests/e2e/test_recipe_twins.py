"""Every shipped recipe trains: its tiny twin by `megarl train`, in the recipe's own
precision, from start to checkpoint.

Three of them are in the gate (a dense policy and experts in bf16, and fp16), with the
smallest evaluation and one checkpoint; the others are in `make test-recipes`.
"""

import contextlib
import math
from pathlib import Path

import pytest

from checkpoints_tools.__main__ import main as checkpoints_tools
from megarl.core import recipe as recipes
from megarl.core.base.rundir import latest_rows
from tests.e2e import runs
from tests.e2e.runs import LiveRun, batches, check_nothing_left, publications, summary, warnings
from tests.recipe_twins import twin
from tests.twin_models import write_workplace

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

HARMLESS = (
    "no answer to",
    "connections without the learner's key",
    "programs are graded by Python 3.12",
)
"""Warnings of a run beside which others run: a role of one of them may knock at a port
that was its own controller's before; and the one about Python 3.12.0 and 3.12.1.
"""

GATE = ("scalerl-17bx16",)
OTHERS = sorted(recipes.shipped().keys() - set(GATE))
QUICK = ("evaluation.prompts=2", "evaluation.samples=1", "checkpoint.every=4")
FP16 = ("model.dtype=fp16", "run.name=scalerl-1gpu-fp16")


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and prompts of the twins that are tested. Each run has a directory of its
    own in it.
    """
    return tmp_path_factory.mktemp("twins")


@pytest.mark.parametrize("name", GATE)
def test_a_twin_trains(twins: Path, name: str) -> None:
    check_run(twins, name, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_twin_trains(twins: Path, name: str) -> None:
    check_run(twins, name)


@pytest.mark.slow
def test_a_twin_trains_in_fp16(twins: Path) -> None:
    check_run(twins, "scalerl-1gpu", *FP16, *QUICK)


@pytest.mark.slow
def test_a_twin_trains_with_biases_on_queries_keys_and_values(twins: Path) -> None:
    """No recipe shipped has a Qwen2, which R1-Distill-Qwen is."""
    check_run(twins, "scalerl-8b", "model.path=models/qwen2", "run.name=scalerl-8b-qwen2")


def check_run(workplace: Path, name: str, *overrides: str) -> None:
    """The twin of this recipe trains, and leaves what it promises."""
    small = recipes.load(name, [*twin(name), *overrides])
    write_workplace(workplace, [Path(small.model.path).name])
    if small.teacher.weight:
        pytest.skip("its teacher is beside the run: test_distillation.py")
    run = runs.start(workplace, *twin(name), *overrides, recipe=name)
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    assert summary(run.rundir)["outcome"] == "finished"
    told = [
        text for text in warnings(run.rundir) if not any(harmless in text for harmless in HARMLESS)
    ]
    assert not told
    check_steps(run)
    check_publications(run)
    check_evaluations(run)
    check_checkpoint(run)


def check_steps(run: LiveRun) -> None:
    """Each step has a row of finite numbers; there was a gradient, and no token was
    older than the recipe allows.
    """
    rows = latest_rows(run.rundir.metrics)
    recipe = run.recipe
    assert [row["step"] for row in rows] == list(range(recipe.run.steps))
    warmup = (
        recipe.critic.warmup_steps if recipe.has_critic else 0
    )  # the policy is not trained in these
    trained = [row for row in rows[warmup:] if not row["empty"]]
    assert trained, "zero variance has emptied every step"
    assert all(
        math.isfinite(row[key])
        for row in trained
        for key in ("loss", "grad_norm", "ratio_mean", "entropy")
    )
    assert not recipe.has_critic or all(math.isfinite(row["value_loss"]) for row in rows)
    assert any(row["grad_norm"] > 0 for row in trained)
    assert max(row["lag_max"] for row in rows) <= recipe.pipeline.lag_limit
    compared = [row for row in rows if "parity_rollouts" in row]
    assert compared or recipe.pipeline.phase_steps > 1
    assert not any(row["warning_parity"] for row in compared)
    turns = any(task.environment or task.agent for task in recipe.data.tasks.values())
    interrupts = recipe.length.control == "interruption" and not turns
    assert not interrupts or any(row["interruption_rate"] > 0 for row in rows)
    groups = [group for step in batches(run.rundir, recipe) for group in step]
    assert {group.prompt.task for group in groups} == recipe.data.tasks.keys()
    assert not any(group.void for group in groups)


def check_publications(run: LiveRun) -> None:
    """Every server got the last version, and each that it was up for; no publication
    failed.
    """
    recipe = run.recipe
    published: dict[int, set[str]] = {}
    for record in publications(run.rundir):
        published.setdefault(record.version, set()).update(record.servers)
    assert published.keys() >= {0, recipe.run.steps}
    counts = [len(published[version]) for version in sorted(published)]
    held = recipe.evaluation_servers  # an evaluation keeps its version on them
    assert min(counts[1:]) >= recipe.resources.servers - held, (
        published
    )  # one may come up after the first version
    assert counts[-1] == recipe.resources.servers, published


def check_evaluations(run: LiveRun) -> None:
    """The policy is evaluated before the first step and after the last."""
    recipe = run.recipe
    scores = latest_rows(run.rundir.eval)
    assert [score["step"] for score in scores] == [0, recipe.run.steps]
    assert scores[-1]["n_prompts"] == recipe.evaluation.prompts * len(recipe.data.tasks)


def check_checkpoint(run: LiveRun) -> None:
    """The last checkpoint can be read, and its policy is a Hugging Face directory
    again.
    """
    exported = run.rundir.path / "policy"
    with contextlib.chdir(run.cwd):  # the model is named from there
        assert (
            checkpoints_tools(["convert", "megatron-to-hf", str(run.rundir.path), str(exported)])
            == 0
        )
    assert (exported / "config.json").exists()

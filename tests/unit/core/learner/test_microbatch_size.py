"""learner.microbatch_tokens=auto: the search, and what trials leave behind, which is
nothing.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.packing import sizes_to_try
from megarl.core.base.errors import MegarlError
from megarl.core.learner import microbatch_size
from megarl.core.learner.microbatch_size import largest
from megarl.core.learner.trainer import Trainer
from tests.sequences import logprobs
from tests.tiny import tiny_llama, tiny_qwen3_moe

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=40, unique=True).map(sorted)
LINES = st.lists(st.tuples(st.floats(0, 0.9), st.floats(1e-6, 1e-2)), min_size=1, max_size=4)


@given(sizes=SIZES, lines=LINES, capacity=st.floats(1.0, 1.3))
def test_the_largest_that_fits_is_found(
    sizes: list[int], lines: list[tuple[float, float]], capacity: float
) -> None:
    """A peak is the highest of straight lines; beyond the capacity a trial says no more
    than that it ran out.
    """
    seen: list[int] = []

    def used(tokens: int) -> float:
        seen.append(tokens)
        peak = max(a + b * tokens for a, b in lines)
        return peak if peak <= capacity else math.inf

    found = largest(sizes, used)
    tried = seen
    seen = []
    fitting = [n for n in sizes if used(n) <= 1]
    rounded = {
        n for n in sizes if used(n) != math.inf and abs(used(n) - 1) < 1e-9
    }  # a line's end is not quite 1
    assert found == max(fitting, default=None) or rounded
    assert len(tried) == len(set(tried))


@given(sizes=SIZES, peaks=st.lists(st.floats(0, 2), min_size=40, max_size=40).map(sorted))
def test_whatever_is_found_was_tried_and_fits(sizes: list[int], peaks: list[float]) -> None:
    table = dict(zip(sizes, peaks, strict=False))
    tried: dict[int, float] = {}

    def used(tokens: int) -> float:
        tried[tokens] = table[tokens]
        return table[tokens]

    found = largest(sizes, used)
    assert (found is None) == (table[sizes[0]] > 1)
    assert found is None or tried[found] <= 1
    beyond = [n for n, peak in tried.items() if peak > 1 and n < (found or 0)]
    assert not beyond


def test_a_straight_line_takes_few_trials_and_none_that_does_not_fit() -> None:
    """80 GB: 25 at rest, 1.2 MB a token."""
    sizes = sizes_to_try(16_384, 300_000)
    tried = []

    def used(tokens: int) -> float:
        tried.append(tokens)
        return (25e9 + 1.2e6 * tokens) / 72e9

    assert largest(sizes, used) == 32_768  # 39,000 tokens would be all; the next size has 40,960
    assert tried == [4096, 8192, 16_384, 32_768]


def test_sizes() -> None:
    assert sizes_to_try(1000, 3000) == [250, 500, 1000, 1250, 1500, 1750, 2000, 2500, 3000]
    assert sizes_to_try(1000, 10) == [250, 500, 1000]  # a batch of less is no larger micro-batch
    assert sizes_to_try(1000, 10**9)[-1] == 16_000
    assert sizes_to_try(1, 4) == [1, 2, 3, 4]


class FakeMemory:
    """Instead of a GPU's: so much at rest and so much a token of a micro-batch, of 1;
    more than `capacity` runs out.
    """

    def __init__(self, trainer: Trainer, rest: float, token: float, capacity: float = 1.2) -> None:
        self.trainer = trainer
        self.rest = rest
        self.token = token
        self.capacity = capacity
        self.tried: list[int] = []

    def __call__(self, trial: Callable[[], None]) -> float:
        self.tried.append(self.trainer.policy.microbatch_tokens)
        trial()
        used = self.rest + self.token * self.tried[-1]
        return used if used <= self.capacity else math.inf


def recipe_of(path: Path, **learner: Any) -> recipes.Recipe:
    return recipes.from_tree(
        {
            "model": {"path": str(path), "dtype": "fp32", "moe": {"routing_replay": True}},
            "learner": {"microbatch_tokens": "auto", **learner},
        }
    )


@pytest.fixture
def trainer(tmp_path: Path, one_rank: None) -> Trainer:
    tiny_qwen3_moe(tmp_path / "hf", num_hidden_layers=2)
    return Trainer(recipe_of(tmp_path / "hf"), tmp_path / "hf")


def settle(
    trainer: Trainer,
    longest: int,
    batch_tokens: int,
    record: Path | None,
    memory: FakeMemory,
    within: AbstractContextManager[None] | None = None,
) -> None:
    with mock.patch.object(microbatch_size, "gpu_memory", return_value=memory):
        microbatch_size.settle(trainer, longest, batch_tokens, record, within)


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    parameters = [p for chunk in trainer.policy.chunks for p in chunk.parameters()]
    return [
        torch.get_rng_state(),
        *(t.detach().clone() for p in parameters for t in (p, p.main_grad)),
    ]


def test_trials_leave_nothing_and_a_resumed_run_has_none(trainer: Trainer, tmp_path: Path) -> None:
    before = state_of(trainer)
    record = tmp_path / "microbatch.json"
    memory = FakeMemory(trainer, 0.25, 0.0049)
    settle(trainer, 60, 600, record, memory)
    assert trainer.policy.microbatch_tokens == 150  # the size below 0.75 / 0.0049
    assert memory.tried == [15, 30, 60, 120, 150]
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), before, strict=True))
    states = [
        kinds
        for p in trainer.policy.optimizer.chained_optimizers
        for kinds in p.optimizer.state.values()
    ]
    assert not any(kinds[name].any() for kinds in states for name in ("exp_avg", "exp_avg_sq"))
    assert trainer.step == 0
    assert json.loads(record.read_text())["microbatch_tokens"] == 150

    again = FakeMemory(trainer, 0.9, 0.01)
    settle(trainer, 60, 600, record, again)
    assert (trainer.policy.microbatch_tokens, again.tried) == (150, [])
    settle(
        trainer, 40, 600, record, FakeMemory(trainer, 0.25, 0.0049)
    )  # another longest sequence: tried anew
    assert trainer.policy.microbatch_tokens == 140


@pytest.mark.parametrize(
    "spoilt", [lambda text: text[:-40], lambda _: "[]", lambda text: text.replace("150", '"150"')]
)
def test_a_record_that_is_not_whole_is_found_anew(
    trainer: Trainer, tmp_path: Path, spoilt: Callable[[str], str]
) -> None:
    record = tmp_path / "microbatch.json"
    settle(trainer, 60, 600, record, FakeMemory(trainer, 0.25, 0.0049))
    whole = record.read_text()
    record.write_text(spoilt(whole))
    again = FakeMemory(trainer, 0.25, 0.0049)
    settle(trainer, 60, 600, record, again)
    assert again.tried == [15, 30, 60, 120, 150]
    assert record.read_text() == whole


def test_only_trials_are_within_what_is_lent(trainer: Trainer, tmp_path: Path) -> None:
    record = tmp_path / "microbatch.json"
    seen: list[str] = []

    @contextmanager
    def borrowed() -> Iterator[None]:
        seen.append("borrowed")
        yield
        seen.append("given back")

    class Watched(FakeMemory):
        def __call__(self, trial: Callable[[], None]) -> float:
            seen.append("trial")
            return super().__call__(trial)

    settle(trainer, 60, 60, record, Watched(trainer, 0.25, 0.0049), borrowed())
    assert (seen[0], set(seen[1:-1]), seen[-1]) == ("borrowed", {"trial"}, "given back")
    seen.clear()
    settle(trainer, 60, 60, record, Watched(trainer, 0.25, 0.0049), borrowed())
    assert seen == []


def test_a_trial_fills_micro_batches_and_running_out_steps_down(trainer: Trainer) -> None:
    """Little at rest, but more than lines say from 200 tokens on."""
    seen: list[float] = []

    class Kinked(FakeMemory):
        def __call__(self, trial: Callable[[], None]) -> float:
            before = len(seen)
            super().__call__(trial)
            assert len(seen) == before + 1
            tokens = self.tried[-1]
            return 0.001 * tokens if tokens < 200 else math.inf

    plain = trainer.policy.forward_backward

    def counting(sequences: Sequence[TrainSequence]) -> dict[str, float]:
        metrics = plain(sequences)
        assert metrics["microbatches"] == 1
        seen.append(sum(map(len, sequences)))
        return metrics

    trainer.policy.forward_backward = counting
    memory = Kinked(trainer, 0, 0)
    settle(trainer, 60, 900, None, memory)
    assert seen == memory.tried
    assert trainer.policy.microbatch_tokens == 180


def test_what_does_not_fit_is_said_in_the_words_of_the_recipe(trainer: Trainer) -> None:
    with pytest.raises(
        MegarlError,
        match=r"longest sequence, of 60 tokens, does not fit on a GPU; set learner\.recompute=full",
    ):
        settle(trainer, 60, 600, None, FakeMemory(trainer, 0.8, 0.005))
    with pytest.raises(
        MegarlError,
        match=r"microbatch_tokens: auto tries sizes on a GPU, but this machine has none",
    ):
        microbatch_size.settle(trainer, 60, 600, None)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(9, "64 tokens per micro-batch; lower it"), (70, "one sequence of 70 tokens")],
)
def test_memory_that_runs_out_in_training_names_the_keys(
    tmp_path: Path, one_rank: None, tokens: int, said: str
) -> None:
    """A longer sequence than a micro-batch may have has one of its own: lowering the
    key would not help.
    """
    tiny_llama(tmp_path / "hf")
    trainer = Trainer(recipe_of(tmp_path / "hf", microbatch_tokens=64), tmp_path / "hf")

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    trainer.policy.lm_head = lambda temperature: full
    ids = np.arange(tokens, dtype=np.int32)
    with pytest.raises(
        MegarlError,
        match=rf"learner.microbatch_tokens: rank 0 ran out .*{said}.*recompute=full.* 2.00 GiB",
    ) as e:
        logprobs(trainer, [ids])
    assert "\n" not in str(e.value)


def test_what_nccl_takes_in_the_first_trial_is_not_room_for_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner has 40 of 100 bytes before trials, and a trial takes 20 more; NCCL
    then has 10.
    """
    gpu = {"free": 60, "reserved": 40, "peak": 40}

    def trial() -> None:
        gpu.update(free=30, reserved=60, peak=60)

    fakes = {
        "is_available": lambda: True,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (gpu["free"], 100),
        "memory_reserved": lambda: gpu["reserved"],
        "max_memory_reserved": lambda: gpu["peak"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert microbatch_size.gpu_memory()(trial) == pytest.approx(60 / (microbatch_size.SHARE * 90))

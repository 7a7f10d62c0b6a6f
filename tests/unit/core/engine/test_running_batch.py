"""What a running batch needs once requests have left it is what SGLang itself finds for
those that are still there.
"""

import dataclasses
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from megarl.core.engine.workers import forget

OPTIONS: dict[str, dict[str, Any]] = {
    "rollout": {"temperature": 1.0, "top_k": -1},
    "warmer": {"temperature": 1.5, "top_k": -1},
    "greedy": {"temperature": 0.0},
    "nucleus": {"top_p": 0.7, "top_k": 4096},
    "few": {"top_k": 5},
    "likely": {"min_p": 0.1},
    "biased": {"logit_bias": {"3": 1.0}},
}
VOCABULARY = 16


class Batch:
    """As much of a ScheduleBatch as SGLang reads to find out what it needs."""

    device = "cpu"

    def __init__(self, *names: str) -> None:
        ours = {
            "return_sampling_mask": False,
            "custom_logit_processor": None,
            "sampling_logprobs_mode": "none",
        }
        self.reqs = [
            SimpleNamespace(sampling_params=SamplingParams(**OPTIONS[name]), **ours)
            for name in names
        ]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's settings, which a server has from its arguments."""
    features = SimpleNamespace(enable_custom_logit_processor=False, enable_watermark=False)
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    found = SimpleNamespace(features=features, deterministic=deterministic)
    monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: found)


def needs(info: SamplingBatchInfo) -> dict[str, Any]:
    """All that is not a number per request: what one request may have set for the
    others.
    """
    values = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    told = {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, bool | int)
    }
    return told | {"penalties": info.penalizer_orchestrator.is_required}


def left(stays: str, *leave: str, forgets: bool = True) -> dict[str, Any]:
    """What a batch needs in which all of these were, and one has stayed."""
    batch = Batch(stays)
    info = SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
    others = Batch(*leave)
    info.merge_batch(SamplingBatchInfo.from_schedule_batch(others, VOCABULARY))
    info.filter_batch([0], torch.tensor([0]))
    if forgets:
        forget(info, [request.sampling_params for request in batch.reqs])
    return needs(info)


@pytest.mark.parametrize("stays", OPTIONS)
def test_what_others_asked_for_is_forgotten(stays: str) -> None:
    alone = needs(SamplingBatchInfo.from_schedule_batch(Batch(stays), VOCABULARY))
    for leave in combinations(OPTIONS, 2):
        assert left(stays, *leave) == alone, leave


@pytest.mark.parametrize("leaves", ["greedy", "nucleus", "few", "likely", "biased"])
def test_sglang_would_keep_it(leaves: str) -> None:
    """Else `forget` could go."""
    alone = needs(SamplingBatchInfo.from_schedule_batch(Batch("rollout"), VOCABULARY))
    assert left("rollout", leaves, forgets=False) != alone

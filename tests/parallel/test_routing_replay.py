"""The learner with prescribed experts computes at every layout what transformers
computes for the same tokens and experts. Also: how many of its own choices differ from
them, which is what parity counts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from megarl.core.base.types import Batch, Rollout, Routing, encode
from tests.parallel.replay_world import OTHER
from tests.parallel.test_learner_layouts import VOCABULARY, make_batch, scalerl_by_transformers
from tests.parallel.worlds import run_world
from tests.tiny import (
    tiny_deepseek_v3,
    tiny_gpt_oss,
    tiny_llama4,
    tiny_qwen3_5_moe,
    tiny_qwen3_moe,
)

# Layers with experts, experts a token.
MODELS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "qwen3_moe": (tiny_qwen3_moe, 4, 2),
    "llama4": (tiny_llama4, 3, 1),
    "deepseek_v3": (
        partial(
            tiny_deepseek_v3, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2
        ),
        3,
        2,
    ),
    "gpt_oss": (partial(tiny_gpt_oss, num_local_experts=4), 4, 3),
    "qwen3_5_moe": (
        partial(
            tiny_qwen3_5_moe,
            num_experts=4,
            num_experts_per_tok=2,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
        ),
        4,
        2,
    ),
}
EXPERTS = 4


def with_routing(batch: Batch, layers: int, chosen: int) -> Batch:
    """Any experts, not those that a router would choose, of all tokens of a rollout but
    the last.
    """
    draw = np.random.default_rng(9)

    def routed(rollout: Rollout, prompt: int) -> Rollout:
        rows = prompt + len(rollout.tokens) - 1
        table = draw.permuted(
            np.tile(np.arange(EXPERTS, dtype=np.uint8), (rows, layers, 1)), axis=-1
        )[..., :chosen]
        return msgspec.structs.replace(rollout, routing=Routing.of(table, EXPERTS))

    return msgspec.structs.replace(
        batch,
        groups=tuple(
            msgspec.structs.replace(
                g, rollouts=tuple(routed(r, len(g.prompt.tokens)) for r in g.rollouts)
            )
            for g in batch.groups
        ),
    )


class Forced:
    """transformers' model, whose routers take the batch's experts; the last token,
    which nothing depends on, any.
    """

    def __init__(self, model: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.tables = {
            (*g.prompt.tokens.tolist(), *r.tokens.tolist()): r.routing.table
            for g in batch.groups
            for r in g.rollouts
            if r.routing is not None
        }
        self.layers: list[torch.Tensor] = []
        monkeypatch.setattr(torch, "topk", self.topk)
        self.parameters = model.parameters
        self.named_modules = model.named_modules
        self.save_pretrained = model.save_pretrained

    def double(self) -> "Forced":
        self.model.double()
        return self

    def topk(
        self, scores: torch.Tensor, k: int, dim: int, sorted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scores.shape[-1] != EXPERTS:  # of groups of experts
            return scores.topk(k, dim)
        chosen = self.layers.pop(0)
        assert chosen.shape == (len(scores), k)
        return scores.gather(dim, chosen), chosen

    def __call__(self, ids: torch.Tensor) -> object:
        table = torch.from_numpy(self.tables[tuple(ids[0].tolist())].astype(np.int64))
        self.layers = list(torch.cat([table, table[-1:]]).unbind(1))
        output = self.model(ids)
        assert not self.layers
        return output


@torch.no_grad()
def free(model: Any, batch: Batch, other: int) -> dict[str, Any]:
    """By its own choices: log-probs of each rollout's completion, and of the token
    `other` in its places; how many choices of a layer for a token were recorded
    otherwise.
    """
    found: dict[str, Any] = {"logprobs": [], "against": [], "choices": 0, "differing": 0}
    for group, rollout in ((g, r) for g in batch.groups for r in g.rollouts):
        chosen: list[torch.Tensor] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            topk = torch.topk

            def remembered(
                *arguments: Any, topk: Any = topk, chosen: Any = chosen, **named: Any
            ) -> Any:
                values, indices = topk(*arguments, **named)
                if arguments[0].shape[-1] == EXPERTS:
                    chosen.append(indices)
                return values, indices

            monkeypatch.setattr(torch, "topk", remembered)
            tokens = torch.from_numpy(
                np.concatenate([group.prompt.tokens, rollout.tokens]).astype(np.int64)
            )
            logprobs = torch.log_softmax(model(tokens[None]).logits[0], -1)[
                len(group.prompt.tokens) - 1 : -1
            ]
        found["logprobs"].append(logprobs.gather(1, tokens[len(group.prompt.tokens) :, None])[:, 0])
        found["against"].append(logprobs[:, other])
        assert rollout.routing is not None
        own = torch.stack(chosen, 1)[:-1].sort(-1).values.numpy()
        found["choices"] += own.shape[0] * own.shape[1]
        found["differing"] += int((own != np.sort(rollout.routing.table, -1)).any(-1).sum())
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> object:
    path = tmp_path_factory.mktemp("replay")
    for name, (make, layers, chosen) in MODELS.items():
        batch = with_routing(make_batch(), layers, chosen)
        path.joinpath(f"{name}.msgpack").write_bytes(encode(batch))
        model = make(path / name, vocab_size=VOCABULARY)
        scored = free(model, batch, OTHER)
        with pytest.MonkeyPatch.context() as monkeypatch:
            forced = Forced(model, batch, monkeypatch)
            expected = scalerl_by_transformers(forced, batch, tmp_path_factory.mktemp(name))
        torch.save(expected | {"scored": scored}, path / f"{name}.pt")
    return path


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 4]
)
def test_told_experts_are_taken(directory: object, ranks: int) -> None:
    print(run_world(ranks, "tests.parallel.replay_world", str(directory)))

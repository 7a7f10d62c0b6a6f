"""Routing replay: the learner's routers take the experts that the server took (model.moe.routing_replay).

    MicroBatch.experts [tokens, layers with experts, experts a token]
        │ this rank's tokens (sequence parallelism), a column for each of this rank's layers
        ▼
    megatron's RouterReplay of each router      forward: these;   recomputation, which runs in backward: the same again

The probabilities are still the learner's own, so gradients reach the router. Where nothing was recorded (the last token of a
sequence, padding) the router chooses itself. For parity a router can also keep to its own choice and count where it differs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor


class PartialReplay(RouterReplay):
    """Targets of -1 are filled with the router's own choice, once; backward replays the filled ones.

    compares: take the router's own choice throughout, and count the tokens whose target is another set of experts:
    counts [2] int64, compared and differing."""

    target_topk_idx: Tensor
    compares = False
    counts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Any
    ) -> tuple[Tensor, Tensor]:
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            probabilities, own = compute(scores, topk, num_groups, group_topk)
            target = self.target_topk_idx.to(scores.device)
            if self.compares:
                self._count(own, target)
                return probabilities, own
            self.target_topk_idx = torch.where(target < 0, own, target)
            self.replay_backward_list[-1] = self.target_topk_idx
        return super().get_replay_topk(scores, topk, num_groups, group_topk, compute)

    def _count(self, own: Tensor, target: Tensor) -> None:
        known = (target >= 0).all(-1)
        same = (own.unsqueeze(-1) == target.unsqueeze(-2)).any(-1).all(-1)
        found = torch.stack([known.sum(), (known & ~same).sum()])
        self.counts = found if self.counts is None else self.counts + found


class Replay:
    """Of one rank: `step` around all passes of a step, `of` around the forward pass of each micro-batch through a chunk."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        """Gives every router of the chunks a replay. A router chooses by itself outside of `of`."""
        self.compares = False
        self._columns: list[list[tuple[int, PartialReplay]]] = []
        self._chosen = chunks[0].config.moe_router_topk
        self._shards = (1, 0)
        if chunks[0].config.sequence_parallel:
            self._shards = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
        for chunk in chunks:
            columns = layers_with_experts(chunk.config)
            routers = []
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    layer.mlp.router.router_replay = PartialReplay()
                    routers.append((columns.index(layer.layer_number - 1), layer.mlp.router.router_replay))
            self._columns.append(routers)

    @contextmanager
    def of(self, chunk: int, experts: Tensor | None, tokens: int) -> Iterator[None]:
        """Replay `experts` (None: nothing recorded of these `tokens` tokens) through the chunk of this index."""
        size, rank = self._shards
        for column, router in self._columns[chunk]:
            if experts is None:
                mine = torch.full((tokens // size, self._chosen), -1)
            else:
                mine = experts[:, column].chunk(size)[rank].long()
            router.set_target_indices(mine)
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for _, router in self._columns[chunk]:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is replayed within is forgotten behind, also when a pass breaks off."""
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def comparing(self, counts: Tensor) -> Iterator[None]:
        """Passes within keep to the routers' own choices. Adds to `counts` [2] int64 this rank's (token, layer) choices that
        were compared with recorded ones, and those that are another set of experts."""
        routers = [router for column in self._columns for _, router in column]
        self.compares = True
        for router in routers:
            router.compares, router.counts = True, None
        try:
            yield
            counts += sum(router.counts for router in routers if router.counts is not None)
        finally:
            self.compares = False
            for router in routers:
                router.compares = False

    def end(self) -> None:
        """Forget the step's choices."""
        for routers in self._columns:
            for _, router in routers:
                router.clear_indices()
                router.clear_router_replay_action()


def layers_with_experts(config: Any) -> list[int]:
    """Of the whole model, counted from 0, from a TransformerConfig."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [i for i in range(config.num_layers) if i % frequency == 0]
    return [i for i, experts in enumerate(frequency) if experts]

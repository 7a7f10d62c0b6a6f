"""Experts: routing replay, and how evenly tokens fall on them.

Replay: the learner's routers take the experts that the server took (model.moe.routing_replay).

    MicroBatch.experts [tokens, layers with experts, experts a token]
        │ this rank's tokens (sequence parallelism), a column for each of this rank's layers
        ▼
    megatron's RouterReplay of each router      forward: these;   recomputation, which runs in backward: the same again

The probabilities are still the learner's own, so gradients reach the router. Where nothing was recorded (the last token of a
sequence, padding) the router chooses itself. For parity a router can also keep to its own choice and count where it differs.

Load: counted in each step, with the loss that evens it out if the recipe asks for one.

    each micro-batch   padding ──► routers ──routing map──► tokens of each expert of each layer       (padding left out)
    after the step     summed over ranks ──► max / mean of each layer: 1 is even, the number of experts is all to one

The balancing loss is megatron's (Switch Transformer, arXiv 2101.03961, eq. 4), computed for each micro-batch. Each counts by
its share of the step's tokens, so that a step's balancing gradient does not grow with the number of micro-batches.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megarl.core.learner.microbatch import MicroBatch
from megarl.core.recipe import Moe


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

    def __init__(self, chunks: Sequence[GPTModel], expert_layers: Sequence[int]) -> None:
        """Gives every router of the chunks a replay. A router chooses by itself outside of `of`. expert_layers: of the whole
        model, counted from 0."""
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
            routers = []
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    layer.mlp.router.router_replay = PartialReplay()
                    routers.append((expert_layers.index(layer.layer_number - 1), layer.mlp.router.router_replay))
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


class ExpertLoad:
    """Of one rank: `begin` a step, `padding_mask` for each forward pass, `metrics` at its end."""

    def __init__(self, chunks: Sequence[GPTModel], settings: Moe) -> None:
        config = chunks[0].config
        device = next(chunks[0].parameters()).device
        self._coefficient = settings.aux_loss
        self._sequence_parallel = config.sequence_parallel
        self._tokens = torch.zeros(config.num_layers, config.num_moe_experts, device=device)
        self._step_tokens = 0
        # Of each router of a chunk, the coefficients of the micro-batches that it has not seen with gradients yet.
        self._waiting: dict[GPTModel, list[deque[float]]] = {chunk: [] for chunk in chunks}
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    waiting: deque[float] = deque()
                    self._waiting[chunk].append(waiting)
                    layer.mlp.router.register_forward_pre_hook(partial(_weigh, waiting))
                    layer.mlp.router.register_forward_hook(partial(self._count, layer.layer_number - 1))

    def begin(self, step_tokens: int) -> None:
        """A step over so many tokens, of all ranks together."""
        self._tokens.zero_()
        self._step_tokens = step_tokens
        for waiting in (queue for queues in self._waiting.values() for queue in queues):
            waiting.clear()

    def padding_mask(self, chunk: GPTModel, micro: MicroBatch) -> Tensor:
        """`padding_mask` of the chunk's forward pass of this micro-batch, which it is being prepared for."""
        for waiting in self._waiting[chunk]:
            waiting.append(self._coefficient * micro.sequence_tokens / max(self._step_tokens, 1))
        if chunk.pre_process or not self._sequence_parallel:
            return micro.padding
        # The first stage divides it among tensor-parallel ranks itself, the others take it as it is.
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        return micro.padding.chunk(size, 1)[rank]

    def metrics(self) -> dict[str, float]:
        """Of the step, the same on all ranks. COLLECTIVE over all of them."""
        dist.all_reduce(self._tokens)
        imbalance = {
            f"expert_imbalance_layer_{layer}": max(tokens) * len(tokens) / sum(tokens)
            for layer, tokens in enumerate(self._tokens.tolist())
            if sum(tokens)
        }
        return imbalance | {"expert_imbalance_max": max(imbalance.values(), default=1.0)}

    def _count(self, layer: int, _: Any, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        """After a router: inputs are hidden states and the mask [s, b], outputs probabilities and the map [s * b, experts]."""
        if torch.is_grad_enabled():
            self._tokens[layer] += (outputs[1] & ~inputs[1].reshape(-1, 1)).sum(0)


def _weigh(waiting: deque[float], router: Any, _: Any) -> None:
    """Before a router: the loss it adds is weighed. A router that is run again adds it then, in the backward pass, when other
    micro-batches may have gone forward; they go backward in the same order."""
    if torch.is_grad_enabled():
        router.config.moe_aux_loss_coeff = waiting.popleft()

"""Experts: routing replay, and how evenly tokens fall on them.

Replay: the learner's routers take the experts that the server chose (model.moe.routing_replay).

    MicroBatch.experts [tokens, layers with experts, experts a token]
        │ this rank's tokens (sequence parallelism), a column for each of this rank's layers
        ▼
    megatron's RouterReplay of each router      forward: these;   recomputation, which runs in backward: the same again

The probabilities are still the learner's own, so gradients reach the router. Where nothing was recorded (the last token of a
sequence, padding) the router chooses itself. For parity a router can also keep to its own choice and count where it differs.

Load: each step counts it, with the loss that evens it out if the recipe asks for one.

    each micro-batch   padding ──► routers ──routing map──► tokens of each expert of each layer       (padding left out)
    after the step     summed over ranks ──► max / mean of each layer: 1 is even, the number of experts is all to one

Routers' biases (model.moe.bias_update_rate) move after each update, from these counts: up where an expert had fewer tokens than
the mean of its layer, down where it had more (arXiv 2408.15664). A skipped step moves none.

The balancing loss is megatron's (Switch Transformer, arXiv 2101.03961, eq. 4), computed for each micro-batch. Each counts by
its share of the step's tokens, so that a step's balancing gradient does not grow with the number of micro-batches.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.nn import Module

from megarl.core.learner.microbatch import MicroBatch
from megarl.core.recipe import Moe

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class PartialReplay(RouterReplay):
    """Fills targets of -1 with the router's own choice, once; backward replays the filled ones. replayed [] int64: choices
    taken from targets so far. counts [2] int64: if set, keep to the router's own choice, and count compared tokens and those
    with another set of experts."""

    target_topk_idx: Tensor
    replayed: Tensor
    counts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: TopK
    ) -> tuple[Tensor, Tensor]:
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            probabilities, own = compute(scores, topk, num_groups, group_topk)
            target = self.target_topk_idx.to(scores.device)
            if self.counts is not None:
                known = (target >= 0).all(-1)
                same = (own.unsqueeze(-1) == target.unsqueeze(-2)).any(-1).all(-1)
                self.counts += torch.stack([known.sum(), (known & ~same).sum()])
                return probabilities, own
            self.replayed += (target >= 0).all(-1).sum()
            self.target_topk_idx = torch.where(target < 0, own, target)
            self.replay_backward_list[-1] = self.target_topk_idx
        return super().get_replay_topk(scores, topk, num_groups, group_topk, compute)


class Replay:
    """Replays for one rank's routers: `replaying` wraps a micro-batch's way through a chunk, `close` ends a step."""

    def __init__(self, chunks: Sequence[GPTModel], expert_layers: Sequence[int]) -> None:
        """Give every router of the chunks a replay. expert_layers: of the whole model, counted from 0."""
        config = chunks[0].config
        self._replayed = torch.zeros((), dtype=torch.int64, device=next(chunks[0].parameters()).device)
        self.compares, self._chosen, self._sharded = False, config.moe_router_topk, config.sequence_parallel
        self._columns: list[list[tuple[int, PartialReplay]]] = []
        for chunk in chunks:
            self._columns.append([])
            for layer, router in _routers(chunk):
                router.router_replay = PartialReplay()
                router.router_replay.replayed = self._replayed
                self._columns[-1].append((expert_layers.index(layer), router.router_replay))

    @contextmanager
    def replaying(self, chunk: int, experts: Tensor | None, tokens: int) -> Iterator[None]:
        """Replay `experts`, which lie on the CPU (None: nothing recorded for these `tokens` tokens). Outside of this a router
        chooses by itself."""
        experts = None if experts is None else experts.to(self._replayed.device)
        for column, router in self._columns[chunk]:
            recorded = torch.full((tokens, self._chosen), -1) if experts is None else experts[:, column]
            router.set_target_indices((_own_part(recorded, 0) if self._sharded else recorded).long())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for _, router in self._columns[chunk]:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextmanager
    def comparing(self, counts: Tensor) -> Iterator[None]:
        """Let routers keep to their own choices within, and count into `counts` [2] how they compare with recorded ones."""
        routers = [router for column in self._columns for _, router in column]
        self.compares = True
        for router in routers:
            router.counts = counts
        try:
            yield
        finally:
            self.compares = False
            for router in routers:
                router.counts = None

    def metrics(self, choices: float) -> dict[str, float]:
        """Return the share of a step's `choices` (of all ranks) that was replayed. COLLECTIVE over all ranks."""
        dist.all_reduce(self._replayed)
        share = self._replayed.item() / choices if choices else math.nan
        self._replayed.zero_()
        return {"routing_replayed": share}

    def close(self) -> None:
        """Forget what was replayed in a step."""
        for routers in self._columns:
            for _, router in routers:
                router.clear_indices()
                router.clear_router_replay_action()


class ExpertLoad:
    """Counts tokens on one rank: `begin` a step, `padding_mask` for each forward pass, `metrics` at its end."""

    def __init__(self, chunks: Sequence[GPTModel], settings: Moe) -> None:
        config, device = chunks[0].config, next(chunks[0].parameters()).device
        self._coefficient, self._bias_rate = settings.aux_loss, settings.bias_update_rate
        self._sharded = config.sequence_parallel
        self._tokens = torch.zeros(config.num_layers, config.num_moe_experts, device=device)
        self._step_tokens = 0
        self._topk, self.choices = config.moe_router_topk, 0.0  # of all layers and ranks in the latest step
        # For each router of a chunk, the coefficients of the micro-batches that it has not seen with gradients yet.
        self._waiting: dict[GPTModel, list[deque[float]]] = {chunk: [] for chunk in chunks}
        self._biases: list[tuple[int, Tensor]] = []
        for chunk in chunks:
            for layer, router in _routers(chunk):
                if self._bias_rate:
                    self._biases.append((layer, router.expert_bias))
                waiting: deque[float] = deque()
                self._waiting[chunk].append(waiting)
                router.register_forward_pre_hook(partial(_weigh, waiting))
                router.register_forward_hook(partial(self._count, layer))

    def begin(self, step_tokens: int) -> None:
        """Begin a step over this many tokens, all ranks counted together."""
        self._tokens.zero_()
        self._step_tokens = step_tokens
        for waiting in (queue for queues in self._waiting.values() for queue in queues):
            waiting.clear()

    def padding_mask(self, chunk: GPTModel, micro: MicroBatch) -> Tensor:
        """Return the `padding_mask` for this micro-batch's forward pass through the chunk, which has to follow."""
        for waiting in self._waiting[chunk]:
            waiting.append(self._coefficient * micro.sequence_tokens / max(self._step_tokens, 1))
        # The first stage divides it among tensor-parallel ranks itself, the others take it as it is.
        return _own_part(micro.padding, 1) if self._sharded and not chunk.pre_process else micro.padding

    def metrics(self) -> dict[str, float]:
        """Return the step's imbalance and unused experts, the same on all ranks. COLLECTIVE over all of them."""
        dist.all_reduce(self._tokens)
        used = {layer: tokens for layer, tokens in enumerate(self._tokens.tolist()) if sum(tokens)}
        self.choices = sum(map(sum, used.values())) / self._topk
        imbalance = {
            f"expert_imbalance_layer_{layer}": max(tokens) * len(tokens) / sum(tokens) for layer, tokens in used.items()
        }
        unused = [tokens.count(0) / len(tokens) for tokens in used.values()]
        return imbalance | {
            "expert_imbalance_max": max(imbalance.values(), default=1.0),
            "expert_unused_share": sum(unused) / len(unused) if unused else math.nan,
        }

    def balance(self) -> None:
        """Move the routers' biases by the step's tokens. After `metrics`, which sums them over all ranks."""
        for layer, bias in self._biases:
            tokens = self._tokens[layer]
            bias += self._bias_rate * torch.sign(tokens.mean() - tokens)

    def _count(self, layer: int, _: Module, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        """After a router: inputs are hidden states and the mask [s, b], outputs probabilities and the map [s * b, experts]."""
        if torch.is_grad_enabled():
            self._tokens[layer] += (outputs[1] & ~inputs[1].reshape(-1, 1)).sum(0)


def _weigh(waiting: deque[float], router: Module, _: object) -> None:
    """Before a router: weigh the loss it adds. A router that is run again adds it then, in the backward pass, when other
    micro-batches may have gone forward; they go backward in the same order."""
    if torch.is_grad_enabled():
        router.config.moe_aux_loss_coeff = waiting.popleft()


def _routers(chunk: GPTModel) -> Iterator[tuple[int, Module]]:
    """Yield each router of the chunk after its layer, counted from 0."""
    for layer in chunk.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            yield layer.layer_number - 1, layer.mlp.router


def _own_part(tensor: Tensor, dim: int) -> Tensor:
    """Return this tensor-parallel rank's part under sequence parallelism."""
    shards = parallel_state.get_tensor_model_parallel_world_size()
    return tensor.chunk(shards, dim)[parallel_state.get_tensor_model_parallel_rank()]

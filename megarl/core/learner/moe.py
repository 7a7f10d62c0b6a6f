"""Experts: routing replay, and how evenly tokens are spread over them.

Replay: the learner's routers take the experts that the server chose
(model.moe.routing_replay).

    MicroBatch.experts: this rank's share (shares.py)
        │ RowExperts.table [tokens, layers of the chunk, experts per token]
        │ this rank's tokens (sequence parallelism), one column for each layer
        ▼
    megarl's PartialReplay in each router
        forward: the recorded experts; recomputation in the backward pass: the same

The probabilities are still the learner's own, so gradients reach the router. Where
nothing was recorded (the last token of a sequence, padding) the router chooses itself.
For parity, routers can instead make their own choices and count differences.

Load: each step counts the tokens of each expert, without padding, over all ranks. By
these counts routers' biases (model.moe.bias_update_rate) change after each update: up
for experts with fewer tokens than the mean of their layer, down for those with more
(arXiv 2408.15664). The balancing loss is megatron's (Switch Transformer, arXiv
2101.03961, eq. 4), computed for each micro-batch and weighted by its share of the
step's tokens.
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megarl.core.learner.microbatch import MicroBatch, RowExperts
from megarl.core.recipe import Moe

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class PartialReplay(RouterReplay):
    """The replay in one router. The forward pass fills targets of -1 with the router's
    own choice; backward replays them.
    """

    target_topk_idx: Tensor

    def __init__(self, replay: "Replay") -> None:
        super().__init__()
        self._replay = replay

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: TopK,
    ) -> tuple[Tensor, Tensor]:
        """Return probabilities and indices [tokens, topk] of the experts to use: the
        recorded ones or, while choices are compared, the router's own. compute: the
        router's own choice.
        """
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            probabilities, own_choice = compute(scores, topk, num_groups, group_topk)
            target = self.target_topk_idx.to(scores.device)
            recorded = (target >= 0).all(-1)
            if self._replay.counts is not None:  # comparing: order within a set is free
                matches = own_choice.unsqueeze(-1) == target.unsqueeze(-2)
                differs = recorded & ~matches.any(-1).all(-1)
                self._replay.counts += torch.stack([recorded.sum(), differs.sum()])
                self.replay_backward_list.clear()
                return probabilities, own_choice
            self._replay.replayed += recorded.sum()
            self.target_topk_idx = torch.where(target < 0, own_choice, target)
            if self._replay.recomputes:  # in place of the list's newest targets, with their -1
                self.replay_backward_list[-1] = self.target_topk_idx
            else:
                # Nothing would take them off the list: all micro-batches' choices, 8
                # bytes each, until the step ends.
                self.replay_backward_list.clear()
        return super().get_replay_topk(scores, topk, num_groups, group_topk, compute)


class Replay:
    """Replay for one rank's routers. `replaying` wraps a micro-batch's forward pass
    through a chunk; `close` ends a step.

    replayed [] int64: number of this step's choices that were replayed. counts [2]
    int64: if set, routers make their own choices, and it counts the tokens compared and
    those with another set of experts. recomputes: whether the backward pass runs
    routers again. expert_layers: the whole model's layers with experts. columns: this
    rank's, as indices among them, ascending.
    """

    def __init__(self, chunks: Sequence[GPTModel], expert_layers: Sequence[int]) -> None:
        config = chunks[0].config
        device = next(chunks[0].parameters()).device
        self.replayed = torch.zeros((), dtype=torch.int64, device=device)
        self.counts: Tensor | None = None
        self.recomputes = routes_again(config)
        self._chosen = config.moe_router_topk
        self._sharded = config.sequence_parallel
        own_layers: list[int] = []
        for chunk in chunks:
            own_layers += [layer for layer, _ in _routers(chunk)]
        own_layers.sort()
        self.columns = tuple(expert_layers.index(layer) for layer in own_layers)
        # Of each chunk, its routers, and which of `columns` they have.
        self._columns: list[list[tuple[int, PartialReplay]]] = []
        for chunk in chunks:
            self._columns.append([])
            for layer, router in _routers(chunk):
                router.router_replay = PartialReplay(self)
                self._columns[-1].append((own_layers.index(layer), router.router_replay))

    @contextmanager
    def replaying(self, chunk: int, experts: RowExperts | None, tokens: int) -> Iterator[None]:
        """Replay `experts` within this context (None: nothing is recorded for these
        `tokens` tokens).
        """
        columns = [column for column, _ in self._columns[chunk]]
        shape = (tokens, len(columns), self._chosen)
        table = torch.full(shape, -1) if experts is None else experts.table(columns)
        table = table.to(self.replayed.device)
        for place, (_, router) in enumerate(self._columns[chunk]):
            recorded = table[:, place]
            if self._sharded:
                recorded = _own_part(recorded, 0)
            router.set_target_indices(recorded.long())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for _, router in self._columns[chunk]:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextmanager
    def comparing(self, counts: Tensor) -> Iterator[None]:
        """Let routers make their own choices in this context, and count in `counts` how
        they differ from recorded ones.
        """
        self.counts = counts
        try:
            yield
        finally:
            self.counts = None

    def metrics(self, choices: float) -> dict[str, float]:
        """Return the share of a step's `choices` (of all ranks) that was replayed.
        COLLECTIVE over all ranks.
        """
        dist.all_reduce(self.replayed)
        share = self.replayed.item() / choices if choices else math.nan
        self.replayed.zero_()
        return {"routing_replayed": share}

    def close(self) -> None:
        """Forget the step's choices."""
        for routers in self._columns:
            for _, router in routers:
                router.clear_indices()
                router.clear_router_replay_action()


def routes_again(config: TransformerConfig) -> bool:
    """Return whether the backward pass runs routers again."""
    if config.recompute_granularity == "selective":
        return "moe" in config.recompute_modules
    return config.recompute_granularity == "full"


class ExpertLoad:
    """Counts tokens on one rank. Call `start_step` for a step, `padding_mask` before
    each forward pass, `metrics` at the end.
    """

    def __init__(self, chunks: Sequence[GPTModel], settings: Moe) -> None:
        config = chunks[0].config
        device = next(chunks[0].parameters()).device
        self._coefficient = settings.aux_loss
        self._bias_rate = settings.bias_update_rate
        self._sharded = config.sequence_parallel
        self._tokens = torch.zeros(config.num_layers, config.num_moe_experts, device=device)
        self._step_tokens = 0
        self._topk = config.moe_router_topk
        self.choices = 0.0  # tokens times layers with experts, of all ranks in the latest step
        # For each router of a chunk, the coefficients of micro-batches whose pass with
        # gradients it has not run yet.
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

    def start_step(self, step_tokens: int) -> None:
        """Begin a step. step_tokens: on all ranks together."""
        self._tokens.zero_()
        self._step_tokens = step_tokens
        for queues in self._waiting.values():
            for waiting in queues:
                waiting.clear()

    def padding_mask(self, chunk: GPTModel, micro: MicroBatch) -> Tensor:
        """Return the `padding_mask` for this micro-batch's forward pass through the
        chunk, which must be the next one, and queue the weight of its balancing loss
        for the chunk's routers (`_weigh`).
        """
        coefficient = self._coefficient * micro.sequence_tokens / max(self._step_tokens, 1)
        for waiting in self._waiting[chunk]:
            waiting.append(coefficient)
        # The first stage divides the mask among tensor-parallel ranks itself; the
        # others take it as it is.
        if self._sharded and not chunk.pre_process:
            return _own_part(micro.padding, 1)
        return micro.padding

    def metrics(self) -> dict[str, float]:
        """Return the step's imbalance and share of unused experts, the same on all
        ranks. COLLECTIVE over all ranks.
        """
        dist.all_reduce(self._tokens)
        metrics: dict[str, float] = {}
        unused_shares: list[float] = []
        total = 0.0
        for layer, tokens in enumerate(self._tokens.tolist()):
            layer_total = sum(tokens)
            if layer_total:
                total += layer_total
                imbalance = max(tokens) * len(tokens) / layer_total
                metrics[f"expert_imbalance_layer_{layer}"] = imbalance
                unused_shares.append(tokens.count(0) / len(tokens))
        self.choices = total / self._topk
        largest = max(metrics.values(), default=1.0)
        metrics["expert_imbalance_max"] = largest
        metrics["expert_unused_share"] = math.nan
        if unused_shares:
            metrics["expert_unused_share"] = sum(unused_shares) / len(unused_shares)
        return metrics

    def balance(self) -> None:
        """Update the routers' biases by the step's tokens. Call this after `metrics`,
        which sums them over all ranks.
        """
        for layer, bias in self._biases:
            tokens = self._tokens[layer]
            bias += self._bias_rate * torch.sign(tokens.mean() - tokens)

    def _count(
        self, layer: int, _: Module, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]
    ) -> None:
        """Count after a router's forward pass. inputs: hidden states and padding mask
        [s, b]; outputs: probabilities and routing map [s * b, experts].
        """
        if torch.is_grad_enabled():
            _, padding = inputs
            _, routing_map = outputs
            is_counted = routing_map & ~padding.reshape(-1, 1)
            self._tokens[layer] += is_counted.sum(0)


def _weigh(waiting: deque[float], router: Module, _: object) -> None:
    """Set the weight of a router's balancing loss just before it runs with gradients.
    waiting: the weights of the micro-batches whose run with gradients is still to come.
    With recomputation that is in the backward pass, when other micro-batches may have
    gone forward; but they go backward in the same order.
    """
    if torch.is_grad_enabled():
        router.config.moe_aux_loss_coeff = waiting.popleft()


def _routers(chunk: GPTModel) -> Iterator[tuple[int, Module]]:
    """Yield (layer, router) for each router of the chunk; layers are counted from 0."""
    for layer in chunk.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            yield layer.layer_number - 1, layer.mlp.router


def _own_part(tensor: Tensor, dim: int) -> Tensor:
    """Return this tensor-parallel rank's part of a tensor that sequence parallelism
    divides along `dim`.
    """
    shards = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return tensor.chunk(shards, dim)[rank]

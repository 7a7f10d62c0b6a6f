"""A model on its ranks, and how the micro-batches of many sequences go through it.

    [TrainSequence] ──► plan: balanced micro-batches
                          └─► Megatron's schedule (1F1B, interleaved)
                                └─► head: trained tokens' hidden states ──► output
                                      └─► consume(micro-batch, output)

A `Network` only computes; a `TrainedNetwork` (trained.py) learns. All ranks call all
methods, with the same sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import Module

from megarl.core import models
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.packing import cost_of
from megarl.core.base.errors import MegarlError
from megarl.core.learner.microbatch import (
    ExpertsCut,
    MicroBatch,
    MicroBatchPlan,
    RowLayout,
    assemble,
    plan,
)
from megarl.core.learner.moe import ExpertLoad, Replay
from megarl.core.models import Family, build, hf
from megarl.core.models.head import logprobs_and_entropy
from megarl.core.models.layers import ValueHead
from megarl.core.recipe import Recipe

type Head[Output] = Callable[..., Output]
"""GPTModel's `output_processor`: computes the output from the last stage's hidden
states and a MicroBatch, its `context`.
"""
type Consume[Output] = Callable[[Sequence[int], MicroBatch, Output], Tensor]
"""Maps sequences' indices, their micro-batch and its output to a scalar, on the last
stage. Training takes its gradient.
"""


class OutOfMemory(MegarlError):
    """This rank ran out of memory. Others may be waiting for it in a collective, so
    several ranks cannot go on.
    """


@contextmanager
def out_of_memory_named(key: str, doing: str) -> Iterator[None]:
    """Turn torch's out-of-memory error in this context into one that names the recipe's
    key. doing: the work and a remedy.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).splitlines()[0]
        raise OutOfMemory(
            f"{key}: rank {dist.get_rank()} ran out of memory {doing}, or divide the model further"
            f" ({first_line})"
        ) from None


class Network:
    """This rank's chunks of a model, with weights. replays_in_training: whether
    training replays the recorded choices of experts.
    """

    expert_load: ExpertLoad | None = None
    replay: Replay | None = None
    replays_in_training = False

    def __init__(self, chunks: list[GPTModel], family: Family, recipe: Recipe) -> None:
        self.chunks = chunks
        self.family = family
        self.microbatch_tokens = 1  # "auto": until microbatch_size.settle
        if recipe.learner.microbatch_tokens != "auto":
            self.microbatch_tokens = recipe.learner.microbatch_tokens
        self.head_precision = build.DTYPES[recipe.model.dtype]
        if recipe.model.fp32_head in ("both", "learner"):
            self.head_precision = torch.float32
        self.layout = RowLayout(
            recipe.model,
            data_parallel=parallel_state.get_data_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            vocabulary=family.architecture.vocabulary,
        )
        self.cost = cost_of(family.architecture)
        self.device = next(chunks[0].parameters()).device
        # The micro-batches of a step have one size (microbatch.py), so stages need not
        # exchange shapes.
        chunks[0].config.variable_seq_lengths = False

    def lm_head(self, temperature: float) -> Head[tuple[Tensor, Tensor]]:
        """Return a head that computes the log-prob and entropy [n] of each trained
        token.
        """
        return partial(
            selected_logprobs,
            vocab_size=self.family.architecture.vocabulary,
            temperature=temperature,
            precision=self.head_precision,
        )

    def scoring_head(self, against: int) -> Head[Tensor]:
        """Return a head that computes log-probs [n, 2] at temperature 1: of each
        trained token, and of `against` instead.
        """
        head = self.lm_head(1.0)

        def both(*, context: MicroBatch, **arguments: object) -> Tensor:
            """Compute both log-probs of each trained token (a Head)."""
            logprobs, _ = head(context=context, **arguments)
            alternative = replace(context, labels=torch.full_like(context.labels, against))
            logprobs_against, _ = head(context=alternative, **arguments)
            return torch.stack([logprobs, logprobs_against], dim=-1)

        return both

    def full_memory_named(self, longest: int = 0) -> AbstractContextManager[None]:
        """Return a context for work on micro-batches. If a GPU runs out of memory in
        it, the error says what to change. longest: tokens of the longest sequence,
        which has a micro-batch of its own if it exceeds the limit.
        """
        advice = "set learner.recompute=full or learner.optimizer_offload"
        doing = f"with {self.microbatch_tokens} tokens per micro-batch; lower it, {advice}"
        if longest > self.microbatch_tokens:
            doing = (
                f"with one sequence of {longest} tokens, more than that; {advice}, shorten length.*"
            )
        return out_of_memory_named("learner.microbatch_tokens", doing)

    def plan(self, sequences: Sequence[TrainSequence]) -> MicroBatchPlan:
        """Plan the micro-batches of these sequences, for all ranks."""
        return plan([len(s) for s in sequences], self.microbatch_tokens, self.layout, self.cost)

    @torch.no_grad()
    def ask(
        self, sequences: Sequence[TrainSequence], head: Head[Tensor], shape: tuple[int, ...] = ()
    ) -> list[np.ndarray]:
        """Return the head's output [n, *shape] for each trained token: [len, *shape]
        per sequence, on all ranks.
        """
        lengths = [len(sequence) for sequence in sequences]
        starts = np.cumsum([0, *lengths])
        outputs = torch.zeros(int(starts[-1]), *shape, device=self.device)

        def collect(members: Sequence[int], micro: MicroBatch, values: Tensor) -> Tensor:
            """Put a micro-batch's values into `outputs` (a Consume)."""
            if len(micro.source):
                # Of each token, its index among the tokens of all sequences.
                ranges = [np.arange(starts[i], starts[i + 1]) for i in members]
                indices = np.concatenate(ranges)[micro.source]
                outputs[torch.from_numpy(indices).to(self.device)] = values
            return values.sum()

        self.run(self.chunks, sequences, head, collect, forward_only=True)
        # Tensor-parallel ranks have equal outputs, of which the sum counts one.
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            outputs.zero_()
        dist.all_reduce(outputs)
        return np.split(outputs.cpu().numpy(), starts[1:-1])

    def run[Output](
        self,
        modules: Sequence[Module],
        sequences: Sequence[TrainSequence],
        head: Head[Output],
        consume: Consume[Output],
        forward_only: bool,
    ) -> int:
        """Run Megatron's schedule over this rank's micro-batches; return their number.
        modules: the chunks, perhaps wrapped.
        """
        steps = self.plan(sequences)
        replay = self._replay_of_pass(forward_only)
        microbatches = self._microbatches(sequences, steps, replay is not None)
        expert_load = None if forward_only else self.expert_load

        def loss(
            indices: Sequence[int], micro: MicroBatch, output: Output
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """Return the scalar as megatron takes it: with no tokens and no metrics."""
            return consume(indices, micro, output), torch.tensor(0, dtype=torch.int), {}

        def forward(
            iterator: Iterator[tuple[list[int], MicroBatch]], module: Module
        ) -> tuple[Tensor, partial]:
            """Return a chunk's output for the iterator's next micro-batch, and the
            function that makes it a loss (megatron's forward_step_func).
            """
            indices, micro = next(iterator)
            chunk = modules.index(module)
            padding_mask = None
            if expert_load:
                padding_mask = expert_load.padding_mask(self.chunks[chunk], micro)
            with _replaying(replay, chunk, micro):
                output = module(
                    micro.tokens,
                    None,
                    None,
                    packed_seq_params=micro.packed,
                    padding_mask=padding_mask,
                    output_processor=head,
                    output_processor_context=micro,
                )
            return output, partial(loss, indices, micro)

        longest = max(map(len, sequences), default=0)
        with self.full_memory_named(longest), closing(replay) if replay else nullcontext():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(microbatches) for _ in modules],
                model=list(modules),
                num_microbatches=len(microbatches),
                seq_length=steps.length,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return len(microbatches)

    def _microbatches(
        self, sequences: Sequence[TrainSequence], steps: MicroBatchPlan, replays: bool
    ) -> list[tuple[list[int], MicroBatch]]:
        """Return this rank's micro-batches, each with its sequences' indices."""
        cut = self.experts_cut if replays else None
        microbatches: list[tuple[list[int], MicroBatch]] = []
        for indices in steps.members[parallel_state.get_data_parallel_rank()]:
            members = [sequences[i] for i in indices]
            micro = assemble(members, steps.length, self.layout, self.device, cut)
            microbatches.append((indices, micro))
        return microbatches

    @property
    def experts_cut(self) -> ExpertsCut:
        """The part of recorded experts that this rank replays."""
        assert self.replay is not None
        layout = self.layout
        return ExpertsCut(layout.model.context_parallel, layout.context_rank, self.replay.columns)

    def _replay_of_pass(self, forward_only: bool) -> Replay | None:
        """Return the replay if a pass needs it: to compare choices, or to train."""
        if self.replay is None:
            return None
        is_comparing = self.replay.counts is not None
        is_training = self.replays_in_training and not forward_only
        return self.replay if is_comparing or is_training else None


def _replaying(
    replay: Replay | None, chunk: int, micro: MicroBatch
) -> AbstractContextManager[None]:
    """Return a context for a chunk's forward pass, in which the micro-batch's recorded
    choices of experts are replayed, if there is a replay.
    """
    if replay is None:
        return nullcontext()
    return replay.replaying(chunk, micro.experts, micro.tokens.numel())


def loaded_chunks(recipe: Recipe, hf_dir: Path) -> tuple[list[GPTModel], Family]:
    """Build this rank's chunks of the model in `hf_dir`, at the recipe's layout, and
    load its weights.
    """
    family = models.family_of(hf_dir)
    chunks = build.build(recipe.model, hf_dir, recompute=recipe.learner.recompute)
    hf.load(chunks, family, hf_dir)
    return chunks, family


def selected_logprobs(
    *,
    hidden_states: Tensor,
    output_layer: tensor_parallel.ColumnParallelLinear,
    output_weight: Tensor | None,
    context: MicroBatch,
    vocab_size: int,
    temperature: float,
    precision: torch.dtype,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Act as GPTModel's `output_processor`: return log-probs and entropies [n] of a
    micro-batch's trained tokens. hidden_states [s/tp or s, b, h]; output_weight: the
    embedding's, if it is the head.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    return logprobs_and_entropy(
        trained_positions(hidden_states, output_layer, context.positions, in_parts=True),
        weight,
        context.labels,
        vocab_size=vocab_size,
        temperature=temperature,
        precision=precision,
        group=output_layer.tp_group,
    )


def trained_positions(
    hidden_states: Tensor,
    output_layer: tensor_parallel.ColumnParallelLinear | ValueHead,
    positions: Tensor,
    in_parts: bool,
) -> Tensor:
    """Return [n, h] of hidden states [s/tp or s, b, h] at `positions` [n] of [s*b].
    in_parts: each rank has only its columns' part of the gradient; they are summed as
    in megatron's output layer. Otherwise all must have the same gradient.
    """
    if output_layer.sequence_parallel:
        # Any rank's part may hold any number of trained positions: gather, then select.
        hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=in_parts, group=output_layer.tp_group
        )
    chosen = hidden_states.flatten(0, 1).index_select(0, positions)
    if in_parts and not output_layer.sequence_parallel:
        chosen = tensor_parallel.copy_to_tensor_model_parallel_region(
            chosen, group=output_layer.tp_group
        )
    return chosen

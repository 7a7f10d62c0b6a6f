"""Micro-batches put every token, label and weight where the model predicts it, whatever
the layout.
"""

import numpy as np
import pytest
import torch

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.microbatch import MicroBatch, RowLayout, assemble, plan
from megarl.core.recipe import Model

CPU = torch.device("cpu")


def sequences(lengths: list[int]) -> list[TrainSequence]:
    """Token t of sequence i is 100 i + t; completion from the middle on; weight and
    behaviour say the same number.
    """
    out = []
    for i, n in enumerate(lengths):
        tokens = np.arange(n, dtype=np.int32) + 100 * i
        mask = np.arange(n) >= max(1, n // 2)
        value = (tokens * mask).astype(np.float32)
        out.append(
            TrainSequence(i, 0, tokens, -value, value, float(i), reference_logprobs=-2 * value)
        )
    return out


def inputs_seen(micro: MicroBatch) -> np.ndarray:
    """The token whose hidden state each trained label is predicted from."""
    return micro.tokens[0][micro.positions].numpy()


LENGTHS = [7, 2, 12, 5, 9, 3, 3, 8]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("context", [1, 2])
def test_each_trained_token_once_with_its_predecessor(
    shards: int, pipeline: int, context: int
) -> None:
    all_sequences = sequences(LENGTHS)
    seen: list[int] = []
    shapes = set()
    for dp in range(2):
        for rank in range(context):
            sizes = {
                "context_parallel": context,
                "tensor_parallel": shards,
                "pipeline_parallel": pipeline,
            }
            layout = RowLayout(Model.model_validate(sizes), 2, rank)
            p = plan(LENGTHS, 24, layout)
            for members in p.members[dp]:
                chosen = [all_sequences[i] for i in members]
                micro = assemble(chosen, p.length, layout, CPU)
                shapes.add(micro.tokens.shape)
                labels = micro.labels.numpy()[micro.counted.numpy() > 0]
                seen += labels.tolist()
                n = len(labels)
                np.testing.assert_array_equal(inputs_seen(micro)[:n] + 1, labels)
                np.testing.assert_array_equal(micro.weight.numpy()[:n], labels)
                np.testing.assert_array_equal(micro.behaviour.numpy()[:n], -labels)
                np.testing.assert_array_equal(micro.reference.numpy()[:n], -2 * labels)
                np.testing.assert_array_equal(micro.advantage.numpy()[:n], labels // 100)
                joined = np.concatenate([s.tokens for s in chosen]) if chosen else np.zeros(0)
                np.testing.assert_array_equal(joined[micro.source], labels)
                assert micro.tokens.numel() % shards == 0
                assert (
                    micro.lengths.tolist() == [int((s.loss_weight > 0).sum()) for s in chosen]
                    or not chosen
                )
                if n:
                    of = np.repeat([s.ticket for s in chosen], micro.local_lengths)
                    np.testing.assert_array_equal(of, labels // 100)
                else:
                    assert micro.local_lengths.sum() == 1
    expected = np.concatenate([s.tokens[s.loss_weight > 0] for s in all_sequences])
    assert sorted(seen) == sorted(expected.tolist())
    if pipeline > 1:
        assert len(shapes) == 1


def test_a_packed_row_says_where_its_sequences_end() -> None:
    layout = RowLayout(Model(tensor_parallel=4))
    micro = assemble(sequences([3, 4, 2]), 0, layout, CPU)
    assert micro.packed.cu_seqlens_q.tolist() == [0, 3, 7, 9, 12]
    assert micro.packed.max_seqlen_q == 4


def test_context_parallel_ranks_take_chunks_from_both_ends() -> None:
    rows = []
    for rank in range(2):
        layout = RowLayout(Model(context_parallel=2), context_rank=rank)
        micro = assemble(sequences([8, 6]), 0, layout, CPU)
        rows.append(micro.tokens[0].tolist())
    assert rows == [[0, 1, 6, 7, 100, 101, 0, 0], [2, 3, 4, 5, 102, 103, 104, 105]]


def test_an_empty_microbatch_is_filler_without_weight() -> None:
    micro = assemble([], 8, RowLayout(Model(), data_parallel=2), CPU)
    assert micro.tokens.shape == (1, 8)
    assert micro.weight.tolist() == micro.counted.tolist() == [0.0]
    assert len(micro.source) == 0
    assert micro.local_lengths.tolist() == micro.lengths.tolist() == [1]


@pytest.mark.parametrize(("lengths", "longest"), [([], 1024), ([7, 12], 1024), ([3001, 12], 3004)])
def test_filler_is_no_longer_than_sequences_are(lengths: list[int], longest: int) -> None:
    """Attention that is divided among ranks refuses too long ones, and no rollout was
    too long.
    """
    layout = RowLayout(Model(context_parallel=2, pipeline_parallel=2))
    packed = assemble(sequences(lengths), 16384, layout, CPU).packed
    ends = packed.cu_seqlens_q.numpy()
    assert (packed.max_seqlen_q, packed.max_seqlen_kv, np.diff(ends).max(), ends[-1]) == (
        longest,
        longest,
        longest,
        16384,
    )
    assert (np.diff(ends) > 0).all()
    assert (ends % layout.sequence_multiple == 0).all()
    assert len(ends) <= len(lengths) + 17


def test_interleaved_stages_get_whole_groups_of_microbatches() -> None:
    p = plan([10] * 5, 10, RowLayout(Model(pipeline_parallel=2, virtual_pipeline_parallel=2)))
    assert [len(m) for m in p.members[0]] == [1, 1, 1, 1, 1, 0]

"""One rank of test_head_layouts: `python -m tests.parallel.head_world DIR`, DIR holding
batch.msgpack and tied/ with what learner_world wants of a model.

The head at TP of the world's size, with and without sequence parallelism, on megatron's
own output layer: hypothesis draws the same cases on all ranks. Then a whole step of a
model whose head is its embedding.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megarl.core.base.types import Batch, decode
from megarl.core.learner.network import selected_logprobs
from megarl.core.models import parallel
from megarl.core.recipe import Model
from tests.parallel.learner_world import check_step, recipe_of
from tests.plain_head import CASES, TERMS, Case, Result, differences, exact, make_case

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

TIED: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tensor_parallel": 2}, {"pipeline_parallel": 2}],
}

# No rank may draw, stop or shrink on its own: each example is a round of collectives.
TOGETHER = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def main(directory: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for sequence_parallel in (False, True) if world > 1 else (False,):
        parallel.start(Model(tensor_parallel=world), seed=0, timeout_s=60)
        worst = check_shapes(sequence_parallel)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            print(f"TP {world}, sequence parallel {sequence_parallel}: {worst}", flush=True)
    batch: Batch = decode((directory / "batch.msgpack").read_bytes(), Batch)
    for layout in TIED[world]:
        check_step(
            directory / "tied",
            batch,
            recipe_of(directory / "tied", world, **layout),
            f"tied {layout}",
        )
    parallel.stop()


def check_shapes(sequence_parallel: bool) -> dict[str, float]:
    """Every drawn case, and one that is large; the largest differences."""
    worst = dict.fromkeys(TERMS, 0.0)

    @TOGETHER
    @given(CASES, st.data())
    def drawn(case: Case, data: st.DataObject) -> None:
        rows = len(case.labels)
        world = parallel_state.get_tensor_model_parallel_world_size()
        length = (
            data.draw(st.integers(-(-rows // world), rows)) * world
        )  # of the sequence, trained and not
        at = torch.tensor(sorted(data.draw(st.permutations(range(length)))[:rows]))
        off = differences(on_this_rank(case, at, length, sequence_parallel), exact(case))
        assert all(off[name] <= 1e-6 for name in TERMS), off
        worst.update({name: max(off[name], worst[name]) for name in TERMS})

    drawn()
    case = make_case(1, rows=200, width=256, vocabulary=5001, temperature=0.9)
    off = differences(on_this_rank(case, torch.arange(3, 203), 300, sequence_parallel), exact(case))
    assert max(off.values()) <= 1e-6, off
    return {name: max(value, worst.get(name, 0.0)) for name, value in off.items()}


def on_this_rank(case: Case, at: torch.Tensor, length: int, sequence_parallel: bool) -> Result:
    """The head on this rank's rows of the weight and, under sequence parallelism, its
    part of the sequence; whole gradients.

    States that are not asked for are NaN, and so is the weight beyond the vocabulary.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    rank = group.rank()
    size = group.size()
    width = case.hidden.shape[1]
    columns = -(-case.vocabulary // size)
    layer = output_layer(width, columns * size, sequence_parallel)
    whole = torch.full((columns * size, width), torch.nan)
    whole[: case.vocabulary] = case.weight[: case.vocabulary]
    with torch.no_grad():
        layer.weight.copy_(whole.chunk(size)[rank])
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    states = torch.full((length, 1, width), torch.nan)
    states[at, 0] = case.hidden
    states = (states.chunk(size)[rank] if sequence_parallel else states).clone().requires_grad_()
    context: Any = SimpleNamespace(positions=at, labels=case.labels)
    logprobs, entropy = selected_logprobs(
        hidden_states=states,
        output_layer=layer,
        output_weight=None,
        context=context,
        vocab_size=case.vocabulary,
        temperature=case.temperature,
        precision=torch.float32,
    )
    (torch.stack([logprobs, entropy]) * case.upstream).sum().backward()
    assert states.grad is not None
    of_states = gathered(states.grad, group) if sequence_parallel else states.grad
    others = torch.ones(length, dtype=torch.bool)
    others[at] = False
    assert not of_states[others].any()
    for value in (logprobs, entropy, *(() if sequence_parallel else (of_states,))):
        everyones = gathered(value.detach().contiguous()[None], group)
        assert all(torch.equal(everyones[0], other) for other in everyones)
    of_weight = gathered(layer.weight.main_grad, group)
    padding = torch.zeros(len(case.weight) - case.vocabulary, width)
    assert not of_weight[case.vocabulary :].any()
    of_weight = torch.cat([of_weight[: case.vocabulary], padding])
    return Result(logprobs.detach(), entropy.detach(), of_states[at, 0], of_weight)


def output_layer(width: int, rows: int, sequence_parallel: bool) -> ColumnParallelLinear:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=2,
        kv_channels=1,
        perform_initialization=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )
    return ColumnParallelLinear(
        width, rows, config=config, init_method=torch.nn.init.zeros_, bias=False
    )


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    assert not dist.is_initialized()

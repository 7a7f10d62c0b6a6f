"""Operations that CUDA has in other forms than a CPU, or under conditions, as megarl
calls them: the GPU's results are a CPU's.

benchmarks/gpu/README.md has the conditions. Attention and the head have files of their
own.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.learner.microbatch import RowLayout, assemble
from megarl.core.learner.network import trained_positions
from megarl.core.models.attention import rms_norm
from megarl.core.models.layers import SwiGLU
from megarl.core.models.products import add_product, product
from megarl.core.recipe import Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
DEVICE = torch.device("cuda", 0)
SHAPES = {
    "square": (64, 64, 64),
    "one row": (1, 64, 131),
    "one column": (7, 33, 1),
    "odd": (17, 131, 33),
    "long": (3, 4096, 8),
}
"""m, k, n of a product: kernels of tensor cores want multiples of 8."""
EXACT = 2**-18
"""Largest difference, relative to the sum of the products' magnitudes: exact products
are summed in FP32, in any order.
"""


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("turned", ["neither", "first", "second", "both"])
def test_products_in_fp32(dtype: torch.dtype, shape: tuple[int, int, int], turned: str) -> None:
    """Also of transposed operands, and added to rows of a larger matrix."""
    m, k, n = shape
    a = drawn(m, k, dtype=dtype)
    b = drawn(k, n, dtype=dtype, seed=1)
    a_there = a.t().contiguous().to(DEVICE).t() if turned in ("first", "both") else a.to(DEVICE)
    b_there = b.t().contiguous().to(DEVICE).t() if turned in ("second", "both") else b.to(DEVICE)
    expected = a.double() @ b.double()
    allowed = EXACT * (a.double().abs() @ b.double().abs() + 1)
    found = product(a_there, b_there, torch.float32)
    assert found.dtype == torch.float32
    assert ((found.cpu().double() - expected).abs() <= allowed).all()
    total = torch.ones(m + 2, n, device=DEVICE)
    add_product(total[1:-1], a_there, b_there)
    assert ((total[1:-1].cpu().double() - 1 - expected).abs() <= allowed).all()
    assert total[[0, -1]].eq(1).all()


@pytest.mark.parametrize("here", [[3, 0, 5], [8], [0, 8], [1] * 8])
def test_means_over_sequences(here: list[int]) -> None:
    """Some of these may have no token on a rank."""
    values = drawn(8)
    lengths = torch.tensor(here)
    made = {}
    for device in (torch.device("cpu"), DEVICE):
        unused = torch.zeros(8, device=device)
        of_tokens = Tokens(
            logp=unused,
            behaviour=unused,
            reference=unused,
            advantage=unused,
            entropy=unused,
            counted=torch.tensor([1.0] * 7 + [0.0], device=device),
            local_lengths=lengths.to(device),
            lengths=lengths.clamp(min=1).float().to(device),
        )
        made[device.type] = of_tokens.sequence_mean(values.to(device)).cpu()
    assert made[DEVICE.type] == pytest.approx(made["cpu"], abs=1e-6)


def gradients(
    inputs: list[Tensor], function: object, upstream: Tensor, device: torch.device
) -> list[Tensor]:
    """Return the output and the inputs' gradients, computed on this device,
    on the CPU.
    """
    leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
    output = function(*leaves)  # type: ignore[operator]
    output.backward(upstream.to(device))
    return [output.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("width", [1, 7, 64])
def test_gradients_written_into_halves_of_a_tensor(width: int) -> None:
    """SwiGLU's `out=` and `grad_input=` have gaps between their rows."""
    case = [drawn(5, 2 * width)], SwiGLU.apply, drawn(5, width, seed=1)
    for mine, theirs in zip(
        gradients(*case, DEVICE), gradients(*case, torch.device("cpu")), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 33])
def test_norms(rows: int) -> None:
    """Their weight's gradient is a product with a vector, which TF32 would round."""
    case = (
        [drawn(rows, 257), drawn(257, seed=1)],
        lambda x, weight: rms_norm(x, 1e-5, weight),
        drawn(rows, 257, seed=2),
    )
    for mine, theirs in zip(
        gradients(*case, DEVICE), gradients(*case, torch.device("cpu")), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_chosen_positions(dtype: torch.dtype) -> None:
    """A GPU adds them up in any order; as no position is chosen twice, there is nothing
    to round.
    """
    head = SimpleNamespace(sequence_parallel=False)
    chosen = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20]

    def choose(hidden: Tensor) -> Tensor:
        return trained_positions(hidden, head, chosen.to(hidden.device), in_parts=False)

    case = [drawn(50, 1, 16, dtype=dtype)], choose, drawn(20, 16, dtype=dtype, seed=1)
    for mine, theirs in zip(
        gradients(*case, DEVICE), gradients(*case, torch.device("cpu")), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_micro_batch_is_what_the_host_had_when_it_was_made() -> None:
    """Its arrays are copied without waiting, and freed at once: other micro-batches get
    their memory.
    """
    layout = RowLayout(Model(), vocabulary=1000)
    ids = np.arange(20_000, dtype=np.int32) % 1000
    many = []
    for seed in range(20):
        weight = np.full(len(ids), seed + 1, np.float32)
        weight[0] = 0
        sequence = TrainSequence(seed, 0, (ids + seed) % 1000, -weight, weight, float(seed))
        many.append(
            [
                assemble([sequence], 32_768, layout, device)
                for device in (DEVICE, torch.device("cpu"))
            ]
        )
    for there, here in many:
        for field in dataclasses.fields(here):
            mine = getattr(there, field.name)
            expected = getattr(here, field.name)
            if isinstance(expected, Tensor):
                assert torch.equal(mine.cpu(), expected), field.name

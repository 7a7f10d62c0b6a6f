"""Products of bf16 numbers on a CPU have FP32's accuracy, and the switch that makes
them fast is what it was before.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.core.models.products import add_product, product
from megarl.shims import bf16_on_cpu, sglang_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the learner and SGLang use the GPU's own products"
)

MATMUL = torch.backends.mkldnn.matmul
EXACT = 1e-6
"""Largest relative error of a sum of hundreds of exact products in FP32. Rounding an
input to bf16 makes 1e-3.
"""


@pytest.fixture(params=["as this CPU is", "without bf16 instructions"], autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = MATMUL.fp32_precision  # another test of this process may have chosen
    MATMUL.fp32_precision = "none"
    if request.param == "without bf16 instructions":
        monkeypatch.setattr(bf16_on_cpu, "has_instructions", lambda: False)
    yield
    after = MATMUL.fp32_precision
    MATMUL.fp32_precision = before
    assert after == "none"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def test_a_product_has_the_accuracy_of_fp32() -> None:
    a = numbers(70, 300).bfloat16()
    b = numbers(300, 130, seed=1).bfloat16()
    found = product(a, b, torch.float32)
    assert found.dtype == torch.float32
    assert error(found, a.double() @ b.double()) < EXACT
    assert error(a @ b, a.double() @ b.double()) > 1e-4  # a result in bf16 would not pass


def test_a_sum_of_fp32_numbers_is_not_rounded_to_bf16() -> None:
    """`into` holds numbers that bf16 cannot; a and b come transposed, as for a weight's
    gradient.
    """
    d = numbers(300, 70).bfloat16()
    inputs = numbers(300, 130, seed=1).bfloat16()
    into = 100 * numbers(70, 130, seed=2)
    exact = into.double() + d.T.double() @ inputs.double()
    add_product(into, d.T, inputs)
    assert error(into, exact) < EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_that_bf16_would_round_are_left_alone(dtype: torch.dtype) -> None:
    a = numbers(70, 300).to(dtype)
    b = numbers(300, 130, seed=1).to(dtype)
    into = torch.zeros(70, 130)
    add_product(into, a, b)
    assert error(into, a.double() @ b.double()) < EXACT
    assert error(product(a, b, torch.float32), a.double() @ b.double()) < EXACT


def test_the_switch_is_on_inside_alone() -> None:
    """An ordinary FP32 product is rounded inside, where the CPU has the instructions,
    and exact outside.
    """
    a = numbers(70, 300)
    b = numbers(300, 130, seed=1)
    with bf16_on_cpu.exact_products():
        inside = error(a @ b, a.double() @ b.double())
    assert (inside > 1e-4) == bf16_on_cpu.has_instructions()
    assert error(a @ b, a.double() @ b.double()) < EXACT


def test_the_switch_is_restored_after_an_error() -> None:
    wide = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        product(wide, wide, torch.float32)
    with pytest.raises(RuntimeError):
        add_product(torch.zeros(2, 3), wide, wide)
    assert MATMUL.fp32_precision == "none"


def test_a_users_own_choice_is_restored() -> None:
    a = numbers(70, 300).bfloat16()
    MATMUL.fp32_precision = "ieee"
    try:
        product(a, a.T, torch.float32)
        assert MATMUL.fp32_precision == "ieee"
    finally:
        MATMUL.fp32_precision = "none"


def test_threads_take_turns() -> None:
    """If the second could begin while the first is inside, it would keep the first
    one's setting as the one to restore.
    """
    if not bf16_on_cpu.has_instructions():
        pytest.skip("nothing is switched")
    inside = Event()
    leave = Event()

    def first() -> None:
        with bf16_on_cpu.exact_products():
            inside.set()
            assert leave.wait(10)

    def second() -> str:
        with bf16_on_cpu.exact_products():
            return str(leave.is_set())

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert inside.wait(10)
        two = pool.submit(second)
        with pytest.raises(TimeoutError):
            two.result(timeout=0.1)
        leave.set()
        one.result(10)
        assert two.result(10) == "True"
    assert MATMUL.fp32_precision == "none"


@pytest.mark.parametrize(
    "columns", [bf16_on_cpu.HEAD_COLUMNS - 1, 2 * bf16_on_cpu.HEAD_COLUMNS + 3]
)
def test_a_head_in_pieces(columns: int) -> None:
    hidden = numbers(5, 64).bfloat16()
    weight = numbers(columns, 64, seed=1).bfloat16()
    found = bf16_on_cpu.head_product(hidden, weight)
    assert found.shape == (5, columns)
    assert error(found, hidden.double() @ weight.double().T) < EXACT


def test_sglangs_fp32_head_is_the_one_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its head is FP32 and its weights are bf16;
    other heads stay SGLang's own.
    """
    sglang_cpu.install()
    sglang_cpu.patch()
    from sglang.srt.layers.logits_processor import LogitsProcessor

    calls = []
    switch = bf16_on_cpu.exact_products
    monkeypatch.setattr(bf16_on_cpu, "exact_products", lambda: calls.append(1) or switch())
    hidden = numbers(5, 64).bfloat16()
    weight = numbers(50, 64, seed=1).bfloat16()
    logits = LogitsProcessor._compute_lm_head
    settings = SimpleNamespace(use_fp32_lm_head=True, rl_on_policy_target=None)
    found = logits(settings, hidden, SimpleNamespace(weight=weight))
    assert error(found, hidden.double() @ weight.double().T) < EXACT
    assert len(calls) == 1
    of_fp32 = logits(settings, hidden.float(), SimpleNamespace(weight=weight.float()))
    assert torch.equal(of_fp32, hidden.float() @ weight.float().T)
    settings.use_fp32_lm_head = False
    assert logits(settings, hidden, SimpleNamespace(weight=weight)).dtype == torch.bfloat16
    assert len(calls) == 1

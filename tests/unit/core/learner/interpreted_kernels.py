"""The head's Triton kernels on a CPU, in Triton's interpreter.

Run as `TRITON_INTERPRET=1 python -m tests.unit.core.learner.interpreted_kernels`, a
process of its own, because Triton reads that variable once, at import. The interpreter
shows every index, mask and formula; it shows neither a GPU's arithmetic nor races
between its threads (no two programs write the same place).
"""

from dataclasses import replace

import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.models.head import kernels, passes
from tests.plain_head import CASES, TERMS, Case, differences, exact, found, make_case

kernels.BLOCK = 64  # several blocks a chunk, the last one not full
LARGE_CHUNKS = st.tuples(
    st.integers(8, 30), st.integers(40, 160)
)  # the interpreter takes milliseconds a row and chunk


@settings(deadline=None, max_examples=25, derandomize=True)
@given(CASES, LARGE_CHUNKS)
def same_as_float64_and_as_torch(case: Case, chunk: tuple[int, int]) -> None:
    by_kernels = found(case, chunk=chunk, passes=kernels)
    expected = exact(case)
    off = differences(by_kernels, expected)
    assert all(off[name] <= 1e-6 for name in TERMS), off
    by_torch = replace(found(case, chunk=chunk, passes=passes), magnitude=expected.magnitude)
    off = differences(by_kernels, by_torch)
    assert all(off[name] <= 2e-6 for name in TERMS), off


def bf16_logits_and_gradients() -> None:
    case = make_case(0, rows=20, width=32, vocabulary=300, dtype=torch.bfloat16)
    for precision in (torch.float32, torch.bfloat16):
        mine = found(case, precision=precision, chunk=(7, 130), passes=kernels)
        reference = found(case, precision=precision, chunk=(7, 130), passes=passes)
        off = differences(mine, reference)
        assert max(off["logprobs"], off["entropy"]) <= 1e-6, off
        # Two roundings to bf16 on the way, and the interpreter cuts off where a GPU
        # rounds.
        assert max(off["of_hidden"], off["of_weight"]) <= 2**-6, off


def what_is_not_finite_stays_so() -> None:
    """A step whose loss is not finite is skipped and its rollouts are named: a kernel
    must not hide it.
    """
    case = make_case(0, rows=3, width=4, vocabulary=150)
    case.hidden[1, 2] = float("nan")
    for way in (kernels, passes):
        assert found(case, passes=way).logprobs.isnan().tolist() == [False, True, False]


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    same_as_float64_and_as_torch()
    bf16_logits_and_gradients()
    what_is_not_finite_stays_so()
    print("interpreted")

"""Prompts on disk are what was put there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Prompt, encode, int32
from megarl.tasks.data.prompts import Stored
from tests.full_disk import files_no_larger_than

PROMPTS = st.builds(
    Prompt,
    id=st.text(),
    tokens=st.lists(st.integers(0, 1 << 30)).map(int32),
    answer=st.text(),
    task=st.text(),
    difficulty=st.integers(-5, 5),
)


@given(st.lists(PROMPTS, max_size=20))
def test_a_sequence_as_a_list_is(prompts: list[Prompt]) -> None:
    stored = Stored()
    for prompt in prompts:
        stored.append(prompt)
    whole = [encode(p) for p in prompts]
    assert len(stored) == len(prompts)
    assert [encode(p) for p in stored] == whole
    assert [encode(stored[n]) for n in range(-len(prompts), 0)] == whole
    assert [encode(p) for p in stored[1::2]] == whole[1::2]
    with pytest.raises(IndexError):
        stored[len(prompts)]


def test_reading_between_writing() -> None:
    stored = Stored()
    for n in range(50):
        stored.append(Prompt(id=str(n), tokens=np.arange(n, dtype=np.int32), answer="x" * 1000 * n))
        assert [p.id for p in stored] == [str(m) for m in range(n + 1)]


def test_a_full_disk_is_said() -> None:
    stored = Stored()
    large = Prompt(id="a", tokens=int32([1]), answer="b" * 100_000)
    with (
        files_no_larger_than(1000),
        pytest.raises(MegarlError, match=r"prompts cannot be kept there: .*; set TMPDIR"),
    ):
        stored.append(large)

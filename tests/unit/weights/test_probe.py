"""The probe's sequences and its verdict."""

import numpy as np

from megarl.weights.probe import largest_difference, probe_sequences


def test_sequences_are_fixed_and_fit() -> None:
    one, two = (probe_sequences(3, vocabulary=11, longest=20, seed=5) for _ in range(2))
    assert [len(s) for s in one] == [20, 20, 20]
    assert all((a == b).all() and a.max() < 11 for a, b in zip(one, two, strict=True))
    assert len(probe_sequences(1, 11, 10_000, 0)[0]) == 64


def test_largest_difference() -> None:
    ours = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    assert largest_difference(ours, ours) == 0
    assert largest_difference(ours, [ours[0], ours[1] + 0.25]) == 0.25
    assert largest_difference(ours, [ours[0], np.array([np.nan], np.float32)]) == float("inf")
    assert largest_difference(ours, [ours[0][:1], ours[1]]) == float("inf")

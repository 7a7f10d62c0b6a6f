"""The sampler of CPU servers: frequencies against the distribution, rare and impossible
tokens, odd widths.
"""

import pytest
import torch
from scipy.stats import chisquare

from megarl.shims.sglang_cpu import BLOCK, sample_rows

DRAWS = 40_000


def frequencies(row: torch.Tensor) -> torch.Tensor:
    """Counts of DRAWS draws from the row."""
    drawn = torch.cat([sample_rows(row.expand(1000, -1)) for _ in range(DRAWS // 1000)])
    return drawn.bincount(minlength=len(row))


@pytest.mark.parametrize("columns", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_tokens_are_as_frequent_as_their_probabilities(columns: int) -> None:
    torch.manual_seed(columns)
    row = torch.softmax(torch.randn(columns), dim=-1)
    counts = frequencies(row)
    assert len(counts) == columns
    if columns > 1:
        expected = row.double() / row.double().sum() * DRAWS
        assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


def test_another_distribution_would_be_noticed() -> None:
    """The test above can fail: a twentieth of one token's probability is given to
    another.
    """
    torch.manual_seed(0)
    row = torch.softmax(torch.randn(BLOCK + 1), dim=-1)
    other = row.clone()
    other[3] += 0.05
    expected = other.double() / other.double().sum() * DRAWS
    assert chisquare(frequencies(row).numpy(), expected.numpy()).pvalue < 1e-4


def test_impossible_tokens_are_never_drawn() -> None:
    """Neither between possible ones, nor at the end, where a vocabulary is padded."""
    row = torch.zeros(2 * BLOCK)
    row[5] = 0.5
    row[BLOCK + 9] = 0.5
    counts = frequencies(row)
    assert counts.nonzero().view(-1).tolist() == [5, BLOCK + 9]


def test_a_rare_token_behind_likely_ones_is_drawn_as_often_as_it_should_be() -> None:
    """In FP32 a running sum near 1 has steps of 6e-8, more than each of these tokens
    has; together they are a hundredth.
    """
    row = torch.full((1 << 18,), 4e-8)
    row[0] = 1.0
    torch.manual_seed(1)
    draws = 5_000
    drawn = torch.cat([sample_rows(row.expand(10, -1)) for _ in range(draws // 10)])
    rare = int((drawn != 0).sum())
    expected = draws * float(row[1:].double().sum() / row.double().sum())
    assert abs(rare - expected) < 5 * expected**0.5
    assert len(drawn.unique()) > 0.9 * rare, "they differ, as draws among 260,000 should"

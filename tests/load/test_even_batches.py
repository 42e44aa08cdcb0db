"""Batch sizes that leave no small last batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_feed.load.build import even_batch_size


@pytest.mark.parametrize(
    ("wished", "samples", "ranks", "size", "left"),
    [
        (512, 50_000, 1, 500, 0),
        (500, 50_000, 1, 500, 0),
        (256, 10_000, 1, 250, 0),
        (256, 50_000, 2, 250, 0),
        (64, 64, 1, 64, 0),
        (64, 10, 1, 64, 10),
        (64, 101, 1, 50, 1),
        (1, 7, 1, 1, 0),
        (8, 13, 1, 6, 1),
    ],
)
def test_even_batch_size_matches_values_calculated_by_hand(
    wished: int, samples: int, ranks: int, size: int, left: int
) -> None:
    found, reason = even_batch_size(wished, samples, ranks)
    assert (found, -(-samples // ranks) % found) == (size, left)
    assert reason


@given(st.integers(1, 600), st.integers(1, 10**6), st.integers(1, 9))
def test_even_batch_size_is_the_largest_with_the_smallest_remainder(wished: int, samples: int, ranks: int) -> None:
    found, _ = even_batch_size(wished, samples, ranks)
    share = -(-samples // ranks)
    assert wished / 2 <= found <= wished
    if share > wished:
        for size in range(-(-wished // 2), wished + 1):
            assert (share % size, -size) >= (share % found, -found)

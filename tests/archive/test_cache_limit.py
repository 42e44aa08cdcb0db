"""The ways to write a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_feed.archive.shared_cache import parse_limit
from lightning_feed.errors import SettingsError


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, 1),
        ("123", 123),
        ("10b", 10),
        ("2 kB", 2000),
        ("2KiB", 2048),
        ("1.5 gib", 3 * 2**29),
        ("8G", 8 * 10**9),
        ("1TiB", 2**40),
        ("50%", 500),
        (" 100 % ", 1000),
        ("0.5%", 5),
    ],
)
def test_limits_are_read(limit: int | str, expected: int) -> None:
    assert parse_limit(limit, 1000) == expected


@pytest.mark.parametrize(
    "limit", [0, -1, True, 1.5, None, "", "GiB", "-5", "0", "0%", "101%", "5 %%", "8 Gib of it", "1e9", "50%B", "٣"]
)
def test_what_is_no_limit_is_refused(limit: object) -> None:
    with pytest.raises(SettingsError, match="is not possible"):
        parse_limit(limit, 1000)  # type: ignore[arg-type]


def test_a_share_of_an_unknown_amount_is_refused() -> None:
    with pytest.raises(SettingsError, match="not known on this machine"):
        parse_limit("50%", None)
    assert parse_limit("1MiB", None) == 2**20


@given(st.integers(1, 100), st.integers(100, 2**45))
def test_a_share_is_never_more_than_there_is(percent: int, available: int) -> None:
    share = parse_limit(f"{percent}%", available)
    assert share <= available
    assert abs(share - available * percent / 100) <= 1

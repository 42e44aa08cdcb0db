"""LoaderSettings takes what makes sense and says why it refuses the rest."""

from typing import Any

import pytest

from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.load.settings import LoaderSettings


def test_default_settings_leave_worker_options_on_auto() -> None:
    given = LoaderSettings()
    assert {given.num_workers, given.prefetch_factor, given.pin_memory, given.persistent_workers} == {"auto"}
    assert (given.background, given.in_order, given.drop_last) == (0, True, False)
    assert given.asking_for_workers() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", -1),
        ("num_workers", 1025),
        ("num_workers", True),
        ("num_workers", 2.0),
        ("num_workers", "many"),
        ("num_workers", None),
        ("prefetch_factor", 0),
        ("prefetch_factor", "tune"),
        ("persistent_workers", "tune"),
        ("prefetch_factor", False),
        ("prefetch_factor", 5000),
        ("pin_memory", 1),
        ("pin_memory", "yes"),
        ("persistent_workers", None),
        ("background", -1),
        ("background", "auto"),
        ("background", True),
        ("in_order", "auto"),
        ("drop_last", 0),
        ("timeout_s", -0.1),
        ("timeout_s", float("inf")),
        ("timeout_s", float("nan")),
        ("timeout_s", True),
        ("timeout_s", "10"),
        ("start_method", "thread"),
        ("workers", "threads"),
        ("workers", None),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 1.5),
    ],
)
def test_invalid_settings_are_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        LoaderSettings(**{name: value})
    assert f"{name}={value!r}" in str(refused.value)
    assert "Use" in str(refused.value)
    assert isinstance(refused.value, FeedError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "idle",
    [
        {"prefetch_factor": 4},
        {"persistent_workers": True},
        {"in_order": False},
        {"timeout_s": 3},
        {"start_method": "fork"},
        {"workers": "thread"},
    ],
)
def test_worker_options_are_refused_without_workers(idle: dict[str, Any]) -> None:
    (name, value), *_ = idle.items()
    with pytest.raises(SettingsError, match=f"{name}={value!r} would have no effect.*num_workers to 1 or more"):
        LoaderSettings(num_workers=0, **idle)
    assert LoaderSettings(**idle).asking_for_workers() == idle


def test_in_order_false_with_a_single_worker_is_refused() -> None:
    with pytest.raises(SettingsError, match="in_order=False needs at least two workers"):
        LoaderSettings(num_workers=1, in_order=False)

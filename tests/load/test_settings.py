"""LoaderSettings takes what makes sense and says why it refuses the rest."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.load.settings import LoaderSettings


def test_the_defaults_leave_the_machine_to_decide() -> None:
    given = LoaderSettings()
    assert {given.num_workers, given.prefetch_factor, given.pin_memory, given.persistent_workers} == {"auto"}
    assert (given.background, given.in_order, given.drop_last, given.shuffle) == (0, True, False, True)
    assert given.asking_for_workers() == {}


def test_settings_are_values() -> None:
    given = LoaderSettings(num_workers=3, background=2)
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given
    assert LoaderSettings(**dataclasses.asdict(given)) == given
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.num_workers = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    "given",
    [
        {"num_workers": 0},
        {"num_workers": 0, "background": 3, "pin_memory": True},
        {"num_workers": 0, "persistent_workers": False},
        {"num_workers": 2, "in_order": False, "timeout_s": 0.5, "start_method": "spawn", "persistent_workers": True},
        {"prefetch_factor": 4, "seed": 0, "sample_bytes": 1},
        {"num_workers": 1024, "prefetch_factor": 1024},
        {"workers": "thread"},
        {"workers": "thread", "num_workers": 2, "in_order": False, "timeout_s": 0.5, "persistent_workers": True},
    ],
)
def test_what_makes_sense_is_taken(given: dict[str, Any]) -> None:
    assert all(getattr(LoaderSettings(**given), name) == value for name, value in given.items())


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
        ("shuffle", None),
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
        ("sample_bytes", 0),
        ("sample_bytes", True),
    ],
)
def test_the_impossible_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        LoaderSettings(**{name: value})
    assert f"{name}={value!r}" in str(refused.value)
    assert "Give" in str(refused.value)
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
def test_what_would_have_no_effect_without_workers_is_refused(idle: dict[str, Any]) -> None:
    (name, value), *_ = idle.items()
    with pytest.raises(SettingsError, match=f"{name}={value!r} would have no effect.*num_workers to 1 or more"):
        LoaderSettings(num_workers=0, **idle)
    assert LoaderSettings(**idle).asking_for_workers() == idle


def test_a_start_method_has_no_effect_on_threads() -> None:
    with pytest.raises(SettingsError, match=r"starts no processes of torch, .*='spawn' would .* Leave it out"):
        LoaderSettings(workers="thread", start_method="spawn")


def test_a_lone_worker_cannot_be_overtaken() -> None:
    with pytest.raises(SettingsError, match="in_order=False would have no effect"):
        LoaderSettings(num_workers=1, in_order=False)

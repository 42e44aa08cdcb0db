"""A callback or settings that are given an unknown argument name the one that may be meant."""

import copy
import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest

from lightning_feed import AutotuneCallback, GPUStarvationCallback, LoaderSettings, PrefetchCallback
from lightning_feed.errors import SettingsError
from lightning_feed.images.dali_binding import DaliOptions
from lightning_feed.images.decode_ahead import NvJpegOptions

MISTAKES = [
    (GPUStarvationCallback, {"every_n_step": 5}, "every_n_step. Did you mean every_n_steps?"),
    (AutotuneCallback, {"budget": 5.0}, "budget. Did you mean budget_s?"),
    (AutotuneCallback, {"colour": "red"}, "colour."),
    (PrefetchCallback, {"host_key": ("a",)}, "host_key. Did you mean host_keys?"),
    (LoaderSettings, {"num_worker": 2}, "num_worker. Did you mean num_workers?"),
    (DaliOptions, {"thread": 2}, "thread. Did you mean threads?"),
    (NvJpegOptions, {"share": 0.5}, "share. Did you mean cpu_share?"),
]


@pytest.mark.parametrize(("callback", "options", "says"), MISTAKES)
def test_an_unknown_argument_is_refused_with_the_one_that_may_be_meant(callback: Any, options: Any, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        callback(**options)
    assert str(caught.value) == f"{callback.__name__} has no argument {says}"


def test_settings_are_replaced_and_pickled_as_dataclasses_are() -> None:
    settings = LoaderSettings(num_workers=2)
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings
    assert replace(settings, num_workers=3) == LoaderSettings(num_workers=3)


def test_signatures_are_those_that_tools_see() -> None:
    assert [*inspect.signature(AutotuneCallback).parameters] == ["max_workers", "budget_s"]


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    class Own(AutotuneCallback):
        def __init__(self, colour: str, **options: Any) -> None:
            super().__init__(**options)
            self.colour = colour

    assert Own("red", budget_s=3.0).budget_s == 3.0

"""A callback that is given an unknown argument names the one that may be meant."""

import inspect
from typing import Any

import pytest

from lightning_feed import AutotuneCallback, GPUStarvationCallback, PrefetchCallback
from lightning_feed.errors import SettingsError

MISTAKES = [
    (GPUStarvationCallback, {"every_n_step": 5}, "every_n_step. Did you mean every_n_steps?"),
    (AutotuneCallback, {"budget": 5.0}, "budget. Did you mean budget_s?"),
    (AutotuneCallback, {"colour": "red"}, "colour."),
    (PrefetchCallback, {"host_key": ("a",)}, "host_key. Did you mean host_keys?"),
]


@pytest.mark.parametrize(("callback", "options", "says"), MISTAKES)
def test_an_unknown_argument_is_refused_with_the_one_that_may_be_meant(callback: Any, options: Any, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        callback(**options)
    assert str(caught.value) == f"{callback.__name__} has no argument {says}"


def test_signatures_are_those_that_tools_see() -> None:
    assert [*inspect.signature(AutotuneCallback).parameters] == ["max_workers", "budget_s"]


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    class Own(AutotuneCallback):
        def __init__(self, colour: str, **options: Any) -> None:
            super().__init__(**options)
            self.colour = colour

    assert Own("red", budget_s=3.0).budget_s == 3.0

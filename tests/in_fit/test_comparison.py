"""Training itself compares what trials have left."""

import pytest
from trials.machines import workers

from lightning_feed.in_fit.comparison import Comparison
from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import Trial
from lightning_feed.trials.tune_loader import Tuned

OWN = workers(4)
CHOSEN = workers(2)
NONE = workers(0)
IN_PLACE = workers(4, in_place=True)


def compared(own_ms: float, taken_ms: dict[Setting, float], chosen: Setting = CHOSEN, share_s: float = 0.0) -> Setting:
    trials = (Trial(setting=OWN, steps_s=(0.01,), start_share_s=share_s), Trial(setting=NONE, steps_s=(0.01,)))
    tuned = Tuned(setting=chosen, own=OWN, reason="", trials=trials)
    comparison = Comparison(tuned, list(taken_ms), own_ms)
    for position, (setting, step_ms) in enumerate(taken_ms.items()):
        assert comparison.setting == setting
        comparison.note(step_ms)
        assert comparison.go_on() == (position + 1 < len(taken_ms))
    return comparison.fastest()


@pytest.mark.parametrize(
    ("taken_ms", "expected"),
    [
        ({CHOSEN: 8.0, NONE: 9.0}, CHOSEN),
        ({CHOSEN: 8.0, NONE: 5.0}, NONE),
        ({CHOSEN: 9.9}, CHOSEN),
        ({CHOSEN: 10.1}, OWN),
        ({NONE: 9.9}, OWN),
        ({NONE: 9.5}, NONE),
        ({CHOSEN: 11.0, NONE: 12.0}, OWN),
        ({CHOSEN: float("inf")}, OWN),
    ],
)
def test_the_fastest_is_taken_if_it_gains(taken_ms: dict[Setting, float], expected: Setting) -> None:
    assert compared(10.0, taken_ms) == expected


@pytest.mark.parametrize(("step_ms", "expected"), [(9.5, IN_PLACE), (9.9, OWN)])
def test_batches_in_place_must_gain_clearly(step_ms: float, expected: Setting) -> None:
    assert compared(10.0, {IN_PLACE: step_ms}, chosen=IN_PLACE) == expected


@pytest.mark.parametrize(("noise_ms", "expected"), [(0.5, CHOSEN), (1.0, OWN)])
def test_a_gain_within_the_noise_is_none(noise_ms: float, expected: Setting) -> None:
    tuned = Tuned(setting=CHOSEN, own=OWN, reason="", trials=())
    comparison = Comparison(tuned, [CHOSEN], 10.0, noise_ms)
    comparison.note(9.0, noise_ms)
    assert comparison.fastest() == expected


def test_the_start_of_workers_counts() -> None:
    """Steps without workers are 2 ms longer, but four workers start for 5 ms of each step."""
    assert compared(10.0, {NONE: 12.0}) == OWN
    assert compared(10.0, {NONE: 12.0}, share_s=0.005) == NONE

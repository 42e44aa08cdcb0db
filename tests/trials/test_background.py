"""A thread ahead of a loader that is not a DataLoader: when it is used, and that batches stay what they were."""

import gc
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_feed.trials.background import TRIED, WATCHED, BackgroundLoader, BackgroundTrial, why_not_in_background

WAIT_S, STEP_S = 0.014, 0.010


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Batches:
    """Batches that take time where they are drawn by the consumer, and none beside it."""

    def __init__(self, clock: Clock, count: int = 100, *, wait_s: float = WAIT_S) -> None:
        self.clock, self.count, self.wait_s = clock, count, wait_s
        self.drawn: list[tuple[int, bool]] = []
        """The number of each batch, and whether the consumer drew it."""

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.count))

    def make(self, number: int) -> Any:
        here = threading.current_thread() is threading.main_thread()
        self.drawn.append((number, here))
        if here:
            self.clock.now += self.wait_s
        return torch.tensor([number])


class Run:
    """A training loop over a loader, with the lines that were said."""

    def __init__(
        self,
        source: Any,
        clock: Clock,
        *,
        limit: float = math.inf,
        step: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        self.step = step
        self.said: list[str] = []
        self.clock, self.limit = clock, limit
        self.validates: float = 10**6
        self.trial = BackgroundTrial("the loader", self.said.append, clock=clock, **options)
        self.loader = BackgroundLoader(
            source, self.trial, limit=lambda given: min(self.limit, (given // self.validates + 1) * self.validates)
        )

    def epoch(self, step_s: float = STEP_S, *, ahead_s: float | None = None, steps: float = math.inf) -> list[Any]:
        """The batches of an epoch. ``ahead_s``: time of a step once the thread is tried."""
        found = []
        batches = iter(self.loader)
        while len(found) < min(steps, self.limit):
            batch = next(batches, None)
            if batch is None:
                break
            found.append(batch.item())
            self.step()
            tried = self.trial.state in ("try", "on")
            self.clock.now += ahead_s if tried and ahead_s is not None else step_s
        return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    for one in set(threading.enumerate()) - before:
        one.join(10)
    assert set(threading.enumerate()) <= before


def test_a_thread_that_makes_steps_shorter_stays() -> None:
    clock = Clock()
    run = Run(source := Batches(clock), clock)
    assert run.epoch() == list(range(100))
    assert run.trial.state == "on"
    assert [here for _, here in source.drawn] == [True] * WATCHED + [False] * TRIED + [True] + [False] * (
        99 - WATCHED - TRIED
    )
    (line,) = run.said
    assert line.startswith("draws from the loader in a thread: steps take 10 ms with a thread, and 24 without. ")
    source.drawn.clear()
    assert run.epoch() == list(range(100))
    assert [here for _, here in source.drawn] == [True] + [False] * 99  # what a pass begins with is looked at
    assert len(run.said) == 1


def test_a_thread_that_gains_nothing_is_given_up() -> None:
    clock = Clock()
    run = Run(source := Batches(clock), clock)
    assert run.epoch(ahead_s=0.0235) == list(range(100))
    assert run.trial.state == "off"
    assert run.said == ["draws from the loader as before: steps take 23.5 ms with a thread, and 24 without."]
    assert source.drawn == [(number, not WATCHED <= number < WATCHED + TRIED) for number in range(100)]


def test_a_thread_is_given_up_where_later_steps_are_longer() -> None:
    clock = Clock()
    run = Run(Batches(clock), clock)
    run.epoch()
    assert run.epoch(0.030) == list(range(100))
    assert run.trial.state == "on"
    assert run.epoch() == list(range(100))
    assert run.trial.state == "off"
    assert run.said[1:] == ["draws from the loader as before: steps take 30 ms with a thread, and 24 without."]


def test_batches_that_cost_nothing_are_drawn_as_before() -> None:
    clock = Clock()
    run = Run(source := Batches(clock, wait_s=0.0002), clock)
    assert run.epoch() == list(range(100))
    assert all(here for _, here in source.drawn)
    assert run.said == ["leaves the loader alone: its batches take 0.2 of 10.2 ms a step."]


DRAWS: dict[str, Callable[[], object]] = {
    "torch's default generator": lambda: torch.rand(1),
    "Python's random module": random.random,
    "numpy.random's functions": np.random.rand,
}


class Drawing(Batches):
    def __init__(self, clock: Clock, name: str, first: int = 0) -> None:
        super().__init__(clock)
        self.name, self.first = name, first

    def make(self, number: int) -> Any:
        if len(self.drawn) >= self.first:
            DRAWS[self.name]()
        return super().make(number)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_loader_that_draws_from_the_models_generator_is_left_alone(name: str, epochs: int) -> None:
    """At its first batches, or at the first of a later epoch."""
    clock = Clock()
    run = Run(source := Drawing(clock, name, 100 * epochs), clock, step=DRAWS[name])
    for _ in range(epochs + 1):
        assert run.epoch() == list(range(100))
    assert run.trial.state == "off"
    assert f"it draws random numbers from {name}, and a thread would" in run.said[-1]
    assert all(here for _, here in source.drawn[100 * epochs :])


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_that_training_does_not_use(name: str) -> None:
    """Of torch's it is always taken to do so."""
    clock = Clock()
    run = Run(Drawing(clock, name), clock, step=lambda: torch.rand(1))
    assert run.epoch() == list(range(100))
    assert run.trial.state == ("off" if name.startswith("torch") else "on")
    assert f"draws random numbers from {name}" in run.said[-1]


def test_nothing_is_drawn_ahead_of_a_validation() -> None:
    clock = Clock()
    run = Run(source := Batches(clock), clock)
    run.epoch()
    run.validates = 40
    batches, source.drawn = iter(run.loader), []
    for number in range(1, 100):
        next(batches)
        if number % 40 == 0:
            assert len(source.drawn) == number
    run.loader.close()


def test_generators_of_its_own_do_not_matter() -> None:
    class Own(Batches):
        generator = torch.Generator().manual_seed(1)

        def make(self, number: int) -> Any:
            torch.rand(1, generator=self.generator)
            return super().make(number)

    clock = Clock()
    run = Run(Own(clock), clock)
    before = torch.get_rng_state()
    run.epoch()
    assert run.trial.state == "on"
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_on_a_device_are_left_alone() -> None:
    clock = Clock()
    run = Run([torch.empty(1, device="meta")] * 100, clock)
    next(iter(run.loader))
    assert run.said == ["leaves the loader alone: its batches are made on the device."]


@pytest.mark.parametrize("at", [5, WATCHED + 3, 60])
def test_an_error_comes_in_the_place_of_its_batch(at: int) -> None:
    class Failing(Batches):
        def make(self, number: int) -> Any:
            if number == at:
                raise KeyError("no picture")
            return super().make(number)

    clock = Clock()
    run = Run(Failing(clock), clock)
    batches = iter(run.loader)
    for number in range(at):
        assert next(batches).item() == number
        clock.now += STEP_S
    with pytest.raises(KeyError, match="no picture"):
        next(batches)


@pytest.mark.parametrize("steps", [1, WATCHED + 3, 60])
def test_an_early_end_leaves_nothing_behind(steps: int) -> None:
    clock = Clock()
    run = Run(Batches(clock, 10**9), clock)
    assert run.epoch(steps=steps) == list(range(steps))
    run.loader.close()
    run.loader.close()


def test_an_iterator_gives_no_batch_that_training_does_not_take() -> None:
    """Each epoch goes on where the last one ended."""
    clock = Clock()
    source = Batches(clock, 10**9)
    run = Run(iter(source), clock, limit=40)
    assert [run.epoch() for _ in range(3)] == [list(range(start, start + 40)) for start in (0, 40, 80)]
    assert run.trial.state == "on"
    assert len(source.drawn) == 120


def test_short_epochs_are_tried_together() -> None:
    clock = Clock()
    run = Run(Batches(clock, 5), clock)
    for _ in range(20):
        assert run.epoch() == list(range(5))
    assert run.trial.state == "on"
    assert len(run.said) == 1


def test_what_was_asked_for_needs_no_gain() -> None:
    clock = Clock()
    run = Run(source := Batches(clock, wait_s=0.0), clock, asked=True)
    assert [run.epoch(0.1), run.epoch(0.3), run.epoch()] == [list(range(100))] * 3
    assert run.trial.state == "on"
    assert sum(not here for _, here in source.drawn) == 100 - WATCHED + 2 * 99
    (line,) = run.said
    assert line.startswith("draws from the loader in a thread. The order of batches stays.")


def test_all_else_is_the_loaders_own() -> None:
    run = Run(source := Batches(Clock()), Clock())
    assert run.loader.count == 100
    with pytest.raises(TypeError, match="has no len"):
        len(run.loader)
    with pytest.raises(AttributeError, match="nothing"):
        _ = run.loader.nothing
    assert len(Run([1, 2], Clock()).loader) == 2
    assert why_not_in_background(source) == ""
    source.state_dict = dict  # type: ignore[attr-defined]
    assert "has a state for checkpoints" in why_not_in_background(source)
    assert "cannot be iterated" in why_not_in_background(3)

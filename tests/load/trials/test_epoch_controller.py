"""Changes between epochs: decisions in a table, what holds whatever is measured, and the change of a living loader."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.trials.epoch_controller import (
    FEWEST_STEPS,
    MOST_MOVES,
    MOST_PREFETCH,
    ControllerState,
    EpochFigures,
    Move,
    Room,
    decide,
    reconfigure,
    why_fixed,
    why_no_workers,
    worst,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

ROOM = Room(usable_cpus=8)


def figures(step_ms: float = 100.0, waits_ms: float = 0.0, **known: Any) -> EpochFigures:
    return EpochFigures(**{"steps": 100, "step_ms": step_ms, "data_idle_ms": waits_ms, **known})


def queue(ready: float, capacity: float = 8.0) -> dict[str, float]:
    return {"queue_ready": ready, "queue_capacity": capacity}


def start(workers: int, prefetch: int | None = 2) -> ControllerState:
    return ControllerState(num_workers=workers, prefetch_factor=prefetch if workers else None)


CASES: dict[str, tuple[ControllerState, EpochFigures, Room, tuple[str, int, int | None] | None]] = {
    # A batch costs 2 workers 200 ms; 60 ms are the rest of a step: 200 / 60 with 10 % to spare are 4 workers.
    "starved, CPUs free": (start(2), figures(100, 40, on_cpu_pct=90.0), ROOM, ("up", 4, 2)),
    "starved, no workers": (start(0), figures(100, 60), ROOM, ("up", 2, 2)),
    "starved without end": (start(2), figures(100, 100), ROOM, ("up", 8, 2)),
    "starved, workers wait for a disk": (start(4), figures(100, 90, on_cpu_pct=3.0), ROOM, ("up", 32, 2)),
    "starved, workers compute half their time": (start(4), figures(100, 90, on_cpu_pct=50.0), ROOM, ("up", 16, 2)),
    "starved, one CPU": (start(1), figures(100, 40, on_cpu_pct=99.0), Room(usable_cpus=1), None),
    "starved, all CPUs at work": (start(8), figures(100, 40, on_cpu_pct=95.0), ROOM, None),
    "starved, others use the CPUs": (start(4), figures(100, 40, run_queue_pct=40.0), ROOM, None),
    "starved, workers in each other's way": (start(16), figures(100, 40, run_queue_pct=50.0), ROOM, ("down", 8, 2)),
    "starved, the cap": (start(2), figures(100, 90), Room(usable_cpus=8, most_workers=3), ("up", 3, 2)),
    "starved, /dev/shm": (start(2), figures(100, 90), Room(usable_cpus=8, most_in_flight=7), ("up", 3, 2)),
    "starved, no room": (start(2), figures(100, 90), Room(usable_cpus=8, most_in_flight=5), None),
    "jitter": (start(4), figures(100, 10, **queue(4)), ROOM, ("up", 4, 4)),
    "jitter, as deep as it gets": (start(2, 8), figures(100, 40, **queue(8, 16)), ROOM, ("up", 4, 8)),
    "jitter, no room": (start(4), figures(100, 40, **queue(4)), Room(usable_cpus=4, most_in_flight=9), None),
    "waits with a full queue": (start(4), figures(100, 40, **queue(7)), ROOM, None),
    "an empty queue is no jitter": (start(2), figures(100, 40, **queue(0.1)), ROOM, ("up", 4, 2)),
    "just starved": (start(4), figures(100, 5), ROOM, ("up", 5, 2)),
    "not quite starved": (start(4), figures(100, 4.9), ROOM, None),
    "fed, the queue is full": (start(8), figures(**queue(15.5, 16)), ROOM, ("down", 6, 2)),
    "fed, the workers sleep": (start(8), figures(on_cpu_pct=5.0, **queue(15.5, 16)), ROOM, ("down", 4, 2)),
    "fed, the workers work": (start(8), figures(on_cpu_pct=75.0, **queue(15.5, 16)), ROOM, None),
    "fed, the queue is used": (start(8), figures(**queue(12, 16)), ROOM, None),
    "fed, nothing known of the queue": (start(8), figures(), ROOM, None),
    "some jitter, the queue is full": (start(8), figures(100, 3, **queue(15.5, 16)), ROOM, None),
    "fed by one worker": (start(1), figures(**queue(2, 2)), ROOM, None),
    "fed by one worker with a deep queue": (start(1, 8), figures(**queue(8, 8)), ROOM, ("down", 1, 4)),
    "fed without workers": (start(0), figures(), ROOM, None),
    "too few steps": (start(2), replace(figures(100, 90), steps=FEWEST_STEPS - 1), ROOM, None),
}


@pytest.mark.parametrize(("now", "measured", "room", "expected"), CASES.values(), ids=list(CASES))
def test_the_first_decision(now: ControllerState, measured: EpochFigures, room: Room, expected: Any) -> None:
    then, move = decide(now, measured, room)
    assert (None if move is None else (move.kind, move.num_workers, move.prefetch_factor)) == expected
    assert (then.moves == 1) == (move is not None)
    if move is not None:
        assert (then.num_workers, then.prefetch_factor) == (move.num_workers, move.prefetch_factor)
        assert move.reason


def test_why_nothing_is_changed_while_starved_is_told() -> None:
    for name in ("starved, one CPU", "starved, others use the CPUs", "waits with a full queue", "starved, no room"):
        now, measured, room, _ = CASES[name]
        assert "waits 40 ms (40 %)" in (held := decide(now, measured, room)[0].held) or "waits 90 ms" in held
    assert not decide(*CASES["fed, the queue is used"][:3])[0].held


# --- judging ----------------------------------------------------------------------------------------------------------

STARVED = figures(100, 40)
JUDGED: dict[str, tuple[EpochFigures, EpochFigures, bool]] = {
    "more workers, faster": (STARVED, figures(80, 30), True),
    "more workers, slower": (STARVED, figures(106, 20), False),
    "more workers, a little slower and less starved": (STARVED, figures(104, 20), True),
    "more workers, nothing gained": (STARVED, figures(99, 39), False),
    "fewer workers, the same": (figures(**queue(8)), figures(102, 1), True),
    "fewer workers, slower": (figures(**queue(8)), figures(106, 1), False),
    "fewer workers, starved": (figures(**queue(8)), figures(101, 5.5), False),
}


@pytest.mark.parametrize(("before", "after", "kept"), JUDGED.values(), ids=list(JUDGED))
def test_a_change_is_kept_or_taken_back(before: EpochFigures, after: EpochFigures, kept: bool) -> None:
    was = start(4)
    moved, move = decide(was, before, ROOM)
    assert move is not None
    judged, next_move = decide(moved, after, ROOM)
    if kept:
        assert next_move is None or next_move.kind != "back"
        assert not judged.frozen
        return
    assert next_move is not None
    assert next_move.kind == "back"
    assert (judged.num_workers, judged.prefetch_factor) == (was.num_workers, was.prefetch_factor)
    assert "taken back" in next_move.reason
    assert judged.frozen


def test_it_does_not_swing() -> None:
    up, _ = decide(start(2), figures(100, 40), ROOM)
    _, move = decide(up, figures(60, 0, **queue(8)), ROOM)  # now it is more than enough, by its own doing
    assert move is None
    down, _ = decide(start(8), figures(**queue(8)), ROOM)
    judged, move = decide(replace(down, before=None), figures(100, 40), ROOM)
    assert move is None
    assert "given back" in judged.held


def test_the_third_change_is_judged_too() -> None:
    now, changes = start(1), []
    for measured in (figures(100, 60), figures(80, 40), figures(70, 30), figures(90, 30)):
        now, move = decide(now, measured, Room(usable_cpus=64))
        changes.append(move.kind if move else None)
    assert changes == ["up", "up", "up", "back"]
    assert now.frozen


def test_after_the_third_change_all_stays() -> None:
    now, changes = start(1, 1), []
    for epoch in range(8):  # each change helps, and never enough
        step = 1000 * 0.8**epoch
        now, move = decide(now, figures(step, 0.3 * step), Room(usable_cpus=64))
        changes.append(move is not None)
    assert changes == [True] * 3 + [False] * 5
    assert now.frozen == "3 changes were made"


def test_the_slowest_rank_decides() -> None:
    idle, starved = figures(100, 1, **queue(8)), figures(100, 30, **queue(0))
    assert worst([idle, starved]) is worst([starved, idle]) is starved
    assert worst([figures(**queue(8)), figures(**queue(2))]).queue_ready == 2


# --- whatever is measured ---------------------------------------------------------------------------------------------

share = st.none() | st.floats(0, 100)


@st.composite
def any_figures(draw: st.DrawFn) -> EpochFigures:
    step = draw(st.floats(0.01, 1e4))
    capacity = draw(st.none() | st.floats(0, 64))
    return EpochFigures(
        steps=draw(st.integers(0, 1000)),
        step_ms=step,
        data_idle_ms=step * draw(st.floats(0, 1)),
        queue_ready=None if capacity is None else capacity * draw(st.floats(0, 1)),
        queue_capacity=capacity,
        on_cpu_pct=draw(share),
        run_queue_pct=draw(share),
    )


rooms = st.builds(
    Room,
    usable_cpus=st.integers(1, 128),
    most_in_flight=st.none() | st.integers(0, 500),
    most_workers=st.none() | st.integers(1, 64),
)


@given(st.integers(0, 32), st.integers(1, 8), rooms, st.lists(any_figures(), max_size=20))
def test_three_changes_at_most_then_nothing(
    workers: int, prefetch: int, room: Room, epochs: list[EpochFigures]
) -> None:
    now = start(workers, prefetch)
    made: list[Move] = []
    settings = [(now.num_workers, now.prefetch_factor)]
    for measured in epochs:
        then, move = decide(now, measured, room)
        if now.frozen:
            assert then == now
            assert move is None
        if move is None:
            assert (then.num_workers, then.prefetch_factor) == settings[-1]
        else:
            assert (move.num_workers, move.prefetch_factor) == (then.num_workers, then.prefetch_factor)
            assert (move.num_workers, move.prefetch_factor) != settings[-1]
            if move.kind == "back":
                assert (move.num_workers, move.prefetch_factor) == settings[-2]
                assert then.frozen
            else:
                assert move.num_workers >= 1
                assert move.prefetch_factor is not None
                assert 1 <= move.prefetch_factor <= max(prefetch, MOST_PREFETCH)
            if move.kind == "up":
                assert room.holds(move.num_workers, move.prefetch_factor or 0)
                assert move.num_workers <= max(now.num_workers, 4 * room.usable_cpus)
            made.append(move)
            settings.append((move.num_workers, move.prefetch_factor))
        now = then
    forward = [move.kind for move in made if move.kind != "back"]
    assert len(forward) <= MOST_MOVES
    assert len(set(forward)) <= 1
    assert len(made) - len(forward) <= 1


@given(st.integers(1, 16), st.floats(1, 50), st.floats(0.1, 400), st.integers(1, 64))
def test_a_loader_that_scales_is_fed_in_the_end(workers: int, rest_ms: float, load_ms: float, cpus: int) -> None:
    """Simulated: n workers give a batch every load_ms / n."""
    now = start(workers)
    for _ in range(6):
        step = max(rest_ms, load_ms / min(now.num_workers, cpus))
        busy = 100 * min(1.0, load_ms / now.num_workers / step) * min(1.0, cpus / now.num_workers)
        lacking = 100 * max(0.0, 1 - cpus / now.num_workers) if step > rest_ms else 0.0
        measured = figures(step, step - rest_ms, on_cpu_pct=busy, run_queue_pct=lacking, **queue(0, 8))
        now, _ = decide(now, measured, Room(usable_cpus=cpus))
    best = max(rest_ms, load_ms / cpus)
    assert max(rest_ms, load_ms / min(now.num_workers, cpus)) <= best / 0.94  # under 5 % of waiting is left alone


# --- the change -------------------------------------------------------------------------------------------------------


def made(kind: Any, **options: Any) -> DataLoader[Any]:
    loader: DataLoader[Any] = kind(list(range(12)), **{"batch_size": 2, "num_workers": 1, **options})
    return loader


@pytest.mark.parametrize("kind", [DataLoader, FeedLoader])
def test_kept_workers_end_before_others_start(kind: Any) -> None:
    loader = made(kind, persistent_workers=True)
    list(loader)
    old: Any = loader._iterator
    (worker,) = old._workers
    assert worker.is_alive()
    put_back = reconfigure(loader, 2, 3)
    assert not worker.is_alive()
    batches = torch.cat(list(loader))
    put_back()
    now: Any = loader._iterator
    assert (len(now._workers), now._prefetch_factor) == (2, 3)
    assert batches.tolist() == list(range(12))
    now._shutdown_workers()


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_nothing_is_drawn_that_kept_workers_would_not_have_drawn(generator: torch.Generator | None) -> None:
    drawn = []
    for change in (False, True):
        torch.manual_seed(0)
        if generator is not None:
            generator.manual_seed(0)
        loader = made(DataLoader, persistent_workers=True, shuffle=True, generator=generator)
        list(loader)
        put_back = reconfigure(loader, 2, 2) if change else None
        second = torch.cat(list(loader)).tolist()
        if put_back is not None:
            put_back()
        third = torch.cat(list(loader)).tolist()
        assert loader.generator is generator
        drawn.append((second, third, torch.rand(2, generator=generator).tolist()))
        kept: Any = loader._iterator
        kept._shutdown_workers()
    assert drawn[0] == drawn[1]


def test_workers_that_start_each_epoch_draw_as_before() -> None:
    loader = made(DataLoader)
    own = loader.generator = torch.Generator()
    reconfigure(loader, 2, 2)
    assert loader.generator is own


def test_a_thread_that_reads_ahead_is_ended_first() -> None:
    loader = made(FeedLoader, background=2, persistent_workers=True)
    batches: Any = iter(loader)
    next(batches)
    reconfigure(loader, 2, 2)
    assert batches.background is None
    assert torch.cat(list(loader)).tolist() == list(range(12))
    now: Any = loader._iterator
    now._shutdown_workers()


class OnlyHere:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("a file that belongs to the training process")
        return index


def test_a_worker_is_tried_before_there_are_any() -> None:
    assert why_no_workers(made(DataLoader, num_workers=0, shuffle=True)) == ""
    before = torch.get_rng_state()
    why = why_no_workers(DataLoader(OnlyHere(), 2))  # type: ignore[arg-type]
    assert "a file that belongs to the training process" in why
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_cannot_be_added_where_there_are_none() -> None:
    assert "made for threads" in why_fixed(made(FeedLoader, num_workers=0, workers="thread"))
    assert why_fixed(made(FeedLoader, workers="thread")) == ""
    assert "is no DataLoader" in why_fixed([1, 2])

"""A decoder behind a FeedLoader takes batches ahead, and the loader's order, place and errors stay what they are."""

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from cells import covering
from torch.utils.data import Dataset

from lightning_feed.errors import DecodeError, LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder

SIZE, BATCH = 11, 2  # six batches, the last of one sample


class Numbers(Dataset[int]):
    """Number i at place i."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class AheadDecoder:
    """Doubles batches, of which it takes two ahead; what goes wrong is raised in its place."""

    def __init__(self, undecodable: int | None = None) -> None:
        self.undecodable = undecodable
        self.taken = self.begun = self.closed = 0
        self.held: list[Any] = []

    def run(self, batches: Iterator[Any], under_way: int) -> Generator[Any, None, None]:
        passing = self._run(batches)
        self.held.append(passing)  # so that it is not closed by being garbage
        return passing

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": []}

    def _run(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        self.begun += 1
        ahead: deque[Any] = deque()
        try:
            more = True
            while more or ahead:
                while more and len(ahead) < 3:
                    try:
                        ahead.append(next(batches))
                        self.taken += 1
                    except StopIteration:
                        more = False
                    except Exception as error:  # noqa: BLE001  # raised below, when it is its turn
                        ahead.append(error)
                        more = False
                if not ahead:
                    return
                batch = ahead.popleft()
                if isinstance(batch, Exception):
                    raise batch
                if self.undecodable in batch.tolist():
                    raise DecodeError(f"number {self.undecodable} cannot be decoded")
                yield 2 * batch
        finally:
            self.closed += 1


def made(decode: AheadDecoder | None = None, **options: Any) -> tuple[FeedLoader, AheadDecoder]:
    decode = decode or AheadDecoder()
    options = {"dataset": Numbers(), "batch_size": BATCH, **options}
    return FeedLoader(**options, decode=decode), decode


DOUBLED = [[2 * n for n in range(first, min(first + BATCH, SIZE))] for first in range(0, SIZE, BATCH)]

WORKERS: list[dict[str, Any]] = [
    {},
    {"background": 2},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "workers": "thread"},
    {"num_workers": 2, "workers": "thread", "persistent_workers": True, "background": 1},
]


@covering(options=WORKERS, handed_out=[1, 6])
def test_state_with_a_decoder_counts_batches_handed_out_and_resumes(options: dict[str, Any], handed_out: int) -> None:
    def shuffled(**more: Any) -> tuple[FeedLoader, AheadDecoder]:
        return made(shuffle=True, order=EpochOrder(seed=3, epoch=lambda: 0), **{**options, **more})

    whole = [batch.tolist() for batch in shuffled()[0]]
    assert whole != DOUBLED
    loader, decode = shuffled()
    batches = iter(loader)
    before = [next(batches).tolist() for _ in range(handed_out)]
    state = loader.state_dict()
    assert state["batches"] == handed_out == batches.taken
    if handed_out:
        assert decode.taken == min(handed_out + 2, len(whole))
    loader.close()
    resumed, _ = shuffled()
    resumed.load_state_dict(state)
    after = [batch.tolist() for batch in resumed]
    assert before + after == whole
    resumed.close()


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_closing_mid_epoch_closes_the_decoder_and_ends_its_threads(options: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    loader, decode = made(**options)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert decode.closed == 1
    with pytest.raises(LoaderError, match="closed before its end"):
        next(batches)
    assert [batch.tolist() for batch in loader] == DOUBLED
    loader.close()
    loader._iterator = None  # what Lightning does at the end of a fit
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("feed")} == set()


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_decoder_error_ends_the_pass_and_the_next_one_is_complete(options: dict[str, Any]) -> None:
    loader, decode = made(AheadDecoder(undecodable=4), **options)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == DOUBLED[:2]
    with pytest.raises(DecodeError, match="number 4 cannot be decoded"):
        next(batches)
    assert loader.state_dict()["batches"] == 2
    decode.undecodable = None
    assert [batch.tolist() for batch in loader] == DOUBLED
    loader.close()


def test_background_thread_ends_even_if_the_decoder_fails_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a generator that another thread is waiting in."""

    class Busy:
        def __init__(self, batches: Any) -> None:
            self._batches = batches

        def __next__(self) -> Any:
            return next(self._batches)

        def close(self) -> None:
            raise ValueError("generator already executing")

    loader, decode = made(background=2)
    monkeypatch.setattr(type(decode), "run", lambda self, batches, under_way: Busy(batches))
    batches = iter(loader)
    next(batches)
    background = batches.background
    with pytest.raises(ValueError, match="already executing"):
        batches.close()
    assert background is not None
    assert not background.thread.is_alive()

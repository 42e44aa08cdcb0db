"""The worker's side of iterable datasets, driven by hand as torch's fetcher drives it, without a DataLoader."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from lightning_feed.load.iterable import IterablePass, StampingCollate


class Numbers(IterableDataset):
    """Without a state."""

    def __init__(self, size):
        self.size = size
        self.drawn = 0

    def __iter__(self):
        for i in range(self.size):
            self.drawn += 1
            yield i


class Seeking(Numbers):
    """A state on the dataset, which begins again when it has come to its end."""

    def __init__(self, size):
        super().__init__(size)
        self.at = 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            self.drawn += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class SeekingIterator(Numbers):
    """A state on the iterator."""

    def __iter__(self):
        return _Seeker(self.size)


class _Seeker:
    def __init__(self, size):
        self.size, self.at = size, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Both(SeekingIterator):
    """A state on the dataset, and on the iterator, which counts more."""

    def __init__(self, size):
        super().__init__(size)
        self.loaded = None

    def state_dict(self):
        return {"of": "dataset"}

    def load_state_dict(self, state):
        self.loaded = state


def fetch_all(now: IterablePass, dataset, *, batch_size, drop_last=False, collate=list):
    """Batches and the state after each, as torch's fetcher and the loader make them in the main process."""
    wrapped = now.dataset(dataset, batch_size)
    stamping = StampingCollate(collate, wrapped)
    draws, batches, states, ended = iter(wrapped), [], [], False
    while not ended:
        samples = []
        while len(samples) < (batch_size or 1):
            try:
                samples.append(next(draws))
            except StopIteration:
                ended = True
                break
        if not samples or (drop_last and ended):
            break
        item = stamping(samples if batch_size else samples[0])
        if not item.skip:
            batches.append(now.hand_out(item))
            states.append(copy.deepcopy({"batches": now.batches, **now.state()}))
    return batches, states


def start(resume=None, num_workers=0):
    return IterablePass(None, num_workers=num_workers, epoch=0, cycle=0, resume=resume)


@given(
    kind=st.sampled_from([Numbers, Seeking, SeekingIterator, Both]),
    size=st.integers(0, 12),
    batch_size=st.sampled_from([None, 1, 3, 4]),
    drop_last=st.booleans(),
)
def test_going_on_after_any_batch_gives_the_rest(kind, size, batch_size, drop_last):
    drop_last = drop_last and batch_size is not None
    collate = list if batch_size else (lambda sample: sample)
    options = {"batch_size": batch_size, "drop_last": drop_last, "collate": collate}
    whole, states = fetch_all(start(), kind(size), **options)
    for state in states:
        rest, later = fetch_all(start(state), kind(size), **options)
        assert rest == whole[state["batches"] :]
        assert [s["batches"] for s in later] == [s["batches"] for s in states[state["batches"] :]]


def test_dataset_and_iterator_are_restored_in_the_order_of_torchdata():
    _, states = fetch_all(start(), Both(9), batch_size=3)
    assert states[0]["workers"] == {
        0: {"drawn": 3, "ended": False, "iterator": {"at": 3}, "dataset": {"of": "dataset"}}
    }
    dataset = Both(9)
    assert fetch_all(start(states[0]), dataset, batch_size=3)[0] == [[3, 4, 5], [6, 7, 8]]
    assert dataset.loaded == {"of": "dataset"}


def test_a_dataset_that_is_its_own_iterator_is_saved_once():
    class Own(_Seeker, IterableDataset):
        pass

    _, states = fetch_all(start(), Own(5), batch_size=2)
    assert states[0]["workers"][0]["dataset"] is None
    assert fetch_all(start(states[0]), Own(5), batch_size=2)[0] == [[2, 3], [4]]


def test_a_dataset_that_began_again_after_a_short_last_batch_yields_nothing_more():
    whole, states = fetch_all(start(), Seeking(5), batch_size=2)
    assert whole[-1] == [4]
    assert states[-1]["workers"][0]["dataset"] == {"at": 0}  # its state alone would begin the epoch again
    assert fetch_all(start(states[-1]), Seeking(5), batch_size=2)[0] == []


class Returning(Numbers):
    """Goes to the state that was loaded in each pass, as those of Hugging Face do."""

    __module__ = "datasets.iterable_dataset"
    began = at = 0

    def __iter__(self):
        for number in range(self.began, self.size):
            self.at = number + 1
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.began = state["at"]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_dataset_that_returns_to_its_place_begins_its_next_epoch_at_the_beginning(persistent):
    _, states = fetch_all(start(), Returning(5), batch_size=2)
    data = Returning(5)
    wrapped = start(states[0]).dataset(data, 2)
    assert list(wrapped) == [2, 3, 4]
    wrapped = wrapped if persistent else start().dataset(data, 2)
    assert list(wrapped) == [0, 1, 2, 3, 4]
    assert list(wrapped) == [0, 1, 2, 3, 4]


def test_a_state_that_cannot_be_pickled_does_not_end_the_run():
    class Open(Seeking):
        def state_dict(self):
            return {"file": (i for i in ())}

    now = start()
    assert fetch_all(now, Open(3), batch_size=2)[0] == [[0, 1], [2]]
    assert not now.exact


def test_a_fault_in_the_datasets_state_is_not_hidden():
    class Wrong(Seeking):
        def state_dict(self):
            raise TypeError("a fault of the user's")

    with pytest.raises(TypeError, match="fault of the user"):
        fetch_all(start(), Wrong(3), batch_size=2)


def test_a_state_is_that_of_its_batch_however_the_dataset_goes_on():
    class Living(Seeking):
        def state_dict(self):
            return self.__dict__

        def load_state_dict(self, state):
            self.__dict__.update(state)

    whole, states = fetch_all(start(), Living(6), batch_size=2)
    assert [s["workers"][0]["dataset"]["at"] for s in states] == [2, 4, 6]
    assert fetch_all(start(states[0]), Living(6), batch_size=2)[0] == whole[1:]

"""X7: constant samples in the place of the data set, under the user's own collate function and workers."""

import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from watch.experiments.made_data import Images, Slow, Stream

from lightning_feed.errors import LoaderError
from lightning_feed.load.rounds import RoundLimits
from lightning_feed.watch.experiments.null_dataset import NullDataset, NullStream, measure_ceiling
from lightning_feed.watch.experiments.subject import Part, record_sample

FAST = RoundLimits(min_s=0.0, max_s=30)


class Dicts(Dataset[Any]):
    scale = 3

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((3, 4), index), "drop": "path"}

    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("the original was asked for a whole batch")


def pop_and_collate(samples: list[Any]) -> Any:
    for sample in samples:
        sample.pop("drop")
    return default_collate(samples)


def wants_the_data_set(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.dataset.scale == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_functions_and_worker_inits_get_what_they_are_used_to(workers: int) -> None:
    loader = DataLoader(
        Dicts(), batch_size=4, num_workers=workers, collate_fn=pop_and_collate, worker_init_fn=wants_the_data_set
    )
    part = Part("", loader)
    sample = record_sample(part)
    assert measure_ceiling((part,), [sample], FAST).batches_per_s > 0
    assert set(sample) == {"image", "drop"}


def test_it_has_the_length_and_the_shapes_of_the_original() -> None:
    null = pickle.loads(pickle.dumps(NullDataset(Dicts()[5], Dicts())))
    assert len(null) == 12
    assert torch.equal(null[0]["image"], null[11]["image"])
    assert null[0] is not null[0]
    assert not hasattr(null, "__getitems__")
    with pytest.raises(AttributeError):
        null.nothing  # noqa: B018


def test_streams_do_not_end_and_have_no_state() -> None:
    class Stateful(Stream):
        def state_dict(self) -> dict[str, int]:
            return {}

    null = NullStream(7, Stateful())
    assert list(islice(null, 100)) == [7] * 100
    assert not hasattr(null, "state_dict")
    assert null.size == 60


def test_the_ceiling_does_without_the_data_sets_own_work() -> None:
    slow = Slow(0.003)
    part = Part("", DataLoader(Images(slow), batch_size=4))
    sample = record_sample(part)
    assert measure_ceiling((part,), [sample], RoundLimits(min_s=0.05, max_s=30)).batches_per_s > 2 / (4 * 0.003)


def test_a_sample_that_never_comes_is_named() -> None:
    import threading

    never = threading.Event()

    class Hanging(Images):
        def __getitem__(self, index: int) -> Any:
            never.wait(30)

    try:
        with pytest.raises(LoaderError, match=r"Sample 0 of the data set \(Hanging\) was not there after 0.2 s"):
            record_sample(Part("", DataLoader(Hanging())), max_s=0.2)
    finally:
        never.set()

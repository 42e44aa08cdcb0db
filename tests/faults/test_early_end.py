"""StopIteration out of a dataset is an error, not the end of the epoch."""

from typing import Any

import pytest
from torch.utils.data import Dataset

from lightning_feed.errors import LoaderError
from lightning_feed.load.loader import FeedLoader


class Ends(Dataset[int]):
    """A dataset that calls ``next()`` on something that is used up at sample 11."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 11:
            next(iter(()))
        return index


class Short:
    """A sampler that gives less than it says."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        return iter(range(10))


MODES: list[dict[str, Any]] = [
    {},
    {"background": 2},
    {"num_workers": 2},
    {"num_workers": 2, "background": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "in_order": False},
    {"num_workers": 2, "workers": "thread"},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_stop_iteration_in_a_dataset_is_raised_as_loader_error(options: dict[str, Any]) -> None:
    batches = iter(FeedLoader(Ends(), batch_size=4, **options))
    came = []
    with pytest.raises(LoaderError, match="StopIteration") as error:  # noqa: PT012  # the batches before it are good
        for batch in batches:
            came.append(batch.tolist())
    if options.get("in_order", True):
        assert came == [[0, 1, 2, 3], [4, 5, 6, 7]]
    if "num_workers" not in options:
        assert "[8, 9, 10, 11]" in str(error.value)
    elif "workers" not in options:
        assert "DataLoader worker process" in str(error.value)
    with pytest.raises(LoaderError, match="StopIteration"):
        next(batches)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_sampler_that_ends_early_ends_the_epoch(options: dict[str, Any]) -> None:
    loader = FeedLoader(Ends(), batch_size=4, sampler=Short(), **options)
    assert sum(len(batch) for batch in loader) == 10

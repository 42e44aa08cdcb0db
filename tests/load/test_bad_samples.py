"""Samples that cannot be read: named, replaced, counted over workers, and too many of them end the run."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.collate import BadSamples, fill_skipped


class Breakable(Dataset[Any]):
    """Numbers, of which some cannot be read."""

    def __init__(self, size: int, broken: set[int], bad_samples: BadSamples) -> None:
        self.size, self.broken, self.bad_samples = size, broken, bad_samples

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> int:
        if index in self.broken:
            raise DatasetError(f"number {index} is broken.")
        return index

    def __getitem__(self, index: int) -> Any:
        try:
            return self.read(index)
        except DatasetError as error:
            return self.bad_samples.instead(index, error, self.size, self.read)


def batches(dataset: Breakable, workers: int = 0, start_method: str | None = None) -> list[list[int]]:
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=workers,
        collate_fn=fill_skipped,
        multiprocessing_context=start_method,
    )
    return list(loader)


def test_on_error_raise_propagates_the_dataset_error() -> None:
    dataset = Breakable(8, {5}, BadSamples())
    with pytest.raises(DatasetError, match="number 5 is broken"):
        batches(dataset)
    assert dataset.bad_samples.failures == 0


def test_on_error_skip_repeats_readable_samples_of_the_batch() -> None:
    assert batches(Breakable(8, {1, 2, 7}, BadSamples("skip"))) == [[0, 0, 3, 3], [4, 5, 6, 4]]


def test_on_error_skip_fails_when_no_sample_of_a_batch_is_readable() -> None:
    with pytest.raises(DatasetError, match=r"None of the 4 samples of a batch could be read \(samples 4, 5, 6, 7\)"):
        batches(Breakable(8, {4, 5, 6, 7}, BadSamples("skip")))


def test_on_error_substitute_loads_another_readable_sample() -> None:
    found = batches(Breakable(8, {1, 2, 7}, BadSamples("substitute")))
    assert [len(batch) for batch in found] == [4, 4]
    flat = [number for batch in found for number in batch]
    assert not set(flat) & {1, 2, 7}
    assert [number for index, number in enumerate(flat) if index not in (1, 2, 7)] == [0, 3, 4, 5, 6]


def test_on_error_substitute_raises_the_first_error_if_none_is_readable() -> None:
    with pytest.raises(DatasetError, match="number 0 is broken"):
        batches(Breakable(3, {0, 1, 2}, BadSamples("substitute")))


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_exceeding_max_failures_raises_an_error(on_error: Any) -> None:
    dataset = Breakable(12, {1, 5, 9}, BadSamples(on_error, max_failures=2))
    with pytest.raises(DatasetError, match=r"3 samples could not be read .max_failures=2.*number 9 is broken"):
        batches(dataset)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_failures_in_workers_are_counted_in_the_main_process(start_method: str) -> None:
    dataset = Breakable(16, {1, 6, 11}, BadSamples("skip"))
    assert batches(dataset, workers=2, start_method=start_method)[0] == [0, 0, 2, 3]
    assert dataset.bad_samples.failures == 3


def test_max_failures_applies_to_all_workers_together() -> None:
    dataset = Breakable(16, {1, 5, 9, 13}, BadSamples("skip", max_failures=3))
    with pytest.raises(DatasetError, match="max_failures=3"):
        batches(dataset, workers=2)


@pytest.mark.parametrize("given", [{"on_error": "ignore"}, {"max_failures": -1}, {"max_failures": True}])
def test_invalid_policies_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(given))):
        BadSamples(**given)

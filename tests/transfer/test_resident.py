"""A set on the device: the batches of a plain loader, in its order, with nothing done for each sample."""

import logging
import pickle
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_feed.errors import DatasetError, LoaderError, SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.transfer import resident
from lightning_feed.transfer.resident import (
    ResidentData,
    ResidentLoader,
    free_device_bytes,
    load_resident,
)

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["image", "label"])

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),  # there is nothing for them to do
    # ddp_fork forks beside the threads of other tests.
    pytest.mark.filterwarnings("ignore:.*use of fork.* may lead to deadlocks:DeprecationWarning"),
]


class Rows(Dataset[Any]):
    """Sample i in any form; it counts how often it was asked."""

    def __init__(self, size: int, form: Callable[[int], Any] | None = None) -> None:
        self.size = size
        self.form = form or (lambda index: (torch.full((2, 3), index, dtype=torch.uint8), index))
        self.calls: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.calls[index] += 1
        return self.form(index)


class Pictures(Dataset[Any]):
    """Random samples, but fixed ones to keep."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), index

    def sample_to_keep(self, index: int) -> Any:
        return torch.full((4, 4, 3), index, dtype=torch.uint8).permute(2, 0, 1), index


def _same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), list(right.values())
    if isinstance(left, (list, tuple)):
        for one, other in zip(left, right, strict=True):
            _same(one, other)
    else:
        assert left.dtype == right.dtype
        assert left.stride() == right.stride()
        assert torch.equal(left, right)


FORMS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda index: torch.full((3,), index, dtype=torch.float16),
    "array": lambda index: np.full((2, 2), index, dtype=np.int16),
    "pair": lambda index: (torch.full((3, 4), index, dtype=torch.uint8), index),
    "named": lambda index: Pair(torch.tensor(index), index % 2 == 0),
    "nested": lambda index: {"x": [torch.tensor([index]), (float(index), np.float32(index))], "y": index},
    "empty": lambda index: (torch.zeros(0), index),
}


# --- equal to the obvious way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("drop_last", [False, True])
def test_resident_batches_equal_those_of_a_plain_dataloader(form: Callable[[int], Any], drop_last: bool) -> None:
    rows = Rows(23, form)
    data = load_resident(rows, device=CPU)
    ours = ResidentLoader(data, batch_size=5, drop_last=drop_last)
    plain = DataLoader(rows, batch_size=5, drop_last=drop_last)
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        _same(one, other)


def test_samples_are_read_only_while_the_dataset_is_loaded() -> None:
    rows = Rows(23)
    data = load_resident(rows, device=CPU)
    asked = Counter(rows.calls)
    assert set(asked) == set(range(23))
    assert max(asked.values()) <= 3, "the first for its shape, eight for the size, all for the rows"
    for _ in range(3):
        list(ResidentLoader(data, batch_size=5, shuffle=True))
    assert rows.calls == asked


def test_channels_last_batches_stay_channels_last() -> None:
    def collate(samples: list[Any]) -> Tensor:
        return torch.stack(samples).permute(0, 3, 1, 2)

    rows = Rows(9, lambda index: torch.full((4, 6, 3), index, dtype=torch.uint8))
    data = load_resident(rows, device=CPU, collate_fn=collate)
    for ours, plain in zip(ResidentLoader(data, batch_size=4), DataLoader(rows, 4, collate_fn=collate), strict=True):
        assert ours.is_contiguous(memory_format=torch.channels_last)
        _same(ours, plain)


@given(size=st.integers(1, 40), batch_size=st.integers(1, 12), chunk=st.integers(1, 50))
@settings(deadline=None, max_examples=30)
def test_datasets_of_any_size_load_in_chunks_of_any_size(size: int, batch_size: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "_MOST_IN_CHUNK", chunk)
        data = load_resident(Rows(size), device=CPU)
    labels = torch.cat([labels for _, labels in ResidentLoader(data, batch_size=batch_size)])
    assert labels.tolist() == list(range(size))
    assert data.stored_bytes == size * (6 + 8)


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_worker_processes_and_threads_can_load_a_dataset(workers: str) -> None:
    data = load_resident(Rows(20), device=CPU, reading={"num_workers": 2, "workers": workers})
    assert [int(data[index][1]) for index in range(20)] == list(range(20))


def test_samples_are_kept_without_augmentation_where_the_dataset_can(caplog: pytest.LogCaptureFixture) -> None:
    pictures = Pictures(6)
    both = ConcatDataset([Subset(pictures, [5, 3]), Pictures(4)])
    data = load_resident(both, device=CPU)
    images, labels = next(iter(ResidentLoader(data, batch_size=6)))
    assert images.shape == (6, 3, 4, 4)
    assert labels.tolist() == [5, 3, 0, 1, 2, 3] == images[:, 0, 0, 0].tolist()
    assert caplog.text == ""


def test_indexing_returns_single_samples_and_rejects_bad_indices() -> None:
    data = load_resident(Rows(5), device=CPU)
    image, label = data[-1]
    assert label.item() == 4
    assert torch.equal(image, torch.full((2, 3), 4, dtype=torch.uint8))
    with pytest.raises(IndexError, match="no sample 5 among 5"):
        data[5]


# --- order --------------------------------------------------------------------------------------------------------


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from (0, 2, 1)


def test_an_endless_sampler_is_drawn_one_batch_at_a_time() -> None:
    data = load_resident(Rows(3), device=CPU)
    batches = iter(ResidentLoader(data, batch_size=4, sampler=_Endless()))
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 2, 1, 0], [2, 1, 0, 2]]


def test_a_custom_batch_sampler_is_followed() -> None:
    data = load_resident(Rows(9), device=CPU)

    class Pairs(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([index, 8 - index] for index in range(4))

    loader = ResidentLoader(data, batch_sampler=Pairs(SequentialSampler(data), 2, drop_last=False))
    assert [labels.tolist() for _, labels in loader] == [[0, 8], [1, 7], [2, 6], [3, 5]]


def test_a_sampler_with_an_index_out_of_range_is_reported() -> None:
    data = load_resident(Rows(3), device=CPU)
    with pytest.raises(LoaderError, match="returned indices from 1 to 3, but the dataset has 3 samples"):
        next(iter(ResidentLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, 3]))))


def test_order_and_resuming_match_those_of_a_feed_loader() -> None:
    rows = Rows(17)
    epoch = [0]
    data = load_resident(rows, device=CPU)

    def loader(kind: Any, dataset: Any) -> Any:
        order = EpochOrder(seed=3, epoch=lambda: epoch[0])
        return kind(dataset, batch_size=4, sampler=RandomSampler(dataset), order=order)

    ours = loader(ResidentLoader, data)
    plain = loader(FeedLoader, rows)
    orders = []
    for epoch[0] in range(2):
        orders.append([labels.tolist() for _, labels in ours])
        assert orders[-1] == [labels.tolist() for _, labels in plain]
    assert orders[0] != orders[1]

    epoch[0] = 2
    begun = iter(ours)
    next(begun)
    next(begun)
    resumed = loader(ResidentLoader, data)
    resumed.load_state_dict(pickle.loads(pickle.dumps(ours.state_dict())))
    whole = [labels.tolist() for _, labels in plain]
    assert [labels.tolist() for _, labels in resumed] == whole[2:] == [labels.tolist() for _, labels in begun]


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    with pytest.raises(DatasetError, match="here Stream"):
        load_resident(Stream(), device=CPU)


# --- several ranks ----------------------------------------------------------------------------------------------


class _Seen(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def train_dataloader(self) -> ResidentLoader:
        data = load_resident(Rows(16), device=self.device)
        return ResidentLoader(data, batch_size=3, sampler=RandomSampler(data))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, label = batch
        assert torch.equal(image[:, 0, 0].long(), label)
        of_ranks: list[list[int]] = [[], []]
        torch.distributed.all_gather_object(of_ranks, label.tolist())
        self.seen = [*getattr(self, "seen", []), *of_ranks[0], *of_ranks[1]]
        return self.layer(image.flatten(1).float()).mean()

    def on_train_epoch_end(self) -> None:
        assert sorted(self.seen) == list(range(16))
        if self.current_epoch:
            assert self.seen != self.before
        self.before, self.seen = self.seen, []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_rebuilds_a_resident_loader_for_two_ranks() -> None:
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, barebones=True)
    trainer.fit(_Seen())
    assert trainer.state.finished


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_dataset_too_large_for_the_device_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(1000, lambda index: torch.zeros(1 << 20, dtype=torch.uint8))
    words = r"needs 1000 MiB on cpu, for 1000 samples of 1048576 bytes each, but only 80% of the 1200 MiB free"
    monkeypatch.setattr(resident, "free_device_bytes", lambda device: 1200 << 20)
    with pytest.raises(SettingsError, match=words):
        load_resident(rows, device=CPU)
    assert sum(rows.calls.values()) <= 9
    monkeypatch.setattr(resident, "free_device_bytes", lambda device: None)
    assert load_resident(Rows(50), device=CPU).stored_bytes == 700


def test_free_device_bytes_knows_the_host_and_not_a_meta_device() -> None:
    free = free_device_bytes(CPU)
    assert free is None or free > 1 << 20
    assert free_device_bytes(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            lambda i: (torch.zeros(2 + (i == 9)), i),
            r"Sample 9 .* at sample\[0\] it has float32 \(3,\), not float32 \(2,\)",
        ),
        (lambda i: {"x": torch.zeros(2, dtype=torch.int8 if i == 9 else torch.uint8)}, r"Sample 9 .*\['x'\] .* int8"),
        (lambda i: [i, i] if i == 9 else [i], r"Sample 9 .*\[1\] it has a int, not nothing"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_of_another_shape_or_dtype_is_reported_by_index(
    form: Callable[[int], Any], words: str, num_workers: int
) -> None:
    with pytest.raises(DatasetError, match=words):
        load_resident(Rows(12, form), device=CPU, reading={"num_workers": num_workers})


@pytest.mark.parametrize("leaf", ["text", None, np.array([object()]), np.array(["text"])])
def test_values_that_cannot_be_on_a_device_are_reported_by_path(leaf: Any) -> None:
    with pytest.raises(DatasetError, match=rf"Sample 0 has a {type(leaf).__name__} at sample\['name'\]"):
        load_resident(Rows(3, lambda index: {"image": torch.zeros(2), "name": leaf}), device=CPU)


@pytest.mark.parametrize(
    ("collate", "words"),
    [(lambda samples: samples, "a int at batch"), (lambda samples: torch.zeros(2, 2), r"\(2, 2\) at batch")],
)
def test_a_collate_without_one_row_per_sample_is_refused(collate: Callable[[list[Any]], Any], words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        load_resident(Rows(12, lambda index: index), device=CPU, collate_fn=collate)


def test_keeping_possibly_augmented_samples_on_the_device_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_resident(Subset(Rows(3), [0, 1]), device=CPU)
    assert "The samples of Rows are kept on the device as they are now" in caplog.text
    caplog.clear()
    load_resident(TensorDataset(torch.zeros(3)), device=CPU)
    assert caplog.text == ""


@pytest.mark.gpu(
    twin="simulated/test_images_and_resident_data.py::test_a_resident_dataset_is_gathered_on_the_device_and_copied_once"
)
def test_batches_on_cuda_are_gathered_without_synchronization() -> None:
    device = torch.device("cuda", 0)
    rows = Rows(64)
    data = load_resident(rows, device=device)
    loader: ResidentLoader = ResidentLoader(data, batch_size=7, sampler=RandomSampler(data, generator=_seeded(1)))
    plain = DataLoader(rows, batch_size=7, sampler=RandomSampler(rows, generator=_seeded(1)))  # type: ignore[arg-type]
    for (images, labels), (expected, numbers) in zip(loader, plain, strict=True):
        assert images.device == device
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(labels.cpu(), numbers)
    torch.cuda.synchronize(device)
    batches = iter(loader)
    next(batches)
    try:
        torch.cuda.set_sync_debug_mode("error")
        given = [labels for _, labels in batches]
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):  # the control
            given[0].cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(data, ResidentData)

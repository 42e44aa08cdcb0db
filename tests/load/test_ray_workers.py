"""Ray workers: the batches of a DataLoader, random numbers, errors, lost actors, clean ends."""

import os
import pickle
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.data import _update_dataloader
from recording import Numbers, Recording, quiet_trainer
from resuming import assert_resumes_exactly
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_feed import FastDataModule
from lightning_feed.errors import DatasetError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load import ray_workers
from lightning_feed.load.background import Watch
from lightning_feed.load.collate import BadSamples, fill_skipped
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.random_state import sample_generator
from lightning_feed.load.settings import LoaderSettings, RayCluster

import ray  # isort: skip

for _name in (__name__, Numbers.__module__):  # actors cannot import test files
    ray.cloudpickle.register_pickle_by_value(sys.modules[_name])
SIZE = 23
pytestmark = [
    pytest.mark.slow,  # starting Ray and its actors
    # Ray 2.60 leaves these to garbage collection when it starts its own processes, and when it is shut down.
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]


class Rows(Dataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Whole(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noisy(Rows):
    """As our recipes draw, and as users' datasets do."""

    def __getitem__(self, index):
        own = torch.rand((), generator=sample_generator()).item()
        return index, own, torch.rand(()).item(), random.random(), float(np.random.rand())


def as_list(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_list(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def on_ray(dataset, *, num_workers=2, **options):
    return FeedLoader(dataset, num_workers=num_workers, workers=RayCluster(), **options)


def epochs(loader, count=2):
    return [[as_list(batch) for batch in loader] for _ in range(count)]


def order(epoch=0):
    return EpochOrder(seed=8, epoch=lambda: epoch)


def wait_until(true, most_s=20):
    until = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture(scope="module", autouse=True)
def _one_ray():
    """One Ray for all tests, and actors that are kept between them: both take seconds to start."""
    kept = on_ray(Rows(2), persistent_workers=True)
    list(kept)
    yield
    kept._iterator = None
    ray.shutdown()


# --- the contract ---------------------------------------------------------------------------------------------------

KINDS = {
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "users_generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 5, False)},
    "uneven": lambda: {"batch_sampler": [[3], [1, 2, 3], (4, 5), torch.tensor([6, 7]), range(2)]},
    "unbatched": lambda: {"batch_size": None, "shuffle": True},
    "collate": lambda: {"batch_size": 4, "collate_fn": lambda samples: {"sum": sum(map(int, samples))}},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(range(SIZE), 2, 1)},
}


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_batches_are_those_of_a_dataloader(number):
    kind, dataset = list(KINDS)[number], (Rows, Whole)[number % 2]
    options = [{}, {"background": 2}, {"persistent_workers": True}][number % 3]
    torch.manual_seed(7)
    plain = epochs(DataLoader(dataset(), **KINDS[kind]()))
    torch.manual_seed(7)
    ours = epochs(on_ray(dataset(), **KINDS[kind](), **options))
    same = 1 if "persistent_workers" in options else 2  # torch seeds persistent workers once, and draws less from then
    assert ours[:same] == plain[:same]


def test_tensors_keep_their_layout_and_can_be_written_to():
    def collate(samples):
        images = torch.arange(96.0).view(2, 3, 4, 4)
        return {
            "last": images.to(memory_format=torch.channels_last),
            "strided": torch.eye(4)[:, ::2],
            "none": torch.empty(0, 3),
            "true": torch.tensor(True),
            "small": torch.ones(3, dtype=torch.bfloat16),
            "complex": torch.ones(2, dtype=torch.complex64),
            "array": np.arange(5),
            "name": "a",
        }

    (batch,) = on_ray(Rows(2), batch_size=2, collate_fn=collate)
    plain = collate(None)
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert batch[name].dtype == value.dtype
            assert torch.equal(batch[name], value)
            batch[name].zero_()
    assert batch["last"].is_contiguous(memory_format=torch.channels_last)
    assert (batch["array"].tolist(), batch["name"]) == ([0, 1, 2, 3, 4], "a")
    batch["array"][0] = 7


def test_out_of_order_all_batches_come(tmp_path):
    class Blocked(Rows):
        def __getitem__(self, index):
            while index == 2 and not (tmp_path / "free").exists():
                time.sleep(0.01)
            return index

    seen = []
    for batch in on_ray(Blocked(), batch_size=4, in_order=False):
        seen.append(batch.tolist())
        (tmp_path / "free").touch()
    whole = [list(range(at, min(at + 4, SIZE))) for at in range(0, SIZE, 4)]
    assert seen[0] != whole[0]
    assert sorted(seen) == whole


def test_several_passes_at_a_time():
    loader = on_ray(Rows(), batch_size=4)
    both = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert both == [(batch, batch) for (batch, _) in both]
    assert len(both) == 6


def test_no_more_is_loaded_ahead_than_said(tmp_path):
    class Noting(Rows):
        def __getitem__(self, index):
            (tmp_path / str(index)).touch()
            return index

    for taken, _ in enumerate(on_ray(Noting(60), batch_size=4, prefetch_factor=1), 1):
        assert len(list(tmp_path.iterdir())) - 4 * taken <= 4 * 2


def test_what_is_ahead_takes_no_more_of_the_object_store_than_its_share(monkeypatch):
    class Large(Rows):
        def __getitem__(self, index):
            return torch.zeros(1 << 20, dtype=torch.uint8)

    store = ray.cluster_resources()["object_store_memory"]
    monkeypatch.setattr(ray_workers, "STORE_SHARE", 3.5 * (1 << 20) / store)
    batches = iter(on_ray(Large(20), batch_size=None, prefetch_factor=4))
    most = 0
    for taken, _ in enumerate(batches):
        source = batches.source
        if taken:  # the first batch tells how large they are
            most = max(most, len(source._running) + len(source._made) if source is not None else 0)
    assert (taken, most) == (19, 3)


# --- random numbers -------------------------------------------------------------------------------------------------


def test_what_is_drawn_does_not_depend_on_the_actors():
    runs = [
        epochs(on_ray(Noisy(), num_workers=actors, batch_size=4, shuffle=True, order=order(), **options))
        for actors, options in ((1, {}), (2, {"background": 2, "prefetch_factor": 5}))
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]  # another cycle of the same epoch
    drawn = [number for batch in runs[0][0] for part in batch[1:] for number in part]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("seeded", [True, False])
def test_what_is_drawn_is_the_same_after_a_resume(seeded):
    def make():
        return on_ray(Noisy(), batch_size=4, order=order() if seeded else None, shuffle=True)

    torch.manual_seed(7)
    loader = make()
    whole, states = [], []
    for batch in loader:
        whole.append(as_list(batch))
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    for at in (0, len(whole) - 2):
        torch.manual_seed(at)
        resumed = make()
        resumed.load_state_dict(states[at])
        assert [as_list(batch) for batch in resumed] == whole[at + 1 :]


def test_ranks_have_numbers_of_their_own(monkeypatch):
    def on_rank(rank):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        return epochs(on_ray(Noisy(), batch_size=4, order=order()))

    assert on_rank(0) != on_rank(1)


def test_the_training_goes_on_drawing_its_own_numbers():
    def run(dataset, **options):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        loader = FeedLoader(dataset, batch_size=4, shuffle=True, order=order(), **options)
        return [(torch.rand(2).tolist(), random.random(), np.random.rand()) for _ in loader]

    assert run(Noisy(), workers=RayCluster(), num_workers=2) == run(Rows())


# --- errors ---------------------------------------------------------------------------------------------------------


class Failing(Rows):
    def __init__(self, error, at=(9, 10, 11)):
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, index):
        if index in self.at:
            raise self.error
        return super().__getitem__(index)


class TwoWords(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


@pytest.mark.parametrize("background", [0, 2])
def test_an_error_names_the_worker_and_the_index(background):
    batches = iter(on_ray(Failing(KeyError("no picture")), batch_size=4, background=background))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    words = r"(?s)Caught KeyError in Ray worker \d, at index 9 of .*__getitem__.*no picture"
    with pytest.raises(KeyError, match=words):
        next(batches)
    with pytest.raises(LoaderError, match="ended with KeyError"):
        next(batches)


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (TwoWords("a", "b"), RuntimeError, "Caught TwoWords in Ray worker .*at index 9"),
        (SystemExit(3), SystemExit, "Caught SystemExit in Ray worker .*at index 9"),
        (StopIteration(), LoaderError, "StopIteration was raised in Ray worker .*index 9"),
    ],
)
def test_errors_of_any_kind(error, raised, words):
    with pytest.raises(raised, match=f"(?s){words}"):
        epochs(on_ray(Failing(error), batch_size=4))


def test_an_error_in_the_collate_function_names_the_samples():
    def collate(samples):
        raise ValueError("does not fit")

    with pytest.raises(ValueError, match=r"(?s)putting together the samples of index \[0, 1, 2, 3\].*does not fit"):
        epochs(on_ray(Rows(), batch_size=4, collate_fn=collate))


class Partly(Rows):
    """As our image datasets treat bad samples."""

    def __init__(self, bad_samples, bad=(1, 6, 7)):
        super().__init__(12)
        self.bad_samples, self.bad = bad_samples, bad

    def __getitem__(self, index):
        try:
            return self.read(index)
        except DatasetError as error:
            return self.bad_samples.instead(index, error, self.size, self.read)

    def read(self, index):
        if index in self.bad:
            raise DatasetError(f"sample {index} is torn")
        return index


def test_bad_samples_are_counted_over_all_actors(caplog):
    bad = BadSamples("skip", max_failures=5)
    loader = on_ray(Partly(bad), batch_size=4, collate_fn=fill_skipped)
    assert list(loader) == [[0, 0, 2, 3], [4, 5, 4, 5], [8, 9, 10, 11]]
    assert bad.failures == 3
    assert caplog.text.count("is torn on_error='skip'") == 3
    with pytest.raises(DatasetError, match="6 samples could not be read, and max_failures=5"):
        list(loader)


def test_a_dataset_that_does_not_pickle():
    held = Rows()
    held.lock = lock = threading.Lock()
    with pytest.raises(LoaderError, match=r"cannot be given the dataset .*pickled: cannot pickle '_thread.lock"):
        iter(on_ray(held))
    with pytest.raises(LoaderError, match="cannot be given the collate_fn"):
        iter(on_ray(Rows(), collate_fn=lambda samples: (lock, samples)))


def test_a_full_object_store(monkeypatch):
    def refuse(thing):
        raise ray.exceptions.OutOfDiskError("Local disk is full")

    monkeypatch.setattr(ray, "put", refuse)
    with pytest.raises(LoaderError, match="The dataset Rows does not fit into the object store"):
        iter(on_ray(Rows()))


def test_a_dataset_that_cannot_be_read_in_an_actor():
    class Unreadable(Rows):
        def __reduce__(self):
            return os.fspath, (3,)

    with pytest.raises(LoaderError, match=r"(?s)could not make batch 0, at \[0, 1\].*All nodes need what"):
        list(on_ray(Unreadable(), batch_size=2))


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-feed\[ray\]'"):
        iter(on_ray(Rows()))


def test_another_cluster_than_the_one_in_use():
    with pytest.raises(LoaderError, match=r"uses the Ray cluster at .* already, and ray_address='10.0.0.9:6379' is"):
        iter(FeedLoader(Rows(), num_workers=1, workers=RayCluster("10.0.0.9:6379")))


def test_a_cluster_that_cannot_be_used(monkeypatch):
    def refuse(**options):
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.40.0")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(LoaderError, match=r"ray_address='auto' cannot be used: Version mismatch: .*ray start --head"):
        iter(FeedLoader(Rows(), num_workers=1, workers=RayCluster("auto")))


def test_a_forked_copy_is_refused(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(LoaderError, match="was forked from one that uses Ray"):
        iter(on_ray(Rows()))


def test_a_head_node_that_is_gone(monkeypatch):
    monkeypatch.setattr(ray_workers, "_HEAD_CHECK_S", 0)
    monkeypatch.setattr(ray_workers, "_HEAD_PATIENCE_S", 0)
    monkeypatch.setattr(ray_workers, "_connected", {})
    batches = iter(on_ray(Rows(), batch_size=4))
    next(batches)
    batches.source._lease.gcs_address = "127.0.0.1:9"
    with pytest.raises(LoaderError, match=r"The head node of the Ray cluster \(127.0.0.1:9\) has not answered"):
        next(batches)


class Hanging(Rows):
    def __getitem__(self, index):
        time.sleep(4 if index == 5 else 0)
        return index


def test_a_batch_that_does_not_come_is_warned_of_and_at_last_an_error(caplog):
    batches = iter(on_ray(Hanging(), batch_size=4, timeout=30, prefetch_factor=1, watch=Watch("train", 0.2)))
    next(batches)
    batches.source._timeout_s = 1
    with pytest.raises(LoaderError, match=r"within timeout=1 s. 2 of 2 Ray workers are there; worker . is at batch 1"):
        next(batches)
    assert "is at batch 1, the samples [4, 5, 6, 7]. `ray stack` on its node" in caplog.text


# --- actors that die ------------------------------------------------------------------------------------------------


class Deadly(Noisy):
    """Kills the process that first makes one of some samples."""

    def __init__(self, folder, at=(9,), once=True):
        super().__init__()
        self.folder, self.at, self.once = folder, at, once

    def __getitem__(self, index):
        mark = self.folder / str(index)
        if index in self.at and not (self.once and mark.exists()):
            mark.touch()
            os._exit(7)
        return super().__getitem__(index)


def test_the_batches_of_an_actor_that_died_are_made_again(tmp_path, caplog):
    plain = epochs(on_ray(Noisy(), batch_size=4, order=order()), 1)
    assert epochs(on_ray(Deadly(tmp_path), batch_size=4, order=order()), 1) == plain
    assert "batches are made again" in caplog.text
    assert epochs(on_ray(Rows(), batch_size=4), 1)[0][-1] == [20, 21, 22]


def test_a_batch_that_ends_every_actor_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_workers, "TRIES", 2)
    with pytest.raises(LoaderError, match=r"2 Ray workers died one after the other with batch 0, at \[0, 1, 2, 3\]"):
        epochs(on_ray(Deadly(tmp_path, at=(2,), once=False), batch_size=4))


# --- ends -----------------------------------------------------------------------------------------------------------


class Pids(Rows):
    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize("how", ["break", "garbage"])
def test_actors_end_with_their_pass_or_their_loader(how):
    persistent = how == "garbage"
    loader = on_ray(Pids(400), num_workers=1, batch_size=2, persistent_workers=persistent)
    batches = iter(loader)
    pid = next(batches)[0].item()
    assert Path(f"/proc/{pid}").exists()
    if how == "break":
        batches.close()
    else:
        list(batches)
        assert next(iter(loader))[0].item() == pid
        del batches, loader
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_loaders_share_their_actors():
    seen = [set(torch.cat(list(on_ray(Pids(40), batch_size=2))).tolist()) for _ in range(3)]
    assert len(set.union(*seen)) <= 2  # those of the fixture; one that was just replaced may still start


# --- settings, and around -------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_stream_is_refused():
    with pytest.raises(SettingsError, match=r"workers='ray' cannot serve Stream"):
        on_ray(Stream())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "workers='ray' with num_workers='auto'"),
        ({"num_workers": "tune"}, "workers='ray' with num_workers='tune'"),
        ({"num_workers": 2, "start_method": "spawn"}, "start_method='spawn' would have no effect"),
        ({"num_workers": 2, "ray_address": "ray://head:10001"}, "Ray Client"),
        ({"num_workers": 2, "ray_address": ""}, "ray_address='' is not possible"),
        ({"num_workers": 2, "ray_address": "auto", "workers": "thread"}, "ray_address='auto' would have no effect"),
    ],
)
def test_settings_that_are_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        LoaderSettings(**{"workers": "ray", **options})


def test_lightning_can_copy_it_with_another_sampler():
    loader = on_ray(Rows(), batch_size=4, background=1, order=order(), prefetch_factor=3)
    copied = _update_dataloader(loader, DistributedSampler(range(SIZE), 2, 1, shuffle=False))
    assert (type(copied), copied.workers, copied.prefetch_factor) == (FeedLoader, RayCluster(), 3)
    assert as_list(next(iter(copied))) == [1, 3, 5, 7]


class Data(FastDataModule):
    def __init__(self, **loader):
        super().__init__(batch_size=2, loader=LoaderSettings(**loader))

    def make_dataset(self, split):
        return {"train": Numbers(11), "val": Numbers(5, first=1000)}.get(split)


def test_a_fit_is_that_of_no_workers():
    def fitted(**loader):
        torch.manual_seed(7)
        model = Recording()
        quiet_trainer([]).fit(model, datamodule=Data(seed=3, **loader))
        return model.events, [parameter.tolist() for parameter in model.parameters()]

    assert fitted(workers="ray", num_workers=2) == fitted(num_workers=0)


def test_a_fit_resumes_exactly(tmp_path):
    def source():
        return {"datamodule": Data(workers="ray", num_workers=2, background=2)}

    assert_resumes_exactly(source, list, tmp_path / "run.ckpt", count=7, max_epochs=3)


def test_a_cache_of_one_machine_is_refused():
    with pytest.raises(SettingsError, match="cache='bytes' is memory of one machine"):
        FastDataModule(cache="bytes", loader=LoaderSettings(workers="ray", num_workers=2))


def test_the_report_says_what_they_are():
    data = Data(workers="ray", num_workers=2)
    data.train_dataloader()
    assert "train: workers=ray: as given" in data.loader_report()

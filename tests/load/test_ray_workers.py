"""Ray workers, beyond the contract of test_workers.py: what is sent, the cluster, waits that end, lost workers."""

import gc
import os
import signal
import sys
import threading
import time
import uuid

import numpy as np
import pytest
import torch
import warm
from load.numbered import SIZE, NoisyEverywhere, Rows, epochs, order
from recording import Numbers
from resuming import assert_resumes_exactly
from torch.utils.data import DataLoader

from lightning_feed import FastDataModule
from lightning_feed.errors import DatasetError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load import ray_batches, ray_workers
from lightning_feed.load.collate import BadSamples, fill_skipped
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import LoaderSettings, RayCluster, workers_of
from lightning_feed.load.watchdog import Watch

import ray  # isort: skip

STORE = 80 << 20
pytestmark = [
    pytest.mark.usefixtures("one_ray"),
    pytest.mark.slow,  # starting Ray and its workers
    pytest.mark.xdist_group("ray"),  # once
    pytest.mark.timeout(120),
    # Ray 2.60 leaves these to garbage collection when it starts its own processes, and when it is shut down.
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
]


def on_ray(dataset, *, num_workers=2, **options):
    return FeedLoader(dataset, num_workers=num_workers, workers=RayCluster(), **options)


def wait_until(true, most_s=20):
    until = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


# --- batches --------------------------------------------------------------------------------------------------------


def test_tensors_keep_their_layout_and_are_writable():
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


def test_prefetched_batches_stay_within_their_object_store_share(monkeypatch):
    class Large(Rows):
        def __getitem__(self, index):
            return torch.zeros(1 << 20, dtype=torch.uint8)

    store = ray.cluster_resources()["object_store_memory"]
    monkeypatch.setattr(ray_workers, "STORE_SHARE", 3.5 * (1 << 20) / store)
    batches = iter(on_ray(Large(20), batch_size=None, prefetch_factor=4))
    most = 0
    for taken, _ in enumerate(batches):
        if taken > 8 and batches.source is not None:  # the first batch tells how large those are that come after it
            most = max(most, len(batches.source._asked))
    assert (taken, most) == (19, 3)


# --- errors ---------------------------------------------------------------------------------------------------------


class Partly(Rows):
    """As our image datasets treat bad samples."""

    def __init__(self, bad_samples, bad=(1, 6, 7)):
        super().__init__(12)
        self.bad_samples, self.bad = bad_samples, bad

    def __getitem__(self, index):
        try:
            return self.fetch(index)
        except DatasetError as error:
            return self.bad_samples.instead(index, error, self.size, self.fetch)

    def fetch(self, index):
        if index in self.bad:
            raise DatasetError(f"sample {index} is torn")
        return index


def test_bad_samples_are_counted_over_all_workers(caplog):
    bad = BadSamples("skip", max_failures=5)
    loader = on_ray(Partly(bad), batch_size=4, collate_fn=fill_skipped)
    assert list(loader) == [[0, 0, 2, 3], [4, 5, 4, 5], [8, 9, 10, 11]]
    assert bad.failures == 3
    assert caplog.text.count("is torn on_error='skip'") == 3
    with pytest.raises(DatasetError, match=r"6 samples could not be read \(max_failures=5\)"):
        list(loader)


def test_unpicklable_dataset_or_collate_fn_is_named_in_the_error():
    held = Rows()
    held.lock = lock = threading.Lock()
    with pytest.raises(LoaderError, match=r"Cannot pickle the dataset .*: cannot pickle '_thread.lock"):
        iter(on_ray(held))
    with pytest.raises(LoaderError, match="Cannot pickle the collate_fn"):
        iter(on_ray(Rows(), collate_fn=lambda samples: (lock, samples)))


class Returning(Rows):
    """One sample is something else."""

    def __init__(self, make, at=5):
        super().__init__()
        self.make, self.at = make, at

    def __getitem__(self, index):
        return self.make() if index == self.at else index


def test_unpicklable_sample_or_batch_is_named_in_the_error():
    locked = on_ray(Returning(lambda: {"lock": threading.Lock()}), batch_size=4, collate_fn=list)
    words = r"(?s)Caught LoaderError in a Ray worker .*at index 5 of the dataset.*pickled: cannot pickle '_thread.lock'"
    with pytest.raises(LoaderError, match=words):
        list(locked)
    lazy = on_ray(Rows(), batch_size=4, collate_fn=lambda samples: (sample for sample in samples))
    words = r"(?s)sending the batch of index \[0, 1, 2, 3\].*pickled: cannot pickle 'generator'"
    with pytest.raises(LoaderError, match=words):
        list(lazy)


def test_batch_that_fails_to_unpickle_is_named_in_the_error():
    class Torn:
        def __reduce__(self):
            return int, ("torn",)

    batches = iter(on_ray(Returning(Torn), batch_size=4, collate_fn=list))
    assert next(batches) == [0, 1, 2, 3]
    words = r"batch 1, at \[4, 5, 6, 7\], which the training process cannot unpickle: ValueError: .*'torn'"
    with pytest.raises(LoaderError, match=words):
        next(batches)


def test_dataset_that_fails_to_unpickle_in_a_worker_raises_an_error():
    class Unreadable(Rows):
        def __reduce__(self):
            return os.fspath, (3,)

    with pytest.raises(LoaderError, match=r"(?s)could not make batch 0, at \[0, 1\].*All nodes need this"):
        list(on_ray(Unreadable(), batch_size=2))


def test_missing_ray_raises_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-feed\[ray\]'"):
        iter(on_ray(Rows()))


def test_a_connection_in_use_is_used_whatever_the_address():
    loader = FeedLoader(Rows(), batch_size=2, num_workers=1, workers=RayCluster("10.0.0.9:6379"))
    plain = FeedLoader(Rows(), batch_size=2, num_workers=0)
    assert len(list(loader)) == len(plain)


def test_failed_connection_to_a_cluster_raises_an_error_with_the_reason(monkeypatch):
    def refuse(**options):
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.40.0")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(LoaderError, match=r"RAY_ADDRESS=auto cannot be used: Version mismatch: .*ray start --head"):
        iter(FeedLoader(Rows(), num_workers=1, workers=RayCluster("auto")))


def test_ray_client_address_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    cluster = workers_of(LoaderSettings(workers="ray", num_workers=1))
    with pytest.raises(LoaderError, match="RAY_ADDRESS=ray://head:10001 is an address of Ray Client"):
        iter(FeedLoader(Rows(), num_workers=1, workers=cluster))


def test_ray_workers_in_a_forked_process_are_refused(monkeypatch):
    monkeypatch.setitem(ray_workers._connected, ray.get_runtime_context().gcs_address, os.getpid() + 1)
    with pytest.raises(LoaderError, match="was forked from one that uses Ray"):
        iter(on_ray(Rows()))


class Slow(Rows):
    """One of its samples takes long."""

    def __init__(self, seconds, at=(5,)):
        super().__init__()
        self.seconds, self.at = seconds, at

    def __getitem__(self, index):
        time.sleep(self.seconds if index in self.at else 0)
        return index


def test_overdue_batch_is_warned_about_and_finally_raises_an_error(caplog, monkeypatch):
    monkeypatch.setattr(ray_workers, "REPORT_S", 0.3)
    batches = iter(on_ray(Slow(1000), batch_size=4, timeout=60, watch=Watch("train", 3)))
    next(batches)
    batches.source._timeout_s = 6
    with pytest.raises(LoaderError, match=r"(?s)within timeout=6 s. The Ray cluster has 2 CPUs, \d of them free"):
        next(batches)
    assert "is at index 5 of the dataset, in this batch for" in caplog.text


# --- every wait ends ------------------------------------------------------------------------------------------------


def test_hanging_workers_of_a_closed_pass_are_ended_for_the_next_pass(monkeypatch):
    """No CPU is left, and nobody waits for what takes them."""
    monkeypatch.setattr(ray_workers, "GRACE_S", 0.5)
    batches = iter(on_ray(Slow(1000, at=range(SIZE)), batch_size=4))
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 0)
    batches.close()
    assert epochs(on_ray(Rows(), batch_size=4), 1) == epochs(DataLoader(Rows(), batch_size=4), 1)


def test_waiting_for_a_free_cpu_ends_with_an_error_counting_the_cpus(monkeypatch, tmp_path):
    def hold():
        (tmp_path / "held").touch()
        while not (tmp_path / "free").exists():
            time.sleep(0.05)

    monkeypatch.setattr(ray_workers, "WAIT_FOR_WORKER_S", 1)
    held = ray.remote(num_cpus=2)(hold).remote()
    wait_until((tmp_path / "held").exists)  # workers of earlier tests may hold the CPUs for a while
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 0)
    batches = iter(on_ray(Rows(), batch_size=4))
    try:
        with pytest.raises(LoaderError, match=r"started any of 4 batches in . s. The Ray cluster has 2 CPUs, 0 of"):
            next(batches)
    finally:
        (tmp_path / "free").touch()  # else no later test would get a CPU
    ray.get(held)
    monkeypatch.undo()
    assert len(list(on_ray(Rows(), batch_size=4))) == 6


# --- workers that die ------------------------------------------------------------------------------------------------


class Deadly(NoisyEverywhere):
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


def test_batches_of_a_dead_worker_are_loaded_again(tmp_path):
    plain = epochs(on_ray(NoisyEverywhere(), batch_size=4, order=order()), 1)
    assert epochs(on_ray(Deadly(tmp_path), batch_size=4, order=order()), 1) == plain
    assert epochs(on_ray(Rows(), batch_size=4), 1)[0][-1] == [20, 21, 22]


def test_batch_that_kills_several_workers_in_a_row_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_workers, "TRIES", 2)
    with pytest.raises(LoaderError, match=r"2 Ray workers in a row died while making batch 0, at \[0, 1, 2, 3\]"):
        epochs(on_ray(Deadly(tmp_path, at=(2,), once=False), batch_size=4))


# --- what workers keep ----------------------------------------------------------------------------------------------


class Copied(Rows):
    """Tells the process that made a sample, which copy of the dataset that has, and how many plans it keeps."""

    def __setstate__(self, state):
        self.__dict__ = {**state, "copy": uuid.uuid4().hex}

    def __getitem__(self, index):
        time.sleep(0.01)  # both workers get some
        return os.getpid(), self.copy, len(ray_batches._worker._plans)


def samples_of(loader):
    return {tuple(sample) for batch in loader for sample in batch}


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_persistent_workers_unpickle_the_dataset_once(persistent):
    loader = on_ray(Copied(40), batch_size=2, collate_fn=list, persistent_workers=persistent)
    first, second = ({sample[:2] for sample in samples_of(loader)} for _ in range(2))
    assert (len(first | second) == len({pid for pid, _ in first | second})) == persistent


@pytest.mark.parametrize("how", [pytest.param("close", marks=pytest.mark.nightly), "garbage"])
def test_queued_batches_of_an_abandoned_pass_are_not_loaded(how, tmp_path):
    class Noting(Rows):
        def __getitem__(self, index):
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            (tmp_path / str(index)).touch()
            return index

    batches = iter(on_ray(Noting(), batch_size=1, prefetch_factor=4))
    asked = [asked.ended for asked in batches.source._asked]
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 0)
    if how == "close":
        batches.close()
    del batches
    gc.collect()
    time.sleep(2 * ray_batches.OPEN_S)  # workers check only so often if the pass is still open
    (tmp_path / "go").touch()
    ray.get(asked, timeout=60)
    assert {path.name for path in tmp_path.iterdir()} <= {"go", "0", "1"}
    assert len(asked) == 8


# --- around the cluster -----------------------------------------------------------------------------------------------


def test_ray_starts_locally_without_an_address(monkeypatch):
    asked = {}
    was = iter([False])
    monkeypatch.setattr(ray, "is_initialized", lambda: next(was, True))
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    iter(on_ray(Rows(), num_workers=2))
    assert (asked["address"], asked["num_cpus"]) == ("local", 2)


def test_data_larger_than_the_object_store_spills_to_disk():
    def collate(samples):
        return torch.zeros(2 * STORE, dtype=torch.uint8)

    held = Rows()
    held.bytes = bytearray(2 * STORE)
    assert len(list(on_ray(held, batch_size=8))) == 3
    assert [len(batch) for batch in on_ray(Rows(), batch_size=8, collate_fn=collate)] == 3 * [2 * STORE]


def test_abandoned_passes_leave_nothing_in_the_object_store():
    from ray._private.internal_api import memory_summary

    def collate(samples):
        return torch.zeros(2 << 20, dtype=torch.uint8)

    def used():
        summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
        (line,) = [line for line in summary.splitlines() if line.startswith("Plasma memory usage")]
        return line

    loader = on_ray(Rows(), batch_size=1, collate_fn=collate, persistent_workers=True)
    for _ in range(20):
        next(iter(loader))
    loader.close()
    wait_until(lambda: "Plasma memory usage 0 MiB" in used())
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 2)
    assert threading.active_count() < 20
    assert len(list(loader)) == SIZE


def test_training_in_a_full_placement_group_gets_its_own_workers():
    """As under ray.train: the training is in a placement group, which has no CPU left for others."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def train():
        loader = FeedLoader(range(40), batch_size=4, num_workers=1, workers=RayCluster("auto"))
        return [batch.tolist() for batch in loader]

    group = placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    seen = ray.get(ray.remote(num_cpus=1, scheduling_strategy=strategy)(train).remote(), timeout=100)
    remove_placement_group(group)
    assert seen == [list(range(at, at + 4)) for at in range(0, 40, 4)]


# --- settings, and around -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "workers='ray' with num_workers='auto'"),
        ({"num_workers": "tune"}, "workers='ray' with num_workers='tune'"),
        ({"num_workers": 2, "start_method": "spawn"}, "start_method='spawn' would have no effect"),
    ],
)
def test_unsupported_settings_with_ray_workers_are_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        LoaderSettings(**{"workers": "ray", **options})


class Data(FastDataModule):
    def __init__(self, **loader):
        super().__init__(batch_size=2, loader=LoaderSettings(**loader))

    def make_dataset(self, split):
        return {"train": Numbers(11), "val": Numbers(5, first=1000)}.get(split)


def test_a_fit_with_ray_workers_resumes_exactly(tmp_path):
    def source():
        return {"datamodule": Data(workers="ray", num_workers=2, background=2)}

    assert_resumes_exactly(source, list, tmp_path / "run.ckpt", count=7, max_epochs=3)


def test_loader_warns_and_waits_while_an_actor_holds_all_cpus(caplog):
    class Hog:
        def ready(self):
            return True

    hog = ray.remote(num_cpus=2)(Hog).remote()
    assert ray.get(hog.ready.remote())
    loader = on_ray(Rows(), batch_size=4, watch=Watch("train", after_s=0.5))

    def release():
        wait_until(lambda: "No batch of train has arrived" in caplog.text)
        ray.kill(hog)

    releasing = threading.Thread(target=release)
    releasing.start()
    assert epochs(loader, 1) == epochs(DataLoader(Rows(), batch_size=4), 1)
    releasing.join()
    assert "The Ray cluster has 2 CPUs, 0 of them free." in caplog.text


RANK = """
import sys
import torch
from torch.utils.data import DistributedSampler
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import RayCluster

rank, address, meeting = int(sys.argv[1]), *sys.argv[2:]
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
samples, workers = range(24), RayCluster(address)
loader = FeedLoader(samples, batch_size=3, sampler=DistributedSampler(samples), num_workers=1, workers=workers)
print([index for batch in loader for index in batch.tolist()])
"""


@pytest.mark.timeout(300)
def test_each_rank_loads_its_own_share_of_the_samples(tmp_path):
    given = [ray.get_runtime_context().gcs_address, str(tmp_path / "meeting")]
    files = [tmp_path / f"rank {rank}" for rank in range(2)]
    ranks = [warm.start_into(file, ["-c", RANK, rank, *given]) for rank, file in enumerate(files)]
    try:
        assert [rank.wait(250) for rank in ranks] == [0, 0], [file.read_text() for file in files]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
    shares = [eval(file.read_text().splitlines()[-1]) for file in files]
    assert [len(share) for share in shares] == [12, 12]
    assert sorted(shares[0] + shares[1]) == list(range(24))

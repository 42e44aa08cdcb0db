"""The recommendation: known machines by hand, and bounds that hold on all machines."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_feed.errors import SettingsError
from lightning_feed.load.recommend import ASSUMED_SAMPLE_BYTES, Recommendation, Workload, recommend
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.machine.limits import MEMORY_SHARE, SHM_SHARE, WORKER_BYTES, Machine

GIB = 2**30
MACHINE = Machine(
    usable_cpus=8,
    cpu_reason="CPUs by decree",
    available_memory_bytes=64 * GIB,
    free_shm_bytes=32 * GIB,
    start_method="fork",
)
WORK = Workload(split="train", batch_size=32, batches=1000, device_type="cuda")
AUTO = LoaderSettings()
TORCHS = LoaderSettings(hand_over="torch")


def chosen(found: Recommendation) -> tuple[int, int | None, bool, bool]:
    setting = found.setting
    return setting.num_workers, setting.prefetch_factor, setting.pin_memory, setting.persistent_workers


def test_ample_machine_gets_one_worker_per_cpu_less_one() -> None:
    found = recommend(MACHINE, AUTO, WORK)
    assert chosen(found) == (7, 2, True, True)
    assert found.warnings == ()
    assert found.reasons["num_workers"] == "8 CPUs by decree, less one for the training process"
    assert [line.partition(":")[0] for line in found.describe().splitlines()] == [
        "num_workers=7",
        "prefetch_factor=2",
        "pin_memory=True",
        "persistent_workers=True",
    ]


@pytest.mark.parametrize(
    ("machine", "work", "workers"),
    [
        ({"usable_cpus": 1}, {}, 1),
        ({"usable_cpus": 2}, {}, 2),
        ({"usable_cpus": 3}, {}, 3),
        ({"usable_cpus": 4}, {}, 3),
        ({}, {"local_ranks": 2}, 3),
        ({}, {"local_ranks": 4}, 2),
        ({}, {"local_ranks": 16}, 1),
        ({}, {"loaders": 2}, 3),
        ({}, {"loaders": 20}, 1),
        ({}, {"batches": 5}, 5),
        ({}, {"batches": 2}, 2),
        ({}, {"batches": 1}, 0),
        ({}, {"batches": None}, 7),
        ({}, {"batches": None, "iterable": True}, 1),
    ],
)
def test_number_of_workers_follows_cpus_ranks_loaders_and_batches(
    machine: dict[str, Any], work: dict[str, Any], workers: int
) -> None:
    assert recommend(replace(MACHINE, **machine), AUTO, replace(WORK, **work)).setting.num_workers == workers


@pytest.mark.parametrize(
    ("split", "reload_every", "persistent"),
    [("train", 0, True), ("val", 0, True), ("test", 0, False), ("predict", 0, False), ("train", 1, False)],
)
def test_workers_are_persistent_where_the_split_runs_again(split: str, reload_every: int, persistent: bool) -> None:
    work = replace(WORK, split=split, reload_every_n_epochs=reload_every)
    assert recommend(MACHINE, AUTO, work).setting.persistent_workers is persistent


@pytest.mark.parametrize("split", ["train", "val"])
def test_persistent_workers_with_reloaded_dataloaders_are_refused(split: str) -> None:
    work = replace(WORK, split=split, reload_every_n_epochs=3)
    with pytest.raises(SettingsError, match=r"persistent_workers=True with .*n_epochs=3.*Leave one of the two out"):
        recommend(MACHINE, LoaderSettings(persistent_workers=True), work)


@pytest.mark.parametrize(
    ("given_pin", "device", "pinned"),
    [
        ("auto", "cuda", True),
        ("auto", "xpu", True),
        ("auto", "cpu", False),
        ("auto", "mps", False),
        (True, "cuda", True),
        (True, "cpu", False),
        (False, "cuda", False),
    ],
)
def test_pin_memory_is_used_only_for_cuda_and_xpu(given_pin: Any, device: str, pinned: bool) -> None:
    found = recommend(MACHINE, LoaderSettings(pin_memory=given_pin), replace(WORK, device_type=device))
    assert found.setting.pin_memory is pinned
    if given_pin is True and not pinned:
        assert "True was requested, but is not used" in found.reasons["pin_memory"]


def test_small_shared_memory_lowers_prefetch_factor_before_num_workers() -> None:
    batch = 32 * ASSUMED_SAMPLE_BYTES
    for batches, expected in ((15, (7, 2)), (14, (7, 1)), (8, (7, 1)), (7, (6, 1)), (3, (2, 1)), (2, (1, 1))):
        shm = int((batches + 0.01) * batch / SHM_SHARE)
        found = recommend(replace(MACHINE, free_shm_bytes=shm), TORCHS, WORK)
        assert chosen(found)[:2] == expected
    assert "float32 images of 3 x 224 x 224" in found.reasons["num_workers"]
    assert "--shm-size" in found.reasons["prefetch_factor"]


def test_too_little_memory_for_one_worker_gives_none_and_a_warning() -> None:
    found = recommend(replace(MACHINE, free_shm_bytes=2**20), TORCHS, WORK)
    assert chosen(found) == (0, None, True, False)
    assert "float32 images of 3 x 224 x 224" in found.warnings[0]


def test_user_given_numbers_are_kept_with_a_warning() -> None:
    settings = replace(TORCHS, num_workers=12, prefetch_factor=8)
    found = recommend(replace(MACHINE, free_shm_bytes=2**20), settings, WORK)
    assert chosen(found)[:2] == (12, 8)
    assert "more than 80% of the 1 MiB free in /dev/shm" in found.warnings[0]
    assert "WARNING" in found.reasons["num_workers"]
    assert "WARNING" in found.reasons["prefetch_factor"]


def test_slots_need_no_shared_memory() -> None:
    found = recommend(replace(MACHINE, free_shm_bytes=0), AUTO, WORK)
    assert chosen(found)[:2] == (7, 2)
    assert found.warnings == ()


THREADS = LoaderSettings(workers="thread")


def test_thread_workers_are_not_persistent_and_are_described() -> None:
    found = recommend(MACHINE, THREADS, WORK)
    assert chosen(found) == (7, 2, True, False)
    assert found.setting.workers == "thread"
    assert found.describe().startswith("workers=thread: as given\nnum_workers=7: ")
    assert "GIL" in found.reasons["num_workers"]
    persistent = recommend(MACHINE, LoaderSettings(workers="thread", persistent_workers=True), WORK)
    assert "True was requested, but is not used" in persistent.reasons["persistent_workers"]


@pytest.mark.parametrize("batches", [1, 2])
def test_number_of_threads_is_not_limited_by_the_number_of_batches(batches: int) -> None:
    assert recommend(MACHINE, THREADS, replace(WORK, batches=batches)).setting.num_workers == 7


def test_threads_need_no_shared_memory_and_little_main_memory() -> None:
    small = replace(MACHINE, free_shm_bytes=0, available_memory_bytes=GIB)
    assert recommend(small, TORCHS, WORK).setting.num_workers == 0
    found = recommend(small, THREADS, WORK)
    assert chosen(found)[:2] == (7, 2)
    assert found.warnings == ()
    tiny = recommend(replace(MACHINE, available_memory_bytes=64 * 2**20), THREADS, WORK)
    assert chosen(tiny)[:2] == (1, 1)
    assert "1 worker at 8 MiB" in tiny.warnings[0]


maybe_bytes = st.none() | st.integers(0, 2**40)
machines = st.builds(
    Machine,
    usable_cpus=st.integers(1, 256),
    cpu_reason=st.just("CPUs by decree"),
    available_memory_bytes=maybe_bytes,
    free_shm_bytes=maybe_bytes,
    start_method=st.sampled_from(sorted(WORKER_BYTES)),
)
workloads = st.builds(
    Workload,
    split=st.sampled_from(["train", "val", "test", "predict"]),
    batch_size=st.integers(1, 4096),
    batches=st.none() | st.integers(0, 10**6),
    loaders=st.integers(1, 4),
    iterable=st.booleans(),
    device_type=st.sampled_from(["cuda", "cpu", "xpu", "mps"]),
    local_ranks=st.integers(1, 16),
    reload_every_n_epochs=st.integers(0, 3),
)
free_choice = st.builds(
    LoaderSettings,
    hand_over=st.sampled_from(["slots", "torch"]),
    background=st.integers(0, 8),
    in_order=st.just(True),
)


@given(machines, free_choice, workloads)
def test_recommendation_stays_within_all_machine_limits(
    machine: Machine, settings: LoaderSettings, work: Workload
) -> None:
    found = recommend(machine, settings, work)
    assert 0 <= found.setting.num_workers <= max(1, machine.usable_cpus // work.local_ranks)
    assert work.batches is None or found.setting.num_workers <= max(1, work.batches)
    assert set(found.reasons) == {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers"}
    assert all(found.reasons.values())
    assert (found.setting.prefetch_factor is None) is (found.setting.num_workers == 0)
    assert not (found.setting.persistent_workers and (found.setting.num_workers == 0 or work.reload_every_n_epochs))
    if found.setting.prefetch_factor is None:
        return
    everywhere = work.local_ranks * work.loaders
    batches = found.setting.num_workers * found.setting.prefetch_factor + settings.background + 1
    batch_bytes = work.batch_size * ASSUMED_SAMPLE_BYTES
    if machine.free_shm_bytes is not None and settings.hand_over == "torch":
        assert everywhere * batches * batch_bytes <= SHM_SHARE * machine.free_shm_bytes * (1 + 1e-9)
    if machine.available_memory_bytes is not None:
        resident = found.setting.num_workers * WORKER_BYTES[machine.start_method] * everywhere
        assert resident <= MEMORY_SHARE * machine.available_memory_bytes * (1 + 1e-9)

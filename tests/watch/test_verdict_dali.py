"""Remedies where DALI loads: its own settings, and none that only workers, a collate or a FastDataModule have."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from lightning_feed.watch.experiments.results import ExperimentResults, KeyUse
from lightning_feed.watch.stats import LoaderStats, StarvationStats
from lightning_feed.watch.verdict.diagnosis import Bottleneck, Cause, LoopFacts, Measurements
from lightning_feed.watch.verdict.remedies_data import data_remedies
from lightning_feed.watch.verdict.remedies_other import compute_remedies, copy_remedies, framework_remedies
from lightning_feed.watch.verdict.shares import Shares, shares_of
from lightning_feed.watch.verdict.tree import diagnose

TREAT = {"data": data_remedies, "copy": copy_remedies, "framework": framework_remedies, "compute": compute_remedies}
NOT_OF_DALI = (
    "FastDataModule",
    "LoaderSettings",
    "num_workers",
    "collate",
    "lightning-feed pack",
    "drop_keys",
    "cache=",
)
ON_GPU, ON_CPU, MORE_THREADS, DEEPER = (
    "dali_device='cuda'", "dali_device='cpu'", "dali_threads=8", "dali_prefetch=4",
)  # fmt: skip


def measured(*, prefetch_active: bool | None = None, **facts: Any) -> Measurements:
    """Steps of 100 ms, of which 60 are waited for DALI on the CPU and 20 for the copy."""
    known: dict[str, Any] = {
        "device_type": "cuda", "usable_cpus": 8, "batch_size": 64, "dali_device": "cpu", "dali_threads": 7,
        "dali_prefetch": 2,
    }  # fmt: skip
    stats = StarvationStats(
        steps=400, confidence="high", step_ms=100.0, compute_ms=20.0, data_idle_ms=60.0, next_wait_ms=60.0,
        starved_pct=60.0, input_pct=60.0, other_ms=0.0, h2d_ms=20.0, prefetch_active=prefetch_active,
        epoch_start_s=5.0,
    )  # fmt: skip
    keys = (KeyUse(name="image", bytes_per_batch=9, used=True), KeyUse(name="text", bytes_per_batch=9, used=False))
    return Measurements(
        stats=stats,
        facts=LoopFacts(**(known | facts)),
        loaders=LoaderStats(),
        experiments=ExperimentResults(batch_size=64, keys=keys, cached_bytes_per_s=50.0, loader_per_s=10.0),
    )


def shares(found: Measurements) -> Shares:
    known = shares_of(found)
    assert known is not None
    return known


def changes(found: Measurements, cause: Cause, part: Bottleneck = "data") -> list[str]:
    return [one.changes for one in TREAT[part](found, shares(found), cause)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dali", ["cpu", "cuda"])
@pytest.mark.parametrize("part", TREAT)
def test_none_is_of_another_data_module(part: Bottleneck, dali: str, device: str) -> None:
    found = measured(dali_device=dali, device_type=device)
    for cause in get_args(Cause):
        for remedy in TREAT[part](found, shares(found), cause):
            assert not [word for word in NOT_OF_DALI if word in remedy.code + remedy.why]


def test_what_dali_can_be_told() -> None:
    assert changes(measured(), "unknown") == [ON_GPU, MORE_THREADS, DEEPER]
    assert changes(measured(dali_device="cuda"), "unknown") == [MORE_THREADS, DEEPER, ON_CPU]
    assert changes(measured(device_type="cpu", dali_threads=8), "unknown") == [DEEPER]
    assert changes(measured(), "jitter") == [DEEPER, ON_GPU]


def test_no_setting_of_dali_bears_on_these() -> None:
    assert changes(measured(), "epoch start") == changes(measured(), "one rank") == []


def test_threads_beyond_the_cpus_are_taken_back() -> None:
    assert changes(measured(dali_threads=9), "oversubscribed") == [ON_GPU, MORE_THREADS]
    (_, other) = data_remedies(measured(), shares(measured()), "oversubscribed")
    assert other.code == "torch.set_num_threads(1)"


def test_the_copy() -> None:
    assert changes(measured(), "not overlapped", "copy") == [ON_GPU, "prefetch_callback=True", "device_transform=True"]
    assert changes(measured(prefetch_active=True), "link", "copy") == [ON_GPU, "device_transform=True"]
    assert changes(measured(dali_device="cuda"), "link", "copy") == ["device_transform=True"]
    assert changes(measured(device_type="cpu"), "transfer hooks", "copy") == []


def test_in_a_verdict() -> None:
    found = diagnose(measured())
    assert found.bottleneck == "data"
    assert [one.code for one in found.remedies][:2] == [
        'DaliDataModule(device="gpu")',
        "DaliDataModule(dali=DaliOptions(threads=8))",
    ]


def test_it_is_said_whose_work_is_not_known() -> None:
    without = replace(measured(), experiments=None)
    assert any("DALI loads in threads of its own" in line for line in diagnose(without).evidence)
    workers = replace(without, facts=replace(without.facts, dali_device=None))
    assert any("what the workers do meanwhile" in line for line in diagnose(workers).evidence)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"dali_device": "cuda"}, True),
        ({"dali_device": "cpu"}, False),
        ({"dali_device": None, "backend": "dali-gpu"}, True),
        ({"dali_device": None, "backend": "dali-cpu"}, False),
        ({"dali_device": None, "backend": "torch"}, False),
    ],
)
@pytest.mark.parametrize("loaders", [{}, {"head_of_line_pct": 90.0}], ids=["cause not known", "some cause"])
def test_waiting_for_dali_on_the_gpu_is_said_to_hold_its_decoding(
    loaders: dict[str, float], facts: dict[str, Any], said: bool
) -> None:
    found = diagnose(replace(measured(**facts), loaders=LoaderStats(**loaders)))
    assert found.bottleneck == "data"
    assert any("its decoding is part of this time" in line for line in found.evidence) is said

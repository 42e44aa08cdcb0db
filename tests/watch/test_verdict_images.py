"""Remedies for images that are not decoded fast enough: where decoding on the GPU is named, and what it promises."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from lightning_feed.watch.experiments.results import ExperimentResults, NamedCost
from lightning_feed.watch.reports.document import as_document, make_report
from lightning_feed.watch.reports.markdown import run_rows
from lightning_feed.watch.reports.text import as_text
from lightning_feed.watch.stats import LoaderStats, StarvationStats
from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.diagnosis import Cause, LoopFacts, Measurements, Remedy
from lightning_feed.watch.verdict.remedies_data import data_remedies
from lightning_feed.watch.verdict.remedies_images import image_remedies
from lightning_feed.watch.verdict.remedies_other import copy_remedies
from lightning_feed.watch.verdict.shares import Shares, shares_of
from lightning_feed.watch.verdict.tree import diagnose

COSTS = (
    NamedCost(name="read", cpu_ms=0.5, wall_ms=1.0),
    NamedCost(name="decode", cpu_ms=8.0, wall_ms=8.0),
    NamedCost(name="TrainRecipe", cpu_ms=1.0, wall_ms=1.0),
)  # fmt: skip
GPU = ("backend='nvjpeg'", "backend='dali-gpu'")


def _measured(
    *, found: dict[str, Any] | None = None, loaders: dict[str, float] | None = None, **facts: Any
) -> Measurements:
    """Steps of 100 ms, of which 80 are waited for 64 images that 8 workers on 8 CPUs decode."""
    known: dict[str, Any] = {
        "num_workers": 8, "usable_cpus": 8, "batch_size": 64, "device_type": "cuda", "decoder": "turbo",
        "backend": "torch", "own_transforms": False, "cache": "off", "ours": True,
    }  # fmt: skip
    stats = StarvationStats(
        steps=400, confidence="high", step_ms=100.0, compute_ms=20.0, data_idle_ms=80.0, next_wait_ms=80.0,
        starved_pct=80.0, input_pct=80.0, other_ms=0.0, h2d_ms=0.0,
    )  # fmt: skip
    return Measurements(
        stats=stats,
        facts=LoopFacts(**(known | facts)),
        loaders=LoaderStats(**(loaders or {})),
        experiments=ExperimentResults(**({"batch_size": 64, "costs": COSTS} | (found or {}))),
    )


def _shares(measured: Measurements) -> Shares:
    shares = shares_of(measured)
    assert shares is not None
    return shares


def _remedies(measured: Measurements) -> dict[str, Remedy]:
    return {one.changes: one for one in image_remedies(measured, _shares(measured))}


# --- where they are named -------------------------------------------------------------------------------------------


def test_on_a_gpu_both_are_named_first() -> None:
    assert tuple(_remedies(_measured())) == (*GPU, "quality='fast'", "cache='decoded'")


@pytest.mark.parametrize(
    "facts",
    [
        {"device_type": "cpu"},
        {"device_type": "mps"},
        {"own_transforms": True},
        {"cache": "decoded"},
        {"cache": "device"},
    ],
)
def test_where_the_gpu_cannot_decode_it_is_not_named(facts: dict[str, Any]) -> None:
    named = _remedies(_measured(**facts))
    assert not any(change.startswith("backend=") for change in named)
    assert "quality='fast'" in named


def test_dali_on_the_cpu_is_never_promised() -> None:
    assert not any(
        "dali-cpu" in change for change in {**_remedies(_measured()), **_remedies(_measured(device_type="cpu"))}
    )


@pytest.mark.parametrize("facts", [{"decoder": None}, {"backend": "nvjpeg"}, {"backend": "dali-gpu"}])
def test_another_data_module_or_another_backend_gets_none_of_them(facts: dict[str, Any]) -> None:
    assert _remedies(_measured(**facts)) == {}


def test_an_older_report_that_names_no_backend_was_of_torch() -> None:
    assert set(GPU) <= set(_remedies(_measured(backend=None, own_transforms=None, cache=None)))


@pytest.mark.parametrize("cause", ["cpu", "oversubscribed", "no workers"])
def test_they_are_among_the_remedies_of_what_workers_cannot_do(cause: Any) -> None:
    measured = _measured()
    assert set(GPU) <= {one.changes for one in data_remedies(measured, _shares(measured), cause)}


@pytest.mark.parametrize("cause", ["cold reads", "waiting", "epoch start"])
def test_and_not_of_what_is_no_work(cause: Any) -> None:
    measured = _measured()
    assert not set(GPU) & {one.changes for one in data_remedies(measured, _shares(measured), cause)}


def test_dali_keeps_to_all_pixels() -> None:
    named = _remedies(_measured(quality="fast"))
    assert GPU[0] in named
    assert GPU[1] not in named
    assert GPU[1] in _remedies(_measured(quality="exact"))


ALL: tuple[Cause, ...] = get_args(Cause)


@pytest.mark.parametrize("cause", ALL)
def test_batches_that_are_uint8_are_not_to_become_it(cause: Any) -> None:
    needless = {"device_transform=True", "transforms=off"}
    for measured in (_measured(found={"no_transform_per_s": 90.0, "loader_per_s": 10.0}), _measured(backend="nvjpeg")):
        shares = _shares(measured)
        assert not needless & {one.changes for one in data_remedies(measured, shares, cause)}
        assert not needless & {one.changes for one in copy_remedies(measured, shares, cause)}


@pytest.mark.parametrize(
    ("backend", "offered"), [("torch", True), ("nvjpeg", False), ("dali-cpu", False), ("dali-gpu", False)]
)
def test_a_collate_is_not_asked_for_where_it_would_be_refused(backend: str, offered: bool) -> None:
    measured = _measured(backend=backend, device_type="cpu")
    assert ("collate" in {one.changes for one in copy_remedies(measured, _shares(measured), "link")}) is offered


def test_batches_of_ones_own_transforms_may_not_be_uint8() -> None:
    measured = _measured(own_transforms=True)
    assert "device_transform=True" in {one.changes for one in data_remedies(measured, _shares(measured), "cpu")}
    assert "device_transform=True" in {one.changes for one in copy_remedies(measured, _shares(measured), "link")}


@pytest.mark.parametrize("backend", ["dali-cpu", "dali-gpu"])
def test_where_dali_decodes_behind_the_workers_torch_is_to_be_compared(backend: str) -> None:
    measured = _measured(backend=backend)
    for cause in ("waiting", "cpu", "jitter", "unknown"):
        assert data_remedies(measured, _shares(measured), cause)[0].changes == "backend='torch'"
    for cause in ("cold reads", "epoch start", "one rank"):
        assert "backend='torch'" not in {one.changes for one in data_remedies(measured, _shares(measured), cause)}
    for other in ("torch", "nvjpeg"):
        measured = _measured(backend=other)
        assert "backend='torch'" not in {one.changes for one in data_remedies(measured, _shares(measured), "waiting")}


def _decoding(**facts: Any) -> Measurements:
    """Steps of 100 ms, of which 60 go by on the way to the device, where nvJPEG decodes from pageable memory."""
    measured = _measured(backend="nvjpeg", pin_memory=False, batch_bytes=8 << 20, batch_tensors=2, **facts)
    stats = StarvationStats(
        steps=400, confidence="high", step_ms=100.0, compute_ms=40.0, data_idle_ms=0.0, next_wait_ms=0.0,
        starved_pct=0.0, input_pct=60.0, other_ms=0.0, h2d_ms=60.0,
    )  # fmt: skip
    return replace(measured, stats=stats)


def test_waiting_for_nvjpeg_is_decoding_and_no_copy() -> None:
    found = diagnose(_decoding())
    assert (found.bottleneck, found.cause) == ("copy", "decoding on the GPU")
    assert any("nvJPEG decodes on the way to the device" in line for line in found.evidence)
    assert [(one.changes, one.predicted_step_ms) for one in found.remedies] == [
        ("prefetch_callback=True", 40.0),
        ("backend='torch'", None),
        ("backend='dali-gpu'", None),
    ]
    for word in ("cause decoding on the GPU", "PrefetchCallback"):
        assert word in as_text(found)
    for word in ("pin_memory", "uint8", "pageable"):
        assert word not in as_text(found)


def test_what_is_prefetched_already_is_compared_with_other_decoders() -> None:
    measured = _decoding(quality="fast")
    measured = replace(measured, stats=replace(measured.stats, prefetch_active=True))
    assert [one.changes for one in diagnose(measured).remedies] == ["backend='torch'"]


# --- what they promise ----------------------------------------------------------------------------------------------


def test_workers_that_only_read_take_their_share_of_the_time() -> None:
    # 1 of 10 ms of a sample is reading: 10 ms instead of 100 for a batch; the rest of the step takes 20.
    measured = _measured()
    assert predict.read_share(measured) == pytest.approx(0.1)
    remedies = _remedies(measured)
    assert [remedies[change].predicted_step_ms for change in GPU] == [20.0, 20.0]
    assert "10 % of what they do now" in remedies[GPU[0]].why


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"model_per_s": 25.0}, 40.0),  # the model alone takes 40 ms
        ({"device_decode_per_s": 20.0}, 50.0),  # decoding on the device takes 50 ms
        ({"device_decode_per_s": 20.0, "model_per_s": 10.0}, 100.0),
        ({"device_decode_per_s": 5.0}, 100.0),  # never slower than now: then it is not named, see below
    ],
)
def test_the_slowest_part_counts(found: dict[str, Any], expected: float) -> None:
    measured = _measured(found=found)
    per_s = found.get("device_decode_per_s")
    assert predict.decoded_on_device(measured, _shares(measured), per_s) == pytest.approx(expected)


def test_reading_can_be_the_slowest_part() -> None:
    slow = (NamedCost(name="read", cpu_ms=0.5, wall_ms=5.0), NamedCost(name="decode", cpu_ms=5.0, wall_ms=5.0))
    measured = _measured(found={"costs": slow})
    assert predict.decoded_on_device(measured, _shares(measured), None) == pytest.approx(50.0)
    few = _measured(found={"costs": slow}, num_workers=4)  # threads are as many as there are CPUs
    assert predict.decoded_on_device(few, _shares(few), None) == pytest.approx(25.0)


def test_the_cpus_can_be_the_slowest_part() -> None:
    measured = _measured(loaders={"workers_on_cpu_pct": 100.0}, host_cpu_ms=700.0)
    # Eight workers for 10 ms, and 700 ms of the training process, on 8 CPUs.
    assert predict.decoded_on_device(measured, _shares(measured), None) == pytest.approx((80 + 700) / 8)


def test_without_experiments_nothing_is_promised_and_it_says_so() -> None:
    remedies = _remedies(_measured(found={"costs": ()}))
    assert [remedies[change].predicted_step_ms for change in GPU] == [None, None]
    assert "how fast was not measured" in remedies[GPU[0]].why
    assert "%" not in remedies[GPU[0]].why


def test_the_measured_rate_is_told_and_counts_for_nvjpeg_alone() -> None:
    remedies = _remedies(_measured(found={"device_decode_per_s": 20.0}))
    assert "1,280 images/s with nothing beside it" in remedies[GPU[0]].why
    assert remedies[GPU[0]].predicted_step_ms == pytest.approx(50.0)
    assert "how fast was not measured" in remedies[GPU[1]].why
    assert remedies[GPU[1]].predicted_step_ms == pytest.approx(20.0)


def test_a_device_that_decodes_no_faster_than_the_workers_is_not_named() -> None:
    named = _remedies(_measured(found={"device_decode_per_s": 9.9}))
    assert GPU[0] not in named
    assert GPU[1] in named


def test_a_model_that_takes_all_of_the_step_gains_nothing() -> None:
    assert not set(GPU) & set(_remedies(_measured(found={"model_per_s": 10.0})))


def test_the_report_has_samples_per_s() -> None:
    busy = {"workers_on_cpu_pct": 95.0, "workers_run_queue_pct": 3.0, "workers_blocked_pct": 2.0}
    found = diagnose(_measured(loaders=busy))
    assert (found.bottleneck, found.cause) == ("data", "cpu")
    document = as_document(make_report(found))
    assert document["run"]["backend"] == "torch"
    assert ("backend", "torch") in run_rows(make_report(found))
    named = {one["changes"]: one for one in document["remedies"]}
    assert named[GPU[0]]["code"] == 'ImageFolderDataModule("data", backend="nvjpeg")'
    assert named[GPU[0]]["predicted_step_ms"] == pytest.approx(20.0)
    assert named[GPU[0]]["predicted_samples_per_s"] == pytest.approx(3200.0)

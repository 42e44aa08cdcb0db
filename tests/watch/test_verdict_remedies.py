"""Remedies name only what exists, in order, and what they promise follows from what was measured."""

import ast
import itertools
from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_feed
from lightning_feed import cli
from lightning_feed.watch.experiments.results import DiskFacts, ExperimentResults, KeyUse, NamedCost
from lightning_feed.watch.stats import LoaderStats, RankStats, StarvationStats
from lightning_feed.watch.verdict.diagnosis import SYNCS, Cause, HookTime, LoopFacts, Measurements
from lightning_feed.watch.verdict.remedies_data import data_remedies
from lightning_feed.watch.verdict.remedies_other import compute_remedies, copy_remedies, framework_remedies
from lightning_feed.watch.verdict.shares import Shares, shares_of
from lightning_feed.watch.verdict.tree import diagnose


def _measured(
    data: float = 40, h2d: float = 0, other: float = 0, *, loaders: Any = None, found: Any = None, **facts: Any
) -> Measurements:
    stats = StarvationStats(
        steps=412,
        confidence="high",
        step_ms=100.0,
        other_ms=other,
        data_idle_ms=data,
        h2d_ms=h2d,
        compute_ms=100 - data - h2d - other,
        starved_pct=data,
        input_pct=data + h2d,
        next_wait_ms=data,
    )
    return Measurements(
        stats=stats,
        facts=LoopFacts(**({"num_workers": 2, "usable_cpus": 8, "prefetch_factor": 2} | facts)),
        loaders=LoaderStats(**(loaders or {})),
        experiments=ExperimentResults(**found) if found else None,
    )


def _shares(measured: Measurements) -> Shares:
    shares = shares_of(measured)
    assert shares is not None
    return shares


def _data(measured: Measurements, cause: Cause) -> dict[str, float | None]:
    return {one.changes: one.predicted_step_ms for one in data_remedies(measured, _shares(measured), cause)}


# --- they exist ---------------------------------------------------------------------------------------------------

CAUSES: tuple[Cause, ...] = (
    "epoch start", "no workers", "head of line", "pin thread", "oversubscribed", "cpu", "cold reads", "waiting",
    "jitter", "one rank", "unknown",
)  # fmt: skip


def _every_code() -> set[str]:
    hooks = tuple(
        HookTime(name=f"[Callback]{name}.on_train_batch_end", ms_per_step=1.0)
        for name in ("ModelCheckpoint", "TQDMProgressBar", "Mine")
    )
    ranks = RankStats(world_size=2, steps=400, starved_pct=40.0, slow_rank=1, data_idle_ms_by_rank=(0.0, 40.0))
    found: dict[str, Any] = {"keys": (KeyUse(name="meta", bytes_per_batch=1, used=False),)}
    codes = set()
    for ours, device, workers, pinned in itertools.product((True, False), ("cpu", "cuda"), (0, 2, 16), (True, False)):
        measured = _measured(
            30, 20, 20, found=found, ours=ours, device_type=device, num_workers=workers, pin_memory=pinned,
            persistent_workers=pinned, decoder="turbo", workers="process", syncs=tuple(SYNCS),
            loaders={"queue_ready": 9.0, "queue_capacity": 10.0},
        )  # fmt: skip
        shares = _shares(measured)
        both = [measured, Measurements(stats=measured.stats, facts=measured.facts, hooks=hooks, ranks=ranks)]
        for each in both:
            for cause in CAUSES:
                codes |= {one.code for one in data_remedies(each, shares, cause)}
            for cause in ("hooks", "synchronisation"):
                codes |= {one.code for one in framework_remedies(each, shares, cause)}
            for cause in ("unpinned", "small tensors", "link"):
                codes |= {one.code for one in copy_remedies(each, shares, cause)}
            for cause in ("launch", "compute"):
                codes |= {one.code for one in compute_remedies(each, shares, cause)}
    return codes


OURS = ("FastDataModule", "LoaderSettings", "ImageFolderDataModule", "PrefetchCallback", "GPUStarvationCallback")
NAMES: dict[str, Any] = {name: getattr(lightning_feed, name) for name in OURS}
NAMES |= {name: getattr(lightning.pytorch.callbacks, name) for name in ("ModelCheckpoint", "TQDMProgressBar")}
NAMES |= {"Trainer": Trainer, "DataLoader": DataLoader, "torch": torch}


def _try(code: str) -> None:
    """Run it as far as it does not need the user's program."""
    if code.startswith("lightning-feed "):
        cli._parser().parse_args(code.split()[1:])
        return
    tree = ast.parse(code if not code.startswith("if ") else f"def hook():\n {code}")
    if code.startswith("def "):
        return  # a method of the user's
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            _call(node)


def _call(node: ast.Call) -> None:
    assert isinstance(node.func, ast.Name)
    names = {
        word.arg: eval(compile(ast.Expression(word.value), "", "eval"), NAMES) for word in node.keywords if word.arg
    }
    if node.func.id == "DataLoader":
        NAMES["DataLoader"]([1, 2, 3], **names)
    elif node.func.id == "ImageFolderDataModule":
        NAMES["ImageFolderDataModule"]("data", **names)
    elif node.func.id == "Trainer":
        assert set(names) <= set(Trainer.__init__.__wrapped__.__annotations__)  # type: ignore[attr-defined]
    else:
        NAMES[node.func.id](**names)


@pytest.mark.parametrize("code", sorted(_every_code()))
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:'pin_memory' argument is set"
)  # few CPUs here
def test_a_remedy_can_be_pasted(code: str) -> None:
    if code.startswith("lightning-feed") or "." not in code.split("(")[0]:
        _try(code)
        return
    owner, _, method = code.split("(")[0].partition(".")
    known = {"model": lightning.pytorch.LightningModule, "self": lightning.pytorch.LightningModule, "torch": torch}
    if owner in known:
        assert callable(getattr(known[owner], method))
    _try(code) if owner not in known else ast.parse(code)


def test_enough_was_tried() -> None:
    assert len(_every_code()) >= 30


# --- they promise what follows ------------------------------------------------------------------------------------

BUSY = {"workers_on_cpu_pct": 90.0, "workers_run_queue_pct": 5.0, "workers_blocked_pct": 5.0}
ASLEEP = {"workers_on_cpu_pct": 2.0, "workers_run_queue_pct": 1.0, "workers_blocked_pct": 97.0}


@pytest.mark.parametrize(
    ("facts", "loaders", "found", "predicted"),
    [
        ({}, {}, None, {"num_workers=4": 60}),
        # 2 workers, 90 % of 100 ms each, and 60 ms of the step, on 3 CPUs
        ({"usable_cpus": 3}, BUSY, None, {"num_workers=3": 80}),
        ({"usable_cpus": 3, "host_cpu_ms": 3.0}, BUSY, None, {"num_workers=3": 200 / 3}),
        ({"usable_cpus": 3, "device_type": "cuda"}, BUSY, None, {"num_workers=3": 200 / 3}),
        ({"num_workers": 6}, BUSY, None, {"num_workers=8": 75}),
        ({"num_workers": 7}, BUSY | {"workers_on_cpu_pct": 100.0}, None, {"num_workers=8": 95}),
        ({"usable_cpus": 3, "host_cpu_ms": 120.0}, BUSY, None, {}),  # no CPU is free for more
        ({}, {}, {"worker_scaling": ((2, 20.0), (4, 25.0))}, {"num_workers=4": 80}),
        ({}, {}, {"worker_scaling": ((2, 20.0), (4, 60.0))}, {"num_workers=4": 60}),
        ({}, {}, {"worker_scaling": ((2, 20.0), (4, 20.3))}, {}),  # tried: no gain
        # tried alone, where training took no CPU: 180 ms of the workers and 60 of the step, on 4 CPUs
        ({"usable_cpus": 4}, BUSY, {"worker_scaling": ((2, 20.0), (4, 39.0))}, {"num_workers=4": 60}),
        ({"usable_cpus": 3}, BUSY, {"worker_scaling": ((2, 20.0), (3, 30.0))}, {"num_workers=3": 80}),
        ({}, {}, {"model_per_s": 1000 / 70}, {"num_workers=4": 70}),  # the model alone takes 70 ms
        ({}, {}, {"taking_ms": 5.0}, {"num_workers=4": 65}),  # 60 ms of the step, and 5 to open a batch that is ready
        ({}, {}, {"taking_ms": 50.0}, {}),
    ],
)
def test_more_workers(facts: Any, loaders: Any, found: Any, predicted: dict[str, float]) -> None:
    promised = _data(_measured(loaders=loaders, found=found, **facts), "cpu")
    workers = {what: ms for what, ms in promised.items() if what.startswith("num_workers")}
    assert workers == pytest.approx(predicted)


def test_without_transforms_the_cpus_are_still_shared_with_training() -> None:
    costs = (NamedCost(name="Blur", cpu_ms=2.0, wall_ms=2.0),)
    found = {"loader_per_s": 20.0, "no_transform_per_s": 40.0, "as_uint8_per_s": 40.0, "costs": costs}
    # 2 workers for 50 ms, all of it on a CPU, and 90 ms of the step: on 2 CPUs
    shared = _measured(loaders=BUSY, found=found, usable_cpus=2, host_cpu_ms=90.0)
    assert _data(shared, "cpu")["device_transform=True"] == pytest.approx(95)
    assert _data(shared, "cpu")["transforms=off"] == pytest.approx(95)
    waits = _measured(loaders={"workers_on_cpu_pct": 2.0}, found=found, usable_cpus=2, host_cpu_ms=90.0)
    assert _data(waits, "cpu")["device_transform=True"] == pytest.approx(60)  # the floor


def test_parts_that_nobody_reads_are_dropped_where_their_bytes_count() -> None:
    def dropped(cause: Cause, **sizes: int) -> list[str]:
        keys = tuple(KeyUse(name=name, bytes_per_batch=size, used=name == "image") for name, size in sizes.items())
        return [one for one in _data(_measured(found={"keys": keys}), cause) if one.startswith("drop_keys")]

    assert dropped("cpu", image=100, depth=100) == ["drop_keys=depth"]
    assert dropped("cpu", image=100, path=5) == []
    assert dropped("cold reads", image=100, depth=100) == []
    assert dropped("cpu", depth=100, path=100) == []  # a batch needs something


def test_one_worker_is_one() -> None:
    said = diagnose(_measured(num_workers=1)).evidence
    assert "the loader has 1 worker on 8 CPUs" in said
    assert "the loader has no workers on 8 CPUs" in diagnose(_measured(num_workers=0)).evidence


def test_a_loader_alone_has_no_verdict_and_the_reason() -> None:
    nothing = StarvationStats(steps=0, confidence="low")
    alone = diagnose(Measurements(stats=nothing, experiments=ExperimentResults(loader_per_s=5.0)))
    assert alone.evidence == ("only the loader was measured; whether training waits for it takes a LightningModule",)
    assert "0 steps were measured" in diagnose(Measurements(stats=nothing)).evidence[0]


def test_workers_that_wait_need_no_cpu_each() -> None:
    measured = _measured(loaders=ASLEEP, usable_cpus=2)
    assert _data(measured, "waiting") == {"num_workers=4": pytest.approx(60), "prefetch_factor=4": None}
    slow = _measured(90, loaders=ASLEEP, usable_cpus=2)
    assert _data(slow, "waiting")["num_workers=8"] == pytest.approx(25)  # four times as many, at most


@pytest.mark.parametrize(
    ("loaders", "found", "predicted"),
    [
        ({}, None, None),
        ({"workers_blocked_pct": 30.0}, None, 70),
        ({"workers_blocked_pct": 97.0}, None, 60),
        ({"workers_blocked_pct": 97.0}, {"loader_per_s": 20.0, "cached_bytes_per_s": 25.0}, 80),
        ({}, {"cached_bytes_per_s": 12.5}, 80),
        ({}, {"loader_per_s": 12.0, "cached_bytes_per_s": 15.0}, 80),  # training slows the loader: the ratio of both
        ({}, {"loader_per_s": 10.8, "cached_bytes_per_s": 12.5}, 80),  # or noise: the rate as it is
        ({}, {"loader_per_s": 20.0, "cached_bytes_per_s": 1000.0}, 60),
        ({}, {"loader_per_s": 20.0, "cached_bytes_per_s": 10.0}, 100),  # never slower than now
    ],
)
def test_bytes_in_memory(loaders: Any, found: Any, predicted: float | None) -> None:
    promised = _data(_measured(loaders=loaders, found=found), "cold reads")
    expected = None if predicted is None else pytest.approx(predicted)
    assert promised["staged=True"] == promised["cache='bytes'"] == expected


@pytest.mark.parametrize("cause", ["cpu", "waiting", "oversubscribed", "no workers"])
def test_files_in_memory_where_an_experiment_shows_that_it_pays(cause: Cause) -> None:
    def promised(per_s: float | None) -> Any:
        found = {"loader_per_s": 20.0, "cached_bytes_per_s": per_s}
        return _data(_measured(found=found), cause).get("staged=True", "not named")

    assert promised(25.0) == pytest.approx(80)
    assert promised(22.0) == "not named"  # a gain of 9 %
    assert promised(None) == "not named"
    assert "staged=True" not in _data(_measured(loaders={"workers_blocked_pct": 90.0}), cause)


def test_small_files_are_packed() -> None:
    small, large = (_measured(found={"disk": DiskFacts(mean_file_bytes=size)}) for size in ((1 << 20) - 1, 1 << 20))
    assert "pack" in _data(small, "cold reads")
    assert "pack" not in _data(large, "cold reads")


def test_the_dearest_transforms_are_named_and_uint8_has_its_own_figure() -> None:
    costs = tuple(
        NamedCost(name=name, cpu_ms=ms, wall_ms=ms)
        for name, ms in [("read", 9.0), ("decode", 9.0), ("Flip", 0.5), ("Blur", 4.0), ("Jitter", 3.5)]
    )
    found = {"loader_per_s": 20.0, "no_transform_per_s": 25.0, "as_uint8_per_s": 22.0, "costs": costs}
    measured = _measured(found=found)
    assert _data(measured, "cpu")["device_transform=True"] == pytest.approx(100 * 20 / 22)
    (cheaper,) = (one for one in data_remedies(measured, _shares(measured), "cpu") if one.changes == "transforms=off")
    assert cheaper.predicted_step_ms == pytest.approx(80)
    assert "without Blur and Jitter" in cheaper.code
    assert "of 8.0 ms of CPU time that transforms take for a sample: Blur (4.0 ms) and Jitter (3.5 ms)" in cheaper.why
    for changed in ({"no_transform_per_s": 20.1}, {"costs": costs[:2]}, {"costs": ()}):  # nothing to gain, or to name
        assert "transforms=off" not in _data(_measured(found=found | changed), "cpu")


def test_with_several_loaders_loading_is_no_transform() -> None:
    costs = tuple(NamedCost(name=name, cpu_ms=4.0, wall_ms=4.0) for name in ("a: load", "b: read", "b: decode"))
    found = {"loader_per_s": 20.0, "no_transform_per_s": 80.0, "costs": costs}
    assert "transforms=off" not in _data(_measured(found=found), "cpu")
    found["costs"] = (*costs, NamedCost(name="b: Blur", cpu_ms=1.0, wall_ms=1.0))
    measured = _measured(found=found)
    (cheaper,) = (one for one in data_remedies(measured, _shares(measured), "cpu") if one.changes == "transforms=off")
    assert cheaper.code.endswith("# without b: Blur")


def test_in_any_order() -> None:
    late = _measured(loaders={"head_of_line_pct": 50.0})
    assert list(_data(late, "head of line").items()) == [
        ("in_order=False", pytest.approx(80)),
        ("prefetch_factor=4", None),
    ]
    assert "in_order=False" not in _data(_measured(in_order=False), "head of line")
    assert "in_order=False" not in _data(_measured(num_workers=1), "head of line")
    assert _data(_measured(), "jitter") == {"prefetch_factor=4": pytest.approx(60)}


def test_fewer_workers_than_cpus_allow() -> None:
    measured = _measured(num_workers=8, usable_cpus=2)
    assert _data(measured, "oversubscribed") == {"num_workers=2": None, "device_transform=True": None}
    tried = _measured(num_workers=8, usable_cpus=2, found={"worker_scaling": ((2, 25.0), (8, 20.0))})
    assert _data(tried, "oversubscribed")["num_workers=2"] == pytest.approx(80)
    assert "set_num_threads" in data_remedies(_measured(), _shares(_measured()), "oversubscribed")[0].code


def test_a_slow_start_of_workers() -> None:
    assert list(_data(_measured(persistent_workers=False), "epoch start")) == ["persistent_workers=True"]
    kept = _measured(persistent_workers=True, workers="process")
    assert list(_data(kept, "epoch start")) == ["workers='thread'"]


def test_handing_over_that_takes_the_time() -> None:
    """More workers would not help where batches lie ready."""
    measured = _measured(loaders={"handover_pct": 80.0}, num_workers=2, usable_cpus=8, workers="process")
    assert list(_data(measured, "waiting")) == ["device_transform=True", "workers='thread'"]
    less = _measured(loaders={"handover_pct": 79.0}, num_workers=2, usable_cpus=8, workers="process")
    assert "workers='thread'" not in _data(less, "waiting")


@pytest.mark.parametrize(("workers", "others"), [(2, True), (8, False)])
def test_without_too_many_workers_others_take_the_cpus(workers: int, others: bool) -> None:
    measured = _measured(
        loaders={"workers_on_cpu_pct": 12.0, "workers_run_queue_pct": 86.0, "workers_blocked_pct": 2.0},
        num_workers=workers,
        usable_cpus=2,
    )
    found = diagnose(measured)
    assert found.cause == "oversubscribed"
    assert any("other programs take them" in line for line in found.evidence) is others


def test_pinned_memory() -> None:
    found = {"pinned_gb_per_s": 20.0, "pageable_gb_per_s": 5.0}
    measured = _measured(0, 40, device_type="cuda", pin_memory=False, found=found)
    first, second = copy_remedies(measured, _shares(measured), "unpinned")[:2]
    assert (first.changes, second.changes) == ("pin_memory=True", "prefetch_callback=True")
    assert first.predicted_step_ms == pytest.approx(100 - 40 * 0.75)
    assert second.predicted_step_ms == pytest.approx(60)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("[Callback]ModelCheckpoint{'monitor': None, 'mode': 'min'}.on_train_batch_end", "ModelCheckpoint("),
        ("[Callback]RichProgressBar.on_train_batch_end", "TQDMProgressBar("),
        ("[Callback]MyModelCheckpoint.on_train_batch_end", "if trainer.global_step"),
    ],
)
def test_a_dear_hook_is_done_less_often(name: str, code: str) -> None:
    measured = _measured(0, 0, 40)
    hooks = (HookTime(name=name, ms_per_step=10.0),)
    remedy = diagnose(Measurements(stats=measured.stats, hooks=hooks)).remedies[0]
    assert remedy.code.startswith(code)
    assert "{" not in remedy.why + remedy.changes
    assert remedy.predicted_step_ms == pytest.approx(100 - 9.8)


def test_torchs_loader_is_told_in_torchs_words() -> None:
    codes = [one.code for one in diagnose(_measured(ours=False)).remedies]
    assert codes[0] == "DataLoader(dataset, num_workers=4)"


@pytest.mark.parametrize(
    ("ready", "found", "fewer"),
    [
        (6.4, None, "num_workers=4"),
        (6.3, None, None),
        (8.0, {"model_per_s": 10.0, "loader_per_s": 44.0}, "num_workers=2"),
        (8.0, {"model_per_s": 10.0, "loader_per_s": 10.0}, None),
    ],
)
def test_workers_never_needed_can_be_given_back(ready: float, found: Any, fewer: str | None) -> None:
    loaders = {"queue_ready": ready, "queue_capacity": 8.0}
    remedies = diagnose(_measured(0, loaders=loaders, found=found, num_workers=8)).remedies
    assert [one.changes for one in remedies] == ([] if fewer is None else [fewer])
    assert all(one.predicted_step_ms == 100.0 for one in remedies)

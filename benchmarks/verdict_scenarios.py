"""The faults of the verdict benchmark: name -> how to make it, and the verdict that names it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, SequentialSampler
from verdict_fits import ReadingProgressBar, Scenario, SlowHook, SlowLogger, Synchronize
from verdict_work import Collate, Cost, Decode, Nothing, OneIn, Pieces, ReadDirect, Samples, Sleep, Spin, Stream

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.verdict.diagnosis import Bottleneck, Cause


class Data(FastDataModule):
    """A FastDataModule over the same datasets."""

    def __init__(self, cost: Cost, settings: LoaderSettings) -> None:
        super().__init__(batch_size=1, loader=settings)
        self.cost = cost

    def make_dataset(self, split: str) -> Any:
        return Samples(self.cost) if split == "train" else None

    def sampler(self, dataset: Any, split: str) -> Any:
        """The order of the dataset."""
        return SequentialSampler(dataset)


def _loader(files: Path, cost: Any, workers: int, kind: Callable[[Cost], Any], options: dict[str, Any]) -> Any:
    cost = cost(files) if isinstance(cost, partial) else cost
    return DataLoader(kind(cost), num_workers=workers, **options)


def load(cost: Any, workers: int = 2, *, kind: Callable[[Cost], Any] = Samples, **options: Any) -> Any:
    """A DataLoader; ``cost`` is of one sample, or makes that from the folder of files."""
    return partial(_loader, cost=cost, workers=workers, kind=kind, options=options)


def several(*loaders: Any) -> Any:
    """Loaders side by side: a batch of each in each step."""
    return lambda files: CombinedLoader([one(files) for one in loaders], "min_size")


def ours(cost: Cost, **settings: Any) -> Any:
    """A FastDataModule."""
    return lambda _: Data(cost, LoaderSettings(**settings))


def slow_start(worker: int) -> None:
    """What each worker does first: imports, opening files."""
    Sleep(150)(worker)


def read_direct(ms: float) -> partial[Cost]:
    """A cost that reads from the disk for some milliseconds."""
    return partial(_read_direct, ms=ms)


def _read_direct(files: Path, ms: float) -> Cost:
    return ReadDirect(files / "large", ms)


def _waiting(data: Any, **options: Any) -> Scenario:
    return Scenario(family="waiting", expect=("data", "waiting"), data=data, **options)


def _cold(data: Any, **options: Any) -> Scenario:
    return Scenario(family="cold reads", expect=("data", "cold reads"), data=data, **options)


def _cpu(data: Any, **options: Any) -> Scenario:
    return Scenario(family="cpu", expect=("data", "cpu"), data=data, **options)


def _oversubscribed(data: Any, **options: Any) -> Scenario:
    return Scenario(family="oversubscribed", expect=("data", "oversubscribed"), data=data, **options)


def _head(data: Any, **options: Any) -> Scenario:
    return Scenario(family="head of line", expect=("data", "head of line"), data=data, steps=180, **options)


def _no_workers(data: Any, **options: Any) -> Scenario:
    return Scenario(family="no workers", expect=("data", "no workers"), data=data, **options)


def _jitter(data: Any, **options: Any) -> Scenario:
    return Scenario(family="jitter", expect=("data", "jitter"), data=data, steps=220, **options)


def _hooks(**options: Any) -> Scenario:
    return Scenario(family="hooks", expect=("framework", "hooks"), data=load(Sleep(0.5)), **options)


def _transfer(**options: Any) -> Scenario:
    return Scenario(family="transfer hooks", expect=("copy", "transfer hooks"), data=load(Sleep(0.5)), **options)


def _epochs(data: Any, **options: Any) -> Scenario:
    return Scenario(family="epoch start", expect=("data", "epoch start"), data=data, steps=5, epochs=16, **options)


def _compute(data: Any, **options: Any) -> Scenario:
    return Scenario(
        family="compute", expect=("compute", "compute"), data=data, **({"device_ms": 40.0, "steps": 80} | options)
    )


def _on_device(family: str, expect: tuple[Bottleneck, Cause], **options: Any) -> Scenario:
    """A queued device that counts as a GPU, and a loader that keeps up."""
    usual: dict[str, Any] = {"data": load(Sleep(0.5)), "queued": True, "device_ms": 10.0, "is_gpu": True}
    return Scenario(family=family, expect=expect, **(usual | options))


def _one_rank(rank: int) -> Scenario:
    return Scenario(family="one rank", expect=("data", "one rank"), data=load(Sleep(20), 1), slow_rank=rank)


SCENARIOS: dict[str, Scenario] = {
    "sleep, 2 workers": _waiting(load(Sleep(24))),
    "sleep, moderate": _waiting(load(Sleep(26)), device_ms=9),
    "batch of 8 short waits": _waiting(load(Sleep(3), batch_size=8)),
    "sleep, stream": _waiting(load(Sleep(24), kind=Stream)),
    "sleep, threads": _waiting(ours(Sleep(24), num_workers=2, workers="thread")),
    "sleep, one of two loaders": _waiting(several(load(Sleep(24)), load(Sleep(0.5)))),
    "50 tensors in a batch": Scenario(
        family="hand-over", expect=("data", "hand-over"), data=load(Nothing(), kind=partial(Pieces, count=50))
    ),
    "O_DIRECT, 1 worker": _cold(load(read_direct(16), 1)),
    "O_DIRECT, 2 workers": _cold(load(read_direct(24))),
    "spin, 1 worker": _cpu(load(Spin(14), 1)),
    "spin, 2 workers": _cpu(load(Spin(24))),
    "spin, stream": _cpu(load(Spin(24), kind=Stream)),
    "slow collate": _cpu(load(Nothing(), batch_size=8, collate_fn=Collate(Spin(24)))),
    "JPEGs, Pillow": _cpu(load(Decode(1280, 960), batch_size=4)),
    "huge batches": _cpu(load(Nothing(), 1, kind=partial(Samples, floats=4_000_000))),
    "8 workers": _oversubscribed(load(Spin(24), 8)),
    "8 workers, stream": _oversubscribed(load(Spin(24), 8, kind=Stream)),
    "one slow in twenty, 4 workers": _head(load(OneIn(20, Sleep(120), Sleep(2)), 4)),
    "one laborious in twenty": _head(load(OneIn(20, Spin(100), Sleep(2)))),
    "sleep, no workers": _no_workers(load(Sleep(10), 0)),
    "spin, no workers": _no_workers(load(Spin(10), 0)),
    "all stall now and then, 1 worker": _jitter(load(OneIn(30, Sleep(150), Sleep(1)), 1), device_ms=6),
    "laborious now and then, 1 worker": _jitter(load(OneIn(30, Spin(130), Sleep(1)), 1), device_ms=6),
    "callback sleeps": _hooks(callbacks=lambda: [SlowHook("on_train_batch_end", Sleep(10))]),
    "callback works": _hooks(callbacks=lambda: [SlowHook("on_train_batch_end", Spin(8))]),
    "slow logger": _hooks(options={"logger": SlowLogger(Sleep(8)), "log_every_n_steps": 1}),
    "transfer_batch_to_device": _transfer(transfer=Sleep(5)),
    "on_after_batch_transfer": _transfer(after_transfer=Spin(5)),
    "epochs of 5, slow start of workers": _epochs(load(Sleep(0.5), worker_init_fn=slow_start)),
    "epochs of 5, 2 workers": _epochs(load(Sleep(0.5))),
    "device only": _compute(load(Sleep(0.5))),
    "computing host": _compute(load(Sleep(0.5), 1), device_ms=0, host_ms=40),
    "light, no workers": _compute(load(Nothing(), 0)),
    "balanced, sleep": _compute(load(Sleep(56))),
    "queued device, sleep": _waiting(load(Sleep(60)), device_ms=20, queued=True),
    "queued device, spin": _cpu(load(Spin(30), 1), device_ms=20, queued=True),
    "queued device, wait is hidden": _compute(load(Sleep(50)), queued=True),
    "queued device, sync, then a callback": _hooks(
        device_ms=20, queued=True, callbacks=lambda: [Synchronize(), SlowHook("on_train_batch_end", Sleep(8))]
    ),
    "rank 1 of 2 slow": _one_rank(1),
    "small kernels": _on_device("launch", ("compute", "launch"), device_ms=4.0, host_ms=24.0),
    "a little longer to launch than to compute": _on_device("launch", ("compute", "launch"), host_ms=12.0),
    "healthy device": _on_device("compute", ("compute", "compute"), host_ms=4.0),
    "healthy device, its loss is read": _on_device(
        "compute", ("compute", "compute"), callbacks=lambda: [Synchronize()]
    ),
    "a device shared by two programs": _on_device("compute", ("compute", "compute"), device_ms=40.0, steps=80),
    "host-bound by a callback": _on_device(
        "hooks", ("framework", "hooks"), callbacks=lambda: [SlowHook("on_train_batch_end", Spin(16))]
    ),
    "progress bar reads the loss": _on_device(
        "synchronisation",
        ("framework", "synchronisation"),
        device_ms=4.0,
        syncs=("prog_bar",),
        callbacks=lambda: [ReadingProgressBar()],
    ),
    "copies from pageable memory": _on_device("copy", ("copy", "unpinned"), copy_ms=5.0, pin_memory=False),
    "pinned copies in the same stream": _on_device("copy", ("copy", "not overlapped"), copy_ms=5.0),
    "device starves, no workers": _on_device("no workers", ("data", "no workers"), data=load(Spin(20), 0)),
    "device starves, 2 workers": _on_device("cpu", ("data", "cpu"), data=load(Spin(40))),
    "validation takes longer": Scenario(
        family="validation",
        expect=("validation", "compute"),
        data=load(Sleep(0.5)),
        steps=60,
        device_ms=20.0,
        options={"limit_val_batches": 8, "val_check_interval": 5},
    ),
}

"""ImageFolderDataModule(backend="nvjpeg") beside the model alone and plain Lightning, on a CUDA device.

A part of gpu_day.py, with the photos, the model and the clock of gpu_hand_over.py. Rounds are interleaved:

    python benchmarks/gpu_feed.py feed --out FILE --limit SECONDS

Set FEED_PHOTOS to a folder of JPEGs. Without a CUDA device the parts run with a few small images on the CPU, which only
shows that the program works.
"""

import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from gpu_claims import Claim, Report, at_least, at_most, if_active, run_part
from gpu_hand_over import (
    BATCH,
    DEVICE,
    MARGIN_S,
    ON_DEVICE,
    SIZE,
    STEPS,
    WORKERS,
    Same,
    fitted,
    make_photos,
    plain_loader,
)
from lightning.pytorch import Callback, seed_everything
from pictures import make_picture
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import models

from lightning_feed import ImageFolderDataModule, LoaderSettings, NvJpegOptions, PrefetchCallback
from lightning_feed.images.nvjpeg import nvjpeg

MOST_FED = 13_000
"""Images per second that are enough (the goal's upper bound)."""
SETTLING_STEPS = 480
"""Enough for several moves of the share: with 15 workers it moves once in 60 steps."""
OTHERS_S = 50
"""Seconds for all but the rounds."""
FEW_CPUS = 4
LARGE = (3000, 4000)
LARGE_BATCH = 16
LARGE_PHOTOS = LARGE_BATCH * max(2, WORKERS)
"""A batch for each worker."""
Side = tuple[Callable[[], Any], list[Callback]]


def folder_of(photos: Path, backend: Any, workers: int = WORKERS, batch: int = BATCH) -> ImageFolderDataModule:
    """The data module of one side."""
    dtype = torch.bfloat16 if ON_DEVICE else torch.float32
    loader = LoaderSettings(num_workers=workers)
    return ImageFolderDataModule(
        photos, batch, image_size=SIZE, val_fraction=0, backend=backend, loader=loader, dtype=dtype
    )


def tree_cpu_s() -> float:
    """CPU seconds of this process and of all its processes that have ended and been waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def on_cpus(count: int) -> Iterator[None]:
    """Context manager in which all threads of this process, and what it starts, have that many CPUs."""
    before = os.sched_getaffinity(0)
    set_cpus(set(sorted(before)[:count]))
    try:
        yield
    finally:
        set_cpus(before)


def set_cpus(cpus: set[int]) -> None:
    """Let all threads of this process run on these CPUs."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)


def measure(report: Report, name: str, side: Side) -> dict[str, float]:
    """Train with one side."""
    make, callbacks = side
    began_s = tree_cpu_s()
    clock = fitted(models.resnet18(num_classes=2), make(), *callbacks)
    figures = {
        "images_per_s": 1e3 * BATCH / clock.step_ms,
        "main_cpu_ms": clock.main_cpu_ms,
        "tree_cpu_s_per_1000": (tree_cpu_s() - began_s) / (BATCH * STEPS) * 1e3,
    }
    report.row(run=name, step_ms=clock.step_ms, **figures)
    return figures


def interleaved(report: Report, sides: dict[str, Side], end_s: float) -> dict[str, dict[str, float]]:
    """Train with the sides in turns until the time is over. Returns the medians."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    round_s = 0.0
    while time.monotonic() + round_s < end_s or round_s == 0.0:
        began_s = time.monotonic()
        for name, side in sides.items():
            found[name].append(measure(report, name, side))
        round_s = time.monotonic() - began_s
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def feed(report: Report, limit_s: float) -> None:
    """All of it. What decides comes first, since a part may be killed at its limit."""
    end_s = time.monotonic() + limit_s - MARGIN_S
    all_on_device = NvJpegOptions(cpu_share=0.0) if ON_DEVICE else "torch"
    if ON_DEVICE:
        report.row(run="library", name=nvjpeg(torch.device(DEVICE, 0)).library)
    with tempfile.TemporaryDirectory() as scratch:
        photos = make_photos(Path(scratch) / "photos")
        share = settled_share(report, photos)
        shared = NvJpegOptions(cpu_share=share) if ON_DEVICE else "torch"
        headline(report, photos, shared, all_on_device, end_s - OTHERS_S)
        few_cpus(report, photos, all_on_device)
        same_to_the_bit(report, photos, all_on_device)
        large(report, Path(scratch) / "large", all_on_device)


def settled_share(report: Report, photos: Path) -> float:
    """Train until the share of the workers has settled, and return it: it moves only once in many steps."""
    if not ON_DEVICE:
        return 0.0
    module = folder_of(photos, "nvjpeg")
    fitted(models.resnet18(num_classes=2), module, PrefetchCallback(), steps=SETTLING_STEPS)
    dataset: Any = module.dataset("train")
    share: float = dataset.cpu_part.share
    report.row(run="workers decode, of all images", share=share)
    refused = sum(dataset.cpu_part.refused.as_dict().values()) + sum(dataset.cpu_fallback.as_dict().values())
    report.add(at_most("images that nvJPEG refused or failed on", refused, 0))
    return share


def headline(report: Report, photos: Path, shared: Any, all_on_device: Any, end_s: float) -> None:
    """The model alone, plain Lightning and the backends, in turns."""
    pixels = torch.zeros(BATCH, 3, SIZE, SIZE, device=DEVICE, dtype=torch.uint8)
    labels = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)
    sides: dict[str, Side] = {
        "the model alone": (lambda: Same((pixels, labels)), []),
        "plain Lightning": (lambda: plain_loader(photos), []),
        "backend=torch": (lambda: folder_of(photos, "torch"), [PrefetchCallback()]),
        "backend=nvjpeg, with the share that settled": (lambda: folder_of(photos, shared), [PrefetchCallback()]),
        "backend=nvjpeg, all on the device": (lambda: folder_of(photos, all_on_device), [PrefetchCallback()]),
    }
    alone, plain, _, ours, whole = interleaved(report, sides, end_s).values()
    enough = min(alone["images_per_s"], MOST_FED)
    more_cpu_ms = whole["main_cpu_ms"] - alone["main_cpu_ms"]
    tree = whole["tree_cpu_s_per_1000"] / plain["tree_cpu_s_per_1000"]
    report.add(
        at_least("nvjpeg, images/s over the model alone", ours["images_per_s"] / enough, 0.95),
        at_least("nvjpeg, images/s over plain Lightning", ours["images_per_s"] / plain["images_per_s"], 3.2),
        at_most("nvjpeg, CPU of the process tree over plain Lightning's", tree, 0.2),
        at_most("nvjpeg, CPU of the training process over the model alone's", more_cpu_ms, 8, "ms a step"),
    )


def few_cpus(report: Report, photos: Path, backend: Any) -> None:
    """With four CPUs, as many machines have for each GPU."""
    workers = FEW_CPUS - 1
    with on_cpus(FEW_CPUS):
        loader = plain_loader(photos)
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
        few: DataLoader[Any] = DataLoader(loader.dataset, pin_memory=ON_DEVICE, **options)
        plain = measure(report, "4 CPUs, plain Lightning", (lambda: few, []))
        ours = measure(
            report,
            "4 CPUs, nvjpeg, all on the device",
            (lambda: folder_of(photos, backend, workers), [PrefetchCallback()]),
        )
    ratio = ours["images_per_s"] / plain["images_per_s"]
    report.add(at_least("4 CPUs: nvjpeg, images/s over plain Lightning", ratio, 8))


def enlarged(picture: bytes, size: tuple[int, int]) -> bytes:
    """The JPEG of another (height, width)."""
    height, width = size
    file = io.BytesIO()
    Image.open(io.BytesIO(picture)).resize((width, height)).save(file, "JPEG", quality=90)
    return file.getvalue()


def large(report: Report, folder: Path, backend: Any) -> None:
    """Photos of 12 megapixels: time and memory of one pass."""
    size = LARGE if ON_DEVICE else (300, 400)
    pictures = [enlarged(make_picture(seed), size) for seed in range(4)]
    for number in range(LARGE_PHOTOS):
        file = folder / f"class_{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pictures[number % 4])
    seconds = {}
    for name, side in (("torch", "torch"), ("nvjpeg", backend)):
        module = folder_of(folder, side, batch=LARGE_BATCH)
        module.setup("fit")
        loader = module.train_dataloader()
        list(loader)  # workers start, memory is taken
        if ON_DEVICE:
            torch.cuda.reset_peak_memory_stats()
        began_s = time.perf_counter()
        for _ in range(3):
            list(loader)
        seconds[name] = (time.perf_counter() - began_s) / 3
        held = torch.cuda.max_memory_allocated() >> 20 if ON_DEVICE else 0
        report.row(run=f"photos of {size[1]} x {size[0]}, {name}", images_per_s=LARGE_PHOTOS / seconds[name], mib=held)
    report.add(at_most("large photos, seconds of nvjpeg over torch", seconds["nvjpeg"] / seconds["torch"], 1.0))


def same_to_the_bit(report: Report, photos: Path, backend: Any) -> None:
    """Weights after the same steps, prefetched and not."""
    weights = []
    prefetch = PrefetchCallback()
    for callbacks in ([], [prefetch]):
        seed_everything(1)
        model = models.resnet18(num_classes=2)
        torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003  # torch's own form
        fitted(model, folder_of(photos, backend, batch=32), *callbacks)
        torch.use_deterministic_algorithms(False)  # noqa: FBT003
        weights.append(torch.cat([value.detach().flatten().cpu() for value in model.parameters()]))
    equal = torch.equal(*weights)
    claim = Claim(
        claim="nvjpeg: weights are the same to the bit, prefetched and not", measured=str(equal), passed=equal
    )
    report.add(if_active(claim, active=prefetch.active or not ON_DEVICE))


if __name__ == "__main__":
    run_part({"feed": feed}, needs_device=False)

"""What does an image cost, from its encoded bytes to the pixels of a random crop? CPU milliseconds and fidelity.

One thread, files in memory, all rows in turns, so that a machine that gets slower does so for all. Shown are images/s,
and the CPU time per image as median over the rounds and [least, most]; ``x`` is the first row's time over this one's.
PSNR is to Pillow on the same box, over all images: the worst and the median; "same" where no pixel differs. The first
row is torchvision's recipe, ToTensor and Normalize included. ``cover N`` lets the decoder of regions take the smallest
scale at which the box still has N times the pixels of the result per side.

    python benchmarks/decode.py --data DIR [--images 200] [--rounds 7]
"""

import argparse
import io
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from lightning_feed.errors import MissingExtraError
from lightning_feed.images.choose import DECODER_NAMES, make_decoder, psnr_db
from lightning_feed.images.decoders import Decoder, PillowDecoder, Pixels, Region, resize
from lightning_feed.images.turbo_region import scale_for, scaled_box

SIZE = (224, 224)
RECIPE = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])


@dataclass(frozen=True)
class Sample:
    """One image: its bytes, Pillow's pixels, and the box to cut."""

    data: bytes
    pixels: Pixels
    box: Region


@dataclass(frozen=True)
class Row:
    """What is timed, and the scale of the reference; ``None`` for no reference."""

    work: Callable[[Sample], Any]
    cover: tuple[int, int] | None = None
    has_reference: bool = True


def load_samples(folder: Path, images: int) -> list[Sample]:
    """Images of a folder, each with a random box."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})
    torch.manual_seed(0)
    samples = []
    for path in files[:: max(1, len(files) // images)][:images]:
        pixels = PillowDecoder().decode(path.read_bytes())
        image = torch.empty(3, *pixels.shape[:2])
        box = transforms.RandomResizedCrop.get_params(image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3])
        samples.append(Sample(path.read_bytes(), pixels, Region(*box)))
    return samples


def cut(pixels: Pixels, box: Region) -> Pixels:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def recipe(sample: Sample) -> torch.Tensor:
    """Pillow and floats, as most write it."""
    image = Image.open(io.BytesIO(sample.data)).convert("RGB")
    cropped: torch.Tensor = RECIPE(transforms.functional.resized_crop(image, *sample.box, list(SIZE)))
    return cropped


def whole(decoder: Decoder, sample: Sample) -> torch.Tensor:
    """Decode the whole image, then cut and resize."""
    return resize(cut(decoder.decode(sample.data), sample.box), SIZE)


def region(decoder: Decoder, cover: tuple[int, int] | None, sample: Sample, *, antialias: bool) -> torch.Tensor:
    """Decode the box alone, then resize."""
    pixels = decoder.decode_region(sample.data, sample.box, cover=cover)
    return resize(pixels, SIZE, antialias=antialias)


def make_rows() -> dict[str, Row]:
    """The recipe, and all decoders that are installed."""
    rows = {"torchvision's recipe (Pillow, float)": Row(recipe, has_reference=False)}
    decoders: dict[str, Decoder] = {}
    for name in reversed(DECODER_NAMES[1:]):
        try:
            decoders[name] = make_decoder(name).decoder
        except MissingExtraError as error:
            print(f"{name} skipped: {error}")
    for name, decoder in decoders.items():
        rows[f"{name} + exact"] = Row(partial(whole, decoder))
    for name, decoder in decoders.items():
        if not decoder.decodes_regions:
            continue
        for times in (0, 2, 1):
            cover = (times * SIZE[0], times * SIZE[1]) if times else None
            scaled = f", cover {times}" if times else ""
            for kind in ("exact", "linear"):
                work = partial(region, decoder, cover, antialias=kind == "exact")
                rows[f"{name}, box{scaled} + {kind}"] = Row(work, cover)
    return rows


def reference(sample: Sample, cover: tuple[int, int] | None) -> Pixels:
    """What Pillow makes of the box, or of the box of full pixels that a scale really gives."""
    box = sample.box
    if cover is not None:
        height, width = sample.pixels.shape[:2]
        eighths = scale_for(box, (height, width), cover)
        top, left, rows, columns = scaled_box(box, (height, width), eighths)
        step = 8 // eighths
        bottom = min((top + rows) * step, height)
        right = min((left + columns) * step, width)
        box = Region(top * step, left * step, bottom - top * step, right - left * step)
    image = Image.fromarray(cut(sample.pixels, box))
    return np.asarray(image.resize(SIZE, Image.Resampling.BILINEAR))


def fidelity(row: Row, samples: list[Sample]) -> str:
    """The worst and the median PSNR."""
    if not row.has_reference:
        return ""
    found_db = []
    for sample in samples:
        pixels = row.work(sample).permute(1, 2, 0).numpy()
        found_db.append(psnr_db(pixels, reference(sample, row.cover)))
    if math.isinf(min(found_db)):
        return "same"
    return f"{min(found_db):.1f} / {statistics.median(found_db):.1f}"


def main() -> None:
    """Time the rows in turns, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of images, searched to any depth")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples = load_samples(options.data, options.images)
    rows = make_rows()
    accuracy = {name: fidelity(row, samples) for name, row in rows.items()}  # the first round of each, untimed
    cpu_ms: dict[str, list[float]] = {name: [] for name in rows}
    wall_ms: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, row in rows.items():
            began_s = time.perf_counter()
            began_cpu_s = time.thread_time()
            for sample in samples:
                row.work(sample)
            cpu_ms[name].append(1e3 * (time.thread_time() - began_cpu_s) / len(samples))
            wall_ms[name].append(1e3 * (time.perf_counter() - began_s) / len(samples))
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Pillow {version('pillow')}; {options.rounds} rounds of {len(samples)} images\n"
    )
    print("| both | images/s | CPU ms | x | PSNR dB, least / median |\n|---|---|---|---|---|")
    first_ms = statistics.median(next(iter(cpu_ms.values())))
    for name in rows:
        median_ms = statistics.median(cpu_ms[name])
        print(
            f"| {name} | {1e3 / statistics.median(wall_ms[name]):.0f} | {median_ms:.2f} [{min(cpu_ms[name]):.2f}, "
            f"{max(cpu_ms[name]):.2f}] | {first_ms / median_ms:.2f} | {accuracy[name]} |"
        )


if __name__ == "__main__":
    main()

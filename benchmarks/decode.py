"""What does an image cost, from its encoded bytes to the pixels of a random crop? CPU milliseconds and fidelity.

One thread, files in memory, all rows in turns, so that a machine that gets slower does so for all. Shown are images/s,
and the CPU time per image as median over the rounds and [least, most]; ``x`` is the first row's time over this one's.
PSNR is to Pillow on the same box, over all images: the worst and the median; "same" where no pixel differs.

* **Decoding**: whole images, and with the decoder of regions only the boxes that RandomResizedCrop draws (``--seed``).
  ``cover N`` lets it take the smallest scale at which the box still has N times the pixels of the result per side.
* **Resizing**: of those boxes, already decoded, to ``--size``.
* **Both**: bytes to uint8 crop; the first row is torchvision's recipe, ToTensor and Normalize included.

    python benchmarks/decode.py --data DIR [--images 200] [--rounds 7] [--size 224] [--seed 0]
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision import transforms

from lightning_feed.decode.choose import DECODER_NAMES, make_decoder, psnr_db
from lightning_feed.decode.decoders import Decoder, PillowDecoder, Pixels, Region, resize
from lightning_feed.decode.turbo_region import scale_for, scaled_box
from lightning_feed.errors import MissingExtraError

Box = Callable[[Region, tuple[int, int]], Region]


class Sample(NamedTuple):
    """One image: its bytes, Pillow's pixels, and the box to cut."""

    data: bytes
    pixels: Pixels
    box: Region

    @property
    def cut(self) -> Pixels:
        return _cut(self.pixels, self.box)


class Row(NamedTuple):
    """What is timed, and what Pillow makes of the same sample (None: nothing to compare)."""

    work: Callable[[Sample], Any]
    reference: Callable[[Sample], Pixels] | None


def _cut(pixels: Pixels, box: Region) -> Pixels:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _load(folder: Path, images: int, seed: int) -> list[Sample]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})
    if not files:
        raise SystemExit(f"{folder} holds no images (.jpg, .jpeg, .png, .webp)")
    torch.manual_seed(seed)
    samples = []
    for path in files[:: max(1, len(files) // images)][:images]:
        data = path.read_bytes()
        pixels = PillowDecoder().decode(data)
        box = transforms.RandomResizedCrop.get_params(
            torch.empty(3, *pixels.shape[:2]), scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]
        )
        samples.append(Sample(data, pixels, Region(*box)))
    return samples


def _decoders() -> dict[str, Decoder]:
    found = {}
    for name in DECODER_NAMES[:0:-1]:
        try:
            found[name] = make_decoder(name).decoder
        except MissingExtraError as error:
            print(f"{name} skipped: {error}")
    return found


def snap(region: Region, size: tuple[int, int], eighths: int) -> Region:
    """The box of full-size pixels that a region really gets at a scale."""
    step = 8 // eighths
    top, left, height, width = scaled_box(region, size, eighths)
    bottom, right = min((top + height) * step, size[0]), min((left + width) * step, size[1])
    return Region(top * step, left * step, bottom - top * step, right - left * step)


def _snapped(sample: Sample, cover: tuple[int, int]) -> Region:
    size = sample.pixels.shape[:2]
    return snap(sample.box, size, scale_for(sample.box, size, cover))


def _pillow_resize(pixels: Pixels, size: int) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR))


def both(decoders: dict[str, Decoder], size: int) -> dict[str, Row]:
    def reference(sample: Sample) -> Pixels:
        return _pillow_resize(sample.cut, size)

    to_float = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])

    def recipe(sample: Sample) -> torch.Tensor:
        image = Image.open(io.BytesIO(sample.data)).convert("RGB")
        return to_float(transforms.functional.resized_crop(image, *sample.box, [size, size]))

    out = (size, size)
    rows = {"torchvision's recipe (Pillow, float)": Row(recipe, None)}
    for name, one in decoders.items():
        rows[f"{name} + exact"] = Row(lambda s, one=one: resize(_cut(one.decode(s.data), s.box), out), reference)
    for name, one in decoders.items():
        if not one.decodes_regions:
            continue
        rows[f"{name}, box + exact"] = Row(lambda s, one=one: resize(one.decode_region(s.data, s.box), out), reference)
        rows[f"{name}, box + linear"] = Row(
            lambda s, one=one: resize(one.decode_region(s.data, s.box), out, antialias=False), reference
        )
        for times, antialias in ((2, True), (1, True), (2, False), (1, False)):
            cover = (times * size, times * size)
            rows[f"{name}, box, cover {times} + {'exact' if antialias else 'linear'}"] = Row(
                lambda s, one=one, cover=cover, antialias=antialias: resize(
                    one.decode_region(s.data, s.box, cover=cover), out, antialias=antialias
                ),
                lambda s, cover=cover: _pillow_resize(_cut(s.pixels, _snapped(s, cover)), size),
            )
    return rows


def _fidelity(row: Row, samples: list[Sample]) -> str:
    if row.reference is None:
        return ""
    found = []
    for sample in samples:
        pixels = row.work(sample)
        if isinstance(pixels, torch.Tensor):
            pixels = pixels.permute(1, 2, 0).numpy()
        found.append(psnr_db(pixels, row.reference(sample)))
    if math.isinf(min(found)):
        return "same"
    return f"{min(found):.1f} / {statistics.median(found):.1f}"


def table(title: str, rows: dict[str, Row], samples: list[Sample], rounds: int) -> None:
    """Time the rows in turns, and print them."""
    fidelity = {name: _fidelity(row, samples) for name, row in rows.items()}  # the first round of each, untimed
    cpu: dict[str, list[float]] = {name: [] for name in rows}
    wall: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, row in rows.items():
            began_wall, began = time.perf_counter(), time.thread_time()
            for sample in samples:
                row.work(sample)
            cpu[name].append((time.thread_time() - began) * 1e3 / len(samples))
            wall[name].append((time.perf_counter() - began_wall) / len(samples))
    print(f"\n| {title} | images/s | CPU ms | x | PSNR dB, least / median |\n|---|---|---|---|---|")
    first = statistics.median(next(iter(cpu.values())))
    for name in rows:
        median = statistics.median(cpu[name])
        print(
            f"| {name} | {1 / statistics.median(wall[name]):.0f} | {median:.2f} [{min(cpu[name]):.2f}, "
            f"{max(cpu[name]):.2f}] | {first / median:.2f} | {fidelity[name]} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of images, searched to any depth")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples = _load(options.data, options.images, options.seed)
    height, width = (round(statistics.median(s.pixels.shape[axis] for s in samples)) for axis in (0, 1))
    kilobytes = statistics.median(len(s.data) for s in samples) / 1e3
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"torchvision {torchvision.__version__}, Pillow {Image.__version__}"
    )
    print(f"{options.rounds} rounds of {len(samples)} images of about {width} x {height}, {kilobytes:.0f} kB")
    decoders = _decoders()
    table("both", both(decoders, options.size), samples, options.rounds)


if __name__ == "__main__":
    main()

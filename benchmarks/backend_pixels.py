"""How far are the pixels of each image backend from those of backend="torch" with Pillow's decoder?

All rows load the same files through ImageFolderDataModule, with one seed: the same order and the same boxes, which is
checked by the labels. Compared is what ``device_transform`` gives, in grey levels (0 to 255), with the recipe of
training (random box, flip) and that of evaluation:

* PSNR of each image, in dB: the median and the least of all. "same": no pixel of any image differs.
* the mean absolute difference over all values, in levels
* the share of pixels that differ by more than 2, and more than 8, levels in any channel; "inside": of those that lie
  more than 3 pixels from the edge of the image

``nvjpeg, the CPU in its place`` is that backend's way from a decoded image to a batch, with Pillow's pixels: what the
GPU's decoder adds is in the row ``nvjpeg``. The interpolations of DALI are put in place of the one that the backend
uses. What needs a GPU is left out where there is none.

    python benchmarks/backend_pixels.py --data DIR [--images 600] [--size 224] [--seed 0] [--json FILE]
"""

import argparse
import contextlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from backend_machine import machine_line, why_missing
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.data import image_backends, images
from lightning_feed.decode.choose import DECODER_NAMES, make_decoder
from lightning_feed.errors import MissingExtraError
from lightning_feed.images.crop import QUALITIES
from lightning_feed.transfer import gpu_decode as device_decode

SUFFIXES = (".jpg", ".jpeg")
BATCH_SIZE = 64
SAME = 1e-3
"""Levels. What is less is the rounding of float32, through which all values go."""
EDGE = 3
SPLITS = {"train": "train_dataloader", "val": "val_dataloader"}


class Row(NamedTuple):
    """A way to make batches."""

    name: str
    options: dict[str, Any]
    """For ImageFolderDataModule."""
    device: torch.device = torch.device("cpu")
    inside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """What is entered while it runs."""


class Difference(NamedTuple):
    """From the reference, over all images of a split."""

    psnr_db: float
    """Median of the images."""
    least_psnr_db: float
    mean_levels: float
    over_2_pct: float
    over_2_inside_pct: float
    over_8_pct: float
    most_levels: float


REFERENCE = Row('torch, "pillow", exact', {"decoder": "pillow"})


def main() -> None:
    """Measure all rows, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder with JPEGs at any depth")
    parser.add_argument("--images", type=int, help="at most so many of them")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of rows, or parts of them, with semicolons between")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of few workers
    files = sorted(path for path in arguments.data.rglob("*") if path.suffix.lower() in SUFFIXES)[: arguments.images]
    print(f"{machine_line()}; {len(files)} JPEGs to {arguments.size} x {arguments.size}, seed {arguments.seed}\n")
    wanted = [part for part in arguments.only.split(";") if part]
    rows, left_out = _rows()
    rows = [row for row in rows if not wanted or any(part in row.name for part in wanted)]
    figures: dict[str, dict[str, Any]] = {split: {} for split in SPLITS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = _link(files, Path(scratch))
        for split in SPLITS:
            made = partial(_batches, folder=folder, split=split, size=arguments.size, seed=arguments.seed)
            reference = list(made(REFERENCE))
            _head("RandomResizedCrop and flip" if split == "train" else "Resize and CenterCrop")
            for row in rows:
                found = figures[split][row.name] = _compare(made(row), reference)._asdict()
                _show(row.name, Difference(**found))
            for name, reason in left_out.items():
                print(f"| {name} | not measured: {reason} | | | | | | |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine_line(), **figures}, indent=1))


def _rows() -> tuple[list[Row], dict[str, str]]:
    """What can run here; and what cannot, with the reason."""
    rows, left_out = [], {}
    for decoder in DECODER_NAMES[:0:-1]:
        try:
            make_decoder(decoder)
        except MissingExtraError as error:
            left_out[f'torch, "{decoder}"'] = str(error)
            continue
        for quality in QUALITIES:
            row = Row(f'torch, "{decoder}", {quality}', {"decoder": decoder, "quality": quality})
            rows += [row] if row.name != REFERENCE.name else []
    for quality in ("exact", "fast"):  # "near" gives what "exact" does
        options = {"backend": "nvjpeg", "decoder": "pillow", "quality": quality}
        rows.append(Row(f"nvjpeg, the CPU in its place, {quality}", options, inside=_nvjpeg_on_cpu))
    if reason := why_missing("dali-cpu", torch.device("cpu")):
        left_out["dali-cpu"] = reason
    else:
        rows.append(Row("dali-cpu", {"backend": "dali-cpu"}))
        for name, (kind, antialias) in INTERPOLATIONS.items():
            rows.append(Row(f"dali-cpu, {name}", {"backend": "dali-cpu"}, inside=partial(_resized_by, kind, antialias)))
    gpu = torch.device("cuda", 0)
    for backend in ("nvjpeg", "dali-gpu"):
        reason = "no GPU"
        if torch.cuda.is_available():
            reason = why_missing(backend, gpu)
        if reason:
            left_out[backend] = reason
        else:
            rows.append(Row(backend, {"backend": backend}, gpu))
    return rows, left_out


# --- what stands in place of what a backend does ----------------------------------------------------------------------

INTERPOLATIONS = {
    "INTERP_TRIANGULAR, antialiased": ("INTERP_TRIANGULAR", True),
    "INTERP_LINEAR, antialiased": ("INTERP_LINEAR", True),
    "INTERP_LINEAR, not antialiased": ("INTERP_LINEAR", False),
    "INTERP_CUBIC, antialiased": ("INTERP_CUBIC", True),
    "INTERP_LANCZOS3, antialiased": ("INTERP_LANCZOS3", True),
}
"""By name: the value of ``nvidia.dali.types``, and whether ``antialias`` is on."""


@contextlib.contextmanager
def _resized_by(kind: str, antialias: bool) -> Iterator[None]:  # noqa: FBT001
    from nvidia.dali import fn, types

    resize = fn.resize

    def other(*inputs: Any, **options: Any) -> Any:
        return resize(*inputs, **options | {"interp_type": getattr(types, kind), "antialias": antialias})

    with mock.patch.object(fn, "resize", other):
        yield


@contextlib.contextmanager
def _nvjpeg_on_cpu() -> Iterator[None]:
    decoder = make_decoder("pillow").decoder

    def decode(files: list[Tensor]) -> list[Tensor]:
        return [torch.from_numpy(np.array(decoder.decode(file.numpy()))).permute(2, 0, 1) for file in files]

    with (
        mock.patch.object(images, "decode_batch", partial(device_decode.decode_batch, decode=decode)),
        mock.patch.object(image_backends, "GPU_BACKENDS", ()),
    ):
        yield


# --- batches, and their differences -----------------------------------------------------------------------------------


def _link(files: list[Path], folder: Path) -> Path:
    """The files as training images and as those to validate with, in two classes."""
    for split in SPLITS:
        for number, path in enumerate(files):
            target = folder / split / f"class_{number % 2}" / f"{number:06}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.resolve())
    return folder


def _batches(row: Row, *, folder: Path, split: str, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch: grey levels, shape (B, 3, size, size), and labels."""
    with row.inside():
        made = ImageFolderDataModule(
            folder,
            BATCH_SIZE,
            image_size=size,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            loader=LoaderSettings(num_workers=2, workers="thread", seed=seed, pin_memory=False),
            **row.options,
        )
        for batch in getattr(made, SPLITS[split])():
            values, labels = made.device_transform(move_data_to_device(batch, row.device), split)
            yield values.float().cpu() * 255, labels.cpu()


def _compare(ours: Iterator[tuple[Tensor, Tensor]], reference: list[tuple[Tensor, Tensor]]) -> Difference:
    psnr: list[float] = []
    total = most = 0.0
    over_2 = over_8 = inside_2 = inside = pixels = 0
    for (values, labels), (expected, expected_labels) in zip(ours, reference, strict=True):
        if not torch.equal(labels, expected_labels):
            raise RuntimeError("the batches differ in their order")
        apart = (values - expected).abs()
        apart[apart < SAME] = 0
        squares = apart.double().square().mean((1, 2, 3)).tolist()
        psnr += [math.inf if square == 0 else 10 * math.log10(255**2 / square) for square in squares]
        total += apart.double().sum().item() / 3
        most = max(most, apart.max().item())
        of_pixel = apart.amax(1)
        over_2 += int((of_pixel > 2).sum())
        over_8 += int((of_pixel > 8).sum())
        middle = of_pixel[:, EDGE:-EDGE, EDGE:-EDGE]
        inside_2 += int((middle > 2).sum())
        inside += middle.numel()
        pixels += of_pixel.numel()
    return Difference(
        psnr_db=median(psnr),
        least_psnr_db=min(psnr),
        mean_levels=total / pixels,
        over_2_pct=100 * over_2 / pixels,
        over_2_inside_pct=100 * inside_2 / inside,
        over_8_pct=100 * over_8 / pixels,
        most_levels=most,
    )


def _head(recipe: str) -> None:
    print(f"\n| {recipe} | PSNR dB, median | least | mean, levels | > 2, % | inside | > 8, % | most, levels |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")


def _show(name: str, found: Difference) -> None:
    if found.most_levels == 0:
        print(f"| {name} | same | same | 0 | 0 | 0 | 0 | 0 |", flush=True)
        return
    middle = "same" if found.psnr_db == math.inf else f"{found.psnr_db:.1f}"
    print(
        f"| {name} | {middle} | {found.least_psnr_db:.1f} | {found.mean_levels:.3f} | {found.over_2_pct:.3f} | "
        f"{found.over_2_inside_pct:.3f} | "
        f"{found.over_8_pct:.3f} | {found.most_levels:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

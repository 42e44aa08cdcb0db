"""Images for the demo and the examples, made from photographs that come with scikit-image."""

import tempfile
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms import v2
from tqdm import tqdm

from lightning_feed.errors import DatasetError
from lightning_feed.extras import require

SIDES = (768, 1024)
"""Smallest and largest side of the images that are made, in pixels. Today's photos are even larger. With thumbnails of
300 pixels, little decoding could be saved."""
# Photographs in scikit-image's wheel (nothing is downloaded), freed for any use by their docstrings in skimage.data:
# public domain: astronaut (NASA), hubble_deep_field (NASA), rocket (SpaceX);
# CC0: brick, camera (Lav Varshney), chelsea (Stefan van der Walt), coffee (Rachel Michetti), grass, gravel,
#      retina (Mikael Haeggstroem).
# Left out: those without a licence note (moon, stereo_motorcycle) or with "no known restrictions" only.
SOURCES = (
    "astronaut", "brick", "camera", "chelsea", "coffee", "grass", "gravel", "hubble_deep_field", "retina", "rocket",
)  # fmt: skip


def make_images(out: Path, count: int) -> Path:
    """Write ``count`` JPEGs of 768 to 1,024 pixels a side, one class folder per source photograph; reuse finished ones.

    The folder is written under a temporary name beside its final path, and renamed when it is complete.

    Args:
        out: the folder for ``pictures-<count>``.
        count: number of images, 1 or more.

    Raises:
        DatasetError: if the images cannot be written.
        MissingExtraError: if scikit-image is not installed.
    """
    target = out / f"pictures-{count}"
    if target.exists():
        return target
    data = require("skimage.data", extra="demo", why="making the demo's images")
    photographs = [(name, Image.fromarray(getattr(data, name)()).convert("RGB")) for name in SOURCES[:count]]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as private:
            unfinished = Path(private, target.name)
            for index in tqdm(range(count), desc="making images", unit="image", disable=None):
                name, photograph = photographs[index % len(photographs)]
                (unfinished / name).mkdir(parents=True, exist_ok=True)
                _write_varied(photograph, unfinished / name / f"{index:06d}.jpg", index)
            unfinished.rename(target)
    except OSError as error:
        raise DatasetError(
            f"the images could not be written to {out}: {error}. Choose another folder with --out."
        ) from error
    return target


def _write_varied(photograph: Image.Image, path: Path, seed: int) -> None:
    """Write a random crop, perhaps mirrored, lighter or darker, as a JPEG of random quality: no two files are alike.

    Photographs smaller than the crop are padded with their mirror image. Enlarging them would blur them, so that their
    JPEGs would be smaller, and faster to decode, than real JPEGs of that size.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sides = torch.randint(SIDES[0], SIDES[1] + 1, (2,)).tolist()
        crop = v2.RandomCrop(sides, pad_if_needed=True, padding_mode="symmetric")
        varied = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ColorJitter(brightness=0.3)])(photograph)
        varied.save(path, format="JPEG", quality=int(torch.randint(75, 96, ())))

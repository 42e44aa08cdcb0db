"""The demo's pictures: made once from photographs that scikit-image ships, or found in the user's own folder."""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.extras import require

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# Photographs in scikit-image's wheel (nothing is downloaded), freed for any use by their docstrings in skimage.data:
# public domain: astronaut (NASA), hubble_deep_field (NASA), rocket (SpaceX);
# CC0: brick, camera (Lav Varshney), chelsea (Stefan van der Walt), coffee (Rachel Michetti), grass, gravel,
#      retina (Mikael Haeggstroem).
# Left out: those without a licence note (moon, stereo_motorcycle) or with "no known restrictions" only.
SOURCES = (
    "astronaut",
    "brick",
    "camera",
    "chelsea",
    "coffee",
    "grass",
    "gravel",
    "hubble_deep_field",
    "retina",
    "rocket",
)
_MOST_IMAGES = 100_000
_SIDE_PX = (280, 480)
_JPEG_QUALITY = (75, 95)
_BRIGHTNESS = (0.7, 1.3)
# The mean over 2,000 files was 25,001 bytes; asking for twice that keeps the disk from running full.
_BYTES_PER_PICTURE = 50_000
_SUFFIXES = {".jpg", ".jpeg", ".png"}


class PictureFolder(NamedTuple):
    """Labelled picture files."""

    root: Path
    classes: tuple[str, ...]
    samples: tuple[tuple[Path, int], ...]
    """(file, index into ``classes``), in the order of the file names."""


def make_pictures(out: Path, count: int) -> Path:
    """Write ``count`` JPEGs of 280 to 480 pixels a side, one class folder per source photograph; reuse finished ones.

    The folder appears under its name only when it is complete: it is written beside it and renamed.

    Args:
        out: where the folder ``pictures-<count>`` goes.
        count: how many, 1 to 100,000.

    Raises:
        SettingsError: when ``count`` is out of range.
        DatasetError: when the disk is too full or refuses, or a finished folder has lost files since.
        MissingExtraError: without scikit-image.
    """
    if not 1 <= count <= _MOST_IMAGES:
        raise SettingsError(f"--images {count}: the demo needs between 1 and {_MOST_IMAGES:,} pictures.")
    target = out / f"pictures-{count}"
    if target.exists():
        return _checked(target, count)
    data = require("skimage.data", extra="demo", why="making the demo's pictures")
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
        if free < count * _BYTES_PER_PICTURE:
            raise DatasetError(
                f"{count:,} pictures may take {count * _BYTES_PER_PICTURE / 1e6:,.0f} MB and {out} has "
                f"{free / 1e6:,.0f} MB free. Make room, or choose another folder with --out or fewer with --images."
            )
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
        try:
            _write(unfinished, count, {name: getattr(data, name)() for name in SOURCES[:count]})
            unfinished.chmod(0o755)  # mkdtemp's is for the owner alone
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # gone already when the rename went through
    except OSError as error:
        if target.exists():  # another demo finished the same folder first
            return _checked(target, count)
        raise DatasetError(
            f"the pictures could not be written to {out}: {error}. Choose another folder with --out."
        ) from error
    return target


def find_pictures(root: Path, most: int) -> PictureFolder:
    """List the pictures of a folder of class folders, at most ``most`` of them, taken evenly over the whole list.

    Raises:
        SettingsError: when ``most`` is below 1.
        DatasetError: when the folder is missing or holds no class folders with JPEG or PNG files.
    """
    if most < 1:
        raise SettingsError(f"--images {most}: at least 1 picture is needed.")
    if not root.is_dir():
        raise DatasetError(
            f"{root} is not a folder. Give --data a folder that holds one folder of pictures for each class."
        )
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DatasetError(
            f"{root} holds no class folders. Put the pictures into one folder for each class, as in {root}/cats/1.jpg."
        )
    files = {folder.name: sorted(f for f in folder.iterdir() if f.suffix.lower() in _SUFFIXES) for folder in folders}
    classes = tuple(name for name, found in files.items() if found)
    samples = [(file, label) for label, name in enumerate(classes) for file in files[name]]
    if not samples:
        raise DatasetError(
            f"the folders in {root} hold no JPEG or PNG files ({len(folders)} looked into, not deeper). "
            "The pictures belong directly into the class folders."
        )
    taken = min(most, len(samples))
    return PictureFolder(root, classes, tuple(samples[i * len(samples) // taken] for i in range(taken)))


def _checked(folder: Path, count: int) -> Path:
    found = sum(1 for _ in folder.glob("*/*.jpg"))
    if found != count:
        raise DatasetError(f"{folder} holds {found:,} of {count:,} pictures. Delete it, and the demo makes it again.")
    return folder


def _write(folder: Path, count: int, photographs: "dict[str, np.ndarray]") -> None:
    import numpy as np
    from PIL import Image
    from tqdm import tqdm

    sources = [(name, Image.fromarray(pixels).convert("RGB")) for name, pixels in photographs.items()]
    for name, _ in sources:
        (folder / name).mkdir()
    for index in tqdm(range(count), desc="making pictures", unit="picture", disable=not sys.stderr.isatty()):
        name, photograph = sources[index % len(sources)]
        jpeg = _varied_jpeg(photograph, np.random.default_rng([index, count]))
        (folder / name / f"{index:06d}.jpg").write_bytes(jpeg)


def _varied_jpeg(photograph: "Image.Image", rng: "np.random.Generator") -> bytes:
    """A random crop, perhaps mirrored, lighter or darker, as a JPEG of random quality: no two files are alike."""
    from PIL import Image, ImageEnhance

    width, height = (int(rng.integers(_SIDE_PX[0], min(_SIDE_PX[1], side) + 1)) for side in photograph.size)
    left = int(rng.integers(0, photograph.width - width + 1))
    top = int(rng.integers(0, photograph.height - height + 1))
    crop = photograph.crop((left, top, left + width, top + height))
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    crop = ImageEnhance.Brightness(crop).enhance(float(rng.uniform(*_BRIGHTNESS)))
    buffer = io.BytesIO()
    crop.save(buffer, format="JPEG", quality=int(rng.integers(_JPEG_QUALITY[0], _JPEG_QUALITY[1] + 1)))
    return buffer.getvalue()

"""What stands in a pack beside the data: a manifest as JSON, and an index of arrays for each part."""

import json
import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import ArchiveError

NAME = "pack.json"
VERSION = 1
ALL = "all"
"""The name of the only part of a pack that has no splits."""

Format = Literal["lmdb", "hdf5", "litdata"]
FORMATS: tuple[Format, ...] = ("lmdb", "hdf5", "litdata")
Kind = Literal["files", "decoded", "samples"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a pack is. Written last: a folder without it is no pack."""

    format: Format
    kind: Kind
    """Encoded files as they are or re-encoded; decoded pixels; or samples of a dataset."""
    classes: tuple[str, ...]
    """Names of the labels; empty for samples of a dataset."""
    parts: dict[str, int]
    """Samples of each part: ``train``, ``val`` ..., or ``all``."""
    total_bytes: int
    options: dict[str, Any]
    """What was asked for: ``short_side``, ``quality``."""
    files: dict[str, int]
    """Bytes of each data file, by its path in the pack."""
    version: int = VERSION

    def save(self, folder: Path) -> None:
        """Write it, atomically."""
        temporary = folder / f"{NAME}.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(folder / NAME)


def is_pack(path: str | Path) -> bool:
    """Whether ``path`` is a pack. Looks for one file."""
    return (Path(path) / NAME).is_file()


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack.

    Raises:
        ArchiveError: when there is none, it is cut short, or another version wrote it.
    """
    try:
        found = json.loads((path / NAME).read_text())
    except FileNotFoundError as error:
        raise ArchiveError(f"{path} is no pack: it has no {NAME}. To make one: lightning-feed pack SRC DEST") from error
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{path / NAME} cannot be read: {error}. Pack the source again.") from error
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ArchiveError(
            f"{path} is a pack of version {version!r}, and this lightning_feed reads version {VERSION}. Pack the "
            "source again, or read it with the version that wrote it."
        )
    if set(found) != {field.name for field in fields(Manifest)} or found["format"] not in FORMATS:
        raise ArchiveError(f"{path / NAME} is not the manifest of a pack. Pack the source again.")
    return Manifest(**{**found, "classes": tuple(found["classes"])})


def check_files(path: Path, manifest: Manifest, part: str) -> None:
    """See whether the data files of a part are there and as long as they were.

    Raises:
        ArchiveError: for the first that is not.
    """
    for name, size in manifest.files.items():
        if not name.startswith(f"{part}/"):
            continue
        try:
            there = (path / name).stat().st_size
        except OSError as error:
            raise ArchiveError(f"{path / name} cannot be read: {error.strerror}. Copy or pack it again.") from error
        if there != size:
            raise ArchiveError(
                f"{path / name} has {there} bytes, and {size} were packed: it is cut short or damaged. Copy or pack it "
                "again."
            )


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The samples of one part, in flat arrays: a million of them cost no Python objects."""

    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    """Bytes of each payload."""
    checksums: npt.NDArray[np.uint32]
    """CRC-32 of each payload."""
    names: npt.NDArray[np.uint8]
    """All names, one after the other, in UTF-8 (undecodable bytes as they were)."""
    name_ends: npt.NDArray[np.int64]

    def name(self, index: int) -> str:
        """What sample ``index`` was called in the source."""
        begin = int(self.name_ends[index - 1]) if index else 0
        return self.names[begin : int(self.name_ends[index])].tobytes().decode("utf-8", "surrogateescape")

    def save(self, path: Path) -> None:
        """Write it as ``.npz``."""
        with path.open("wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> "PartIndex":
        """Read it.

        Raises:
            ArchiveError: when it is missing or cut short, or the labels are no integers.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                read = cls(**{field.name: stored[field.name] for field in fields(cls)})
            if read.labels.dtype.kind not in "iu" or read.labels.shape != read.sizes.shape:
                found = f"{read.labels.dtype} of shape {read.labels.shape}"
                raise ValueError(f"its labels are not one integer for each of {len(read.sizes)} samples, but {found}")
            return read
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ArchiveError(
                f"{path} cannot be read: {error}. The pack is damaged: pack the source again."
            ) from error

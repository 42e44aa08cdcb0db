"""What stands in a pack beside the data: a manifest as JSON, and an index of arrays for each part."""

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

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
_PARTS = {ALL, "train", "val", "test"}


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
    indexes: dict[str, str] = field(default_factory=dict)
    """The digest of each part's index, which holds the checksums of all samples; none in packs of earlier versions."""

    @property
    def identity(self) -> str:
        """A digest of all that is packed: the same for the same data, and another for any other."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write it, atomically."""
        temporary = folder / f"{NAME}.tmp"
        temporary.write_text(json.dumps({**asdict(self), "checksum": self.identity}, indent=1))
        temporary.replace(folder / NAME)


def is_pack(path: str | Path) -> bool:
    """Whether ``path`` is a pack. Looks for one file."""
    return os.path.isfile(os.path.join(path, NAME))  # noqa: PTH113, PTH118 - False, too, where it cannot be looked for


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack.

    Raises:
        ArchiveError: when there is none, it is damaged, or another version wrote it.
    """
    if not is_pack(path):
        raise ArchiveError(f"{path} is no pack: it has no {NAME}. To make one: lightning-feed pack SRC DEST")
    try:
        found = json.loads((path / NAME).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{path / NAME} cannot be read: {error}. Pack the source again.") from error
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ArchiveError(
            f"{path} is a pack of version {version!r}, and this lightning_feed reads version {VERSION}. Pack the "
            "source again, or read it with the version that wrote it."
        )
    checksum = found.pop("checksum", None)
    if not _has_the_types(found):
        raise ArchiveError(f"{path / NAME} is not the manifest of a pack. Pack the source again.")
    manifest = Manifest(**{**found, "classes": tuple(found["classes"])})
    if checksum != manifest.identity and (checksum is not None or manifest.indexes):  # earlier versions wrote neither
        raise ArchiveError(f"{path / NAME} is damaged: its checksum does not fit. Copy or pack it again.")
    return manifest


def _has_the_types(found: dict[str, Any]) -> bool:
    """Whether what was read from JSON is a manifest: a stranger may have written it."""
    if {*found, "indexes"} != {each.name for each in fields(Manifest)}:
        return False
    tables = [found["parts"], found["files"], found["options"], found.get("indexes", {})]
    return (
        all(isinstance(table, dict) for table in tables)
        and found["format"] in FORMATS
        and found["kind"] in get_args(Kind)
        and isinstance(found["classes"], list)
        and all(isinstance(name, str) for name in found["classes"])
        and bool(found["parts"])
        and _PARTS.issuperset(found["parts"])
        and all(
            type(number) is int and number >= 0
            for number in (*found["parts"].values(), *found["files"].values(), found["total_bytes"])
        )
    )


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
            np.savez(file, **{each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def load(cls, path: Path, digest: str | None = None) -> "PartIndex":
        """Read it.

        Args:
            path: the file.
            digest: what :func:`digest_of` gave when it was written; None where that is not known.

        Raises:
            ArchiveError: when it is missing or damaged, or the labels are no integers.
        """
        try:
            content = path.read_bytes()
            if digest is not None and digest_of(content) != digest:
                raise ValueError("it is not the one that was written with the pack")
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                read = cls(**{each.name: stored[each.name] for each in fields(cls)})
            for name in ("labels", "checksums", "name_ends", "sizes"):
                array = getattr(read, name)
                if array.dtype.kind not in "iu" or array.shape != (len(read.sizes),):
                    raise ValueError(
                        f"its {name} are not one integer for each of {len(read.sizes)} samples, but {array.dtype} of "
                        f"shape {array.shape}"
                    )
            return read
        except Exception as error:  # of NumPy, zipfile or zlib: a flipped bit can raise nearly anything
            raise ArchiveError(
                f"{path} cannot be read: {error}. The pack is damaged: copy it again, or pack the source again."
            ) from error


def digest_of(content: bytes) -> str:
    """What tells an index from any other."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()

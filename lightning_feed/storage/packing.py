"""Packing a folder of many small files into a few large ones."""

import io
import os
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from lightning_feed.errors import ArchiveError, DatasetError, DecodeError, SettingsError
from lightning_feed.extras import require
from lightning_feed.machine.file_system import check_room
from lightning_feed.machine.limits import read_machine
from lightning_feed.machine.progress import progress_bar
from lightning_feed.storage.folder import FolderSource, is_pack, scan_classes
from lightning_feed.storage.packed_dataset import (
    ALL,
    DATA_FILES,
    FORMATS,
    Format,
    Manifest,
    PackedDataset,
    PartIndex,
    lmdb_key,
    read_manifest,
    with_shape,
)
from lightning_feed.storage.splits import SPLITS, folder_of_split, has_splits
from lightning_feed.storage.whole import Workshop

_LOOKED_AT = 64
"""Number of samples used to estimate the size of the pack."""
_JPEG_QUALITY = 95
_LMDB_MAP_BYTES = 1 << 42
"""Largest size of an LMDB pack. Only address space: the file grows with its content."""
_COMMITTED_BYTES = 64 << 20
"""Bytes of samples in one transaction of LMDB."""
# Exceptions that Pillow raises for corrupt files; the same as in images/decoders.py.
_CORRUPT = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """Result of :func:`pack`."""

    path: Path
    samples: int
    total_bytes: int
    """Bytes of all samples."""
    skipped: tuple[str, ...]
    """Samples left out, each with the reason; only with ``on_error="skip"``."""
    took_s: float


@dataclass(frozen=True, kw_only=True)
class ImageChanges:
    """Changes made to images when they are packed."""

    short_side: int | None
    """Maximum length of the shorter side, in pixels. Larger images are resized to it; smaller ones stay unchanged."""
    decoded: bool
    """True to store pixels, uint8 (H, W, 3), instead of a file."""

    def apply(self, data: bytes) -> bytes:
        """Return the bytes to store for a file.

        Raises:
            DecodeError: if the file must be decoded for the change, but cannot be.
        """
        if self.short_side is None and not self.decoded:
            return data
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()  # even without resizing, to notice a truncated file now
                if not self.decoded and min(image.size) <= (self.short_side or 0):
                    return data  # small enough already: re-encoding would only lose quality
                return self._stored(self._resized(image.convert("RGB")))
        except UnidentifiedImageError as error:  # Pillow's message names only the in-memory file object
            raise DecodeError("Pillow does not know its format") from error
        except _CORRUPT as error:
            raise DecodeError(str(error)) from error

    def _resized(self, image: Image.Image) -> Image.Image:
        short = min(image.size)
        if self.short_side is None or short <= self.short_side:
            return image
        scale = self.short_side / short
        width = max(1, round(image.width * scale))
        height = max(1, round(image.height * scale))
        return image.resize((width, height), Image.Resampling.BICUBIC)

    def _stored(self, image: Image.Image) -> bytes:
        if self.decoded:
            return with_shape(np.asarray(image))
        file = io.BytesIO()
        # Full resolution of the colours: most files have it halved already, and halving it again would lose more.
        image.save(file, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
        return file.getvalue()


def pack(  # noqa: PLR0913 - all but two are by name, and have a default
    source: str | Path,
    dest: str | Path,
    *,
    format: Format = "flat",
    short_side: int | None = None,
    decoded: bool = False,
    on_error: str = "raise",
    force: bool = False,
    verify: bool = False,
) -> PackReport:
    """Pack a folder of class folders, optionally inside ``train``, ``val`` and ``test`` folders.

    The pack is made in a hidden folder beside ``dest`` and renamed at the end. After an interruption, call the function
    again: packing starts from the beginning. HDF5 packs need space for twice the data until they are complete.

    Args:
        source: a folder.
        dest: path of the pack; must not exist, unless ``force`` is True.
        format: ``"flat"``, ``"lmdb"`` or ``"hdf5"``.
        short_side: resize images whose shorter side is longer than this, in pixels.
        decoded: True to store pixels, uint8 (H, W, 3), instead of files.
        on_error: ``"raise"``, or ``"skip"`` to leave out images that cannot be read, and report them.
        force: True to replace an existing pack.
        verify: True to read everything back and compare checksums.

    Raises:
        SettingsError: if a value is impossible.
        DatasetError: if the source cannot be read.
        ArchiveError: if ``dest`` exists, is inside the source, or is in use by another process that packs; if space
            runs out; if an image cannot be read; or if verification fails.
    """
    began_s = time.monotonic()
    root = Path(source)
    target = Path(dest)
    _check_settings(format, short_side, on_error)
    _check_target(target, root, force=force)
    changes = ImageChanges(short_side=short_side, decoded=decoded)
    sources = _sources_in(root)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArchiveError(f"{target.parent} cannot be created: {error.strerror}. Choose another DEST.") from error
    workshop = Workshop(target, "packing")
    with workshop.claimed(wait=False):
        _check_target(target, root, force=force)  # again, because another process may have packed there since
        _check_room(workshop.folder, sources, changes, format)
        parts: dict[str, int] = {}
        skipped: list[str] = []
        for name, part in sources.items():
            with closing(PartWriter(workshop.whole / name, format)) as writer:
                skipped += _fill(writer, name, part, changes, on_error)
                parts[name] = writer.finish()
        classes = next(iter(sources.values())).classes
        Manifest(format=format, decoded=decoded, classes=classes, parts=parts).save(workshop.whole)
        if verify:
            verify_pack(workshop.whole)
        workshop.put_in_place()
    packed = [PackedDataset(target, name) for name in parts]
    return PackReport(
        path=target,
        samples=sum(map(len, packed)),
        total_bytes=sum(part.total_bytes for part in packed),
        skipped=tuple(skipped),
        took_s=time.monotonic() - began_s,
    )


def verify_pack(path: str | Path) -> int:
    """Read every sample of a pack, and compare its checksum with the checksum recorded at packing.

    Returns:
        The number of samples.

    Raises:
        ArchiveError: for the first sample that differs or cannot be read.
    """
    samples = 0
    for name in read_manifest(Path(path)).parts:
        part = PackedDataset(path, name)
        with progress_bar(f"Verifying {name}", len(part), " samples") as bar:
            for index in range(len(part)):
                part.verify(index)
                bar.update()
        samples += len(part)
    return samples


# --- before anything is written ---------------------------------------------------------------------------------------


def _check_settings(format: str, short_side: int | None, on_error: str) -> None:
    if format not in FORMATS:
        raise SettingsError(f"format={format!r} is not valid. Use one of {', '.join(map(repr, FORMATS))}.")
    if on_error not in ("raise", "skip"):
        raise SettingsError(f"on_error={on_error!r} is not valid. Use 'raise' or 'skip'.")
    if short_side is not None and (type(short_side) is not int or short_side < 1):
        raise SettingsError(f"short_side={short_side!r} is not valid. Use pixels, 1 or more.")


def _check_target(target: Path, root: Path, *, force: bool) -> None:
    if target.absolute().resolve().is_relative_to(root.resolve()):
        raise ArchiveError(f"{target} is inside {root}, the folder to pack. Choose a DEST outside of it.")
    if not os.path.lexists(target):
        return
    if not is_pack(target):
        raise ArchiveError(f"{target} already exists and is not a pack, so it is not replaced. Choose another DEST.")
    if not force:
        raise ArchiveError(f"{target} already exists. Choose another DEST, or pass --force (force=True) to replace it.")


def _sources_in(root: Path) -> dict[str, FolderSource]:
    """Return the source files of each part of the pack: of each split, or of ``all`` if there are no split folders."""
    if not has_splits(root):
        return {ALL: FolderSource(root, scan_classes(root))}
    sources = {split: folder_of_split(root, split) for split in SPLITS}
    return {split: source for split, source in sources.items() if source is not None}


def _check_room(folder: Path, sources: dict[str, FolderSource], changes: ImageChanges, format: Format) -> None:
    """Refuse a pack that does not fit, estimating its size from the sizes of some samples."""
    needed = 0
    for source in sources.values():
        numbers = range(0, len(source), max(1, len(source) // _LOOKED_AT))
        samples = [_sample(source, number, changes) for number in numbers]
        sizes = [64 + len(sample) for sample in samples if isinstance(sample, bytes)]
        if format == "lmdb":  # all but small samples take whole pages
            sizes = [size if size < 1024 else -(-size // 4096) * 4096 for size in sizes]
        needed += sum(sizes) * len(source) // max(1, len(sizes))
    times = 2.1 if format == "hdf5" else 1.05
    check_room(int(needed * times), 2 * len(sources) + 1, str(folder))


# --- reading the source -----------------------------------------------------------------------------------------------


def _fill(writer: "PartWriter", name: str, source: FolderSource, changes: ImageChanges, on_error: str) -> list[str]:
    """Read and write all samples of a part. Return a sentence for each sample that was left out, with the reason."""
    skipped = []
    with progress_bar(f"Packing {name}", len(source), " samples") as bar:
        for number, sample in enumerate(_samples(source, changes)):
            bar.update()
            if isinstance(sample, bytes):
                writer.append(sample, int(source.labels[number]), bytes(source.index.paths[number]))
            elif on_error == "skip":
                skipped.append(str(sample))
            else:
                raise ArchiveError(f"{sample} Fix the file, or skip it (--on-error skip), and pack again.") from sample
    return skipped


def _samples(source: FolderSource, changes: ImageChanges) -> Iterator[bytes | DatasetError]:
    """Yield the bytes of each sample in order, or the error if a sample cannot be read."""
    threads = read_machine().usable_cpus
    at_once = 4 * threads  # so few, because decoded images take much memory
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(source), at_once):
            numbers = range(start, min(start + at_once, len(source)))
            yield from pool.map(lambda number: _sample(source, number, changes), numbers)


def _sample(source: FolderSource, number: int, changes: ImageChanges) -> bytes | DatasetError:
    try:
        return changes.apply(source.read(number))
    except DecodeError as error:
        return DecodeError(f"{source.name(number)} (sample {number}) is not a readable image: {error}.")
    except DatasetError as error:
        return error


# --- the data and the index of a part ---------------------------------------------------------------------------------


class PartWriter:
    """Writes the samples and the index of one part.

    Args:
        folder: the folder of the part; must not exist.
        format: the format of its data.
    """

    def __init__(self, folder: Path, format: Format) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._path = folder / DATA_FILES[format]
        self._data = _WRITERS[format](self._path)
        self._labels: list[int] = []
        self._sizes: list[int] = []
        self._checksums: list[int] = []
        self._names: list[bytes] = []

    def append(self, sample: bytes, label: int, name: bytes) -> None:
        """Write the next sample."""
        self._data.append(sample)
        self._labels.append(label)
        self._sizes.append(len(sample))
        self._checksums.append(zlib.crc32(sample))
        self._names.append(name)

    def finish(self) -> int:
        """Complete the data file, and write the index. Return the size of the data file in bytes."""
        index = PartIndex(
            labels=np.array(self._labels, dtype=np.int64),
            ends=np.cumsum(self._sizes, dtype=np.int64),
            checksums=np.array(self._checksums, dtype=np.uint32),
            names=np.array(self._names, dtype=np.bytes_),
        )
        self._data.finish(index)
        index.save(self._folder / "index.npz")
        return self._path.stat().st_size

    def close(self) -> None:
        """Close the data file, complete or not."""
        self._data.close()


class _Writer(Protocol):
    def append(self, sample: bytes) -> None: ...

    def finish(self, index: PartIndex) -> None: ...

    def close(self) -> None: ...


class _FlatWriter:
    """Writer of a file in which the samples lie one after the other."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")

    def append(self, sample: bytes) -> None:
        self._file.write(sample)

    def finish(self, _index: PartIndex) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


class _LmdbWriter:
    """Writer of an LMDB environment with :func:`lmdb_key` as keys."""

    def __init__(self, path: Path) -> None:
        lmdb: Any = require("lmdb", extra="pack", why="Packing into lmdb")
        # No lock, and no flush for each transaction: no other process uses the environment yet.
        self._environment = lmdb.open(
            str(path.parent), lock=False, sync=False, readahead=False, map_size=_LMDB_MAP_BYTES
        )
        self._transaction = self._environment.begin(write=True)
        self._count = 0
        self._uncommitted_bytes = 0

    def append(self, sample: bytes) -> None:
        self._transaction.put(lmdb_key(self._count), sample, append=True)
        self._count += 1
        self._uncommitted_bytes += len(sample)
        if self._uncommitted_bytes >= _COMMITTED_BYTES:  # uncommitted samples stay in memory
            self._transaction.commit()
            self._transaction = self._environment.begin(write=True)
            self._uncommitted_bytes = 0

    def finish(self, _index: PartIndex) -> None:
        self._transaction.commit()
        self._environment.sync(True)  # noqa: FBT003 - LMDB's own form
        self.close()

    def close(self) -> None:
        self._environment.close()


class _Hdf5Writer:
    """Writer of an HDF5 file of two arrays: ``bytes``, uint8, all samples one after the other; ``ends``, int64.

    HDF5 needs the size of an array to create it, so the samples are first collected in a flat file.
    """

    def __init__(self, path: Path) -> None:
        self._h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
        self._path = path
        self._flat = path.with_suffix(".bin")
        self._writer = _FlatWriter(self._flat)

    def append(self, sample: bytes) -> None:
        self._writer.append(sample)

    def finish(self, index: PartIndex) -> None:
        self._writer.finish(index)
        samples = np.empty(0, np.uint8)
        if self._flat.stat().st_size:  # an empty file cannot be mapped
            samples = np.memmap(self._flat, np.uint8, "r")
        with self._h5py.File(self._path, "w") as file:
            file.create_dataset("ends", data=index.ends)
            file.create_dataset("bytes", data=samples)  # contiguous, so that it can be read by offset
        self._flat.unlink()

    def close(self) -> None:
        self._writer.close()


_WRITERS: dict[Format, type[_FlatWriter] | type[_LmdbWriter] | type[_Hdf5Writer]] = {
    "flat": _FlatWriter,
    "lmdb": _LmdbWriter,
    "hdf5": _Hdf5Writer,
}

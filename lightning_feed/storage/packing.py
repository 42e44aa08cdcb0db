"""Packing many small files, or any map-style dataset, into a few large files: checked, and atomic at the end."""

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader

from lightning_feed.errors import ArchiveError, SettingsError
from lightning_feed.extras import require
from lightning_feed.storage.file_system import find_room
from lightning_feed.storage.folder import FolderSource, flat_names, is_pack
from lightning_feed.storage.pack_samples import Payload, Payloads, Shrink
from lightning_feed.storage.packed_dataset import ALL, FORMATS, Format, Manifest, PackedDataset, PartIndex, lmdb_key
from lightning_feed.storage.remote import place_of
from lightning_feed.storage.remote_folder import RemoteSource
from lightning_feed.storage.splits import SPLITS, Root
from lightning_feed.storage.system import end_with, make_private, progress_bar

LITDATA = "packs use lmdb or hdf5; for LitData's chunks, use litdata.optimize"
_AT_ONCE = 16
"""Samples that a worker returns together, at most."""
_HANDED_OVER_BYTES = 16 << 20
"""Approximate bytes that a worker returns at once; each worker has two such batches waiting."""
_LOOKED_AT = 256
"""Number of samples used to estimate the size of the pack."""
_WRITTEN_BYTES = 64 << 20
"""Bytes of payloads that are written together."""


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """Result of :func:`pack`."""

    path: Path
    samples: int
    total_bytes: int
    """Bytes of all payloads."""
    skipped: tuple[str, ...]
    """Samples left out, each with the reason; only with ``on_error="skip"``."""
    took_s: float


def pack(  # noqa: PLR0913 - all but two are by name, and have a default
    source: object,
    dest: str | Path,
    *,
    format: Format = "lmdb",
    short_side: int | None = None,
    quality: int | None = None,
    decoded: bool = False,
    workers: int | None = None,
    on_error: str = "raise",
    force: bool = False,
    verify: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> PackReport:
    """Pack a folder of class folders, optionally inside ``train``, ``val`` ..., or a map-style dataset.

    The pack is made in a hidden folder beside ``dest`` and renamed at the end. After a kill or an error, the next call
    starts over. HDF5 packs need space for twice the data until they are done.

    Args:
        source: a folder or its fsspec URL; or a dataset whose samples are nested dicts, lists and tuples of tensors,
            arrays, numbers, text, bytes and None.
        dest: path of the pack; must not exist.
        format: ``"lmdb"`` or ``"hdf5"``.
        short_side: resize images whose shorter side is longer than this, in pixels.
        quality: JPEG quality, 1 to 100. With ``short_side``, used for the images that are shrunk (None: 95). Without
            ``short_side``, all images are re-encoded with this quality (None: none are).
        decoded: True to store pixels, uint8 (H, W, 3), instead of files.
        workers: processes that read and resize; None for one per CPU.
        on_error: for images that cannot be read: ``"raise"``, or ``"skip"`` to leave them out and report them.
        force: True to replace an existing pack.
        verify: True to read everything back and compare checksums.
        storage_options: options of fsspec for a URL.

    Raises:
        SettingsError: if a value is impossible.
        DatasetError: if the source cannot be read.
        ArchiveError: if ``dest`` exists, is inside the source, is in use by another process that packs, or is writable
            by another user; if space runs out; if the source changes during packing; or if verification fails.
    """
    began_s = time.monotonic()
    target = Path(dest)
    shrink = Shrink(short_side=short_side, quality=quality, decoded=decoded)
    _check(format, shrink, workers, on_error)
    _check_target(target, force=force)
    parts, classes = _parts_of(source, shrink, storage_options)
    _check_outside(target, parts)
    with in_the_making(target) as folder:
        _check_target(target, force=force)  # again, because another process may have packed there since
        _check_room(folder, parts, format)
        written = [PartWriter(folder / name, part, format) for name, part in parts.items()]
        for one in written:
            _fill(one, workers, on_error)
        for one in written:
            one.check_source()
        manifest = _manifest(written, format, classes, shrink)
        manifest.save(folder)
        if verify:
            verify_pack(folder)
        finish(folder, target)
    return PackReport(
        path=target,
        samples=sum(manifest.parts.values()),
        total_bytes=manifest.total_bytes,
        skipped=tuple(problem for one in written for problem in one.problems),
        took_s=time.monotonic() - began_s,
    )


def _manifest(written: "list[PartWriter]", format: Format, classes: tuple[str, ...], shrink: Shrink) -> Manifest:
    return Manifest(
        format=format,
        kind=written[0].part.kind,
        classes=classes,
        parts={one.name: one.samples for one in written},
        total_bytes=sum(one.total_bytes for one in written),
        options={"short_side": shrink.short_side, "quality": shrink.written_quality},
        files={name: size for one in written for name, size in one.files().items()},
        indexes={one.name: one.digest for one in written},
    )


def verify_pack(path: str | Path) -> int:
    """Read every sample of a pack, and compare its size and checksum with those recorded at packing.

    Returns:
        The number of samples.

    Raises:
        ArchiveError: for the first sample that differs or cannot be read.
    """
    manifest = PackedDataset.manifest_of(path)
    for name, count in manifest.parts.items():
        part = PackedDataset(path, name)
        with progress_bar(f"Verifying {name}", count, " samples") as bar:
            for index in range(count):
                part.payload(index)  # compares the checksum
                bar.update()
    return sum(manifest.parts.values())


# --- before anything is written ---------------------------------------------------------------------------------------


def _check(format: str, shrink: Shrink, workers: int | None, on_error: str) -> None:
    if format == "litdata":
        raise SettingsError(f"format='litdata' is not possible: {LITDATA}.")
    for name, value, possible, advice in (
        ("format", format, format in FORMATS, f"one of {', '.join(map(repr, FORMATS))}"),
        ("on_error", on_error, on_error in ("raise", "skip"), "'raise' or 'skip'"),
        ("short_side", shrink.short_side, _is_from(1, shrink.short_side), "pixels, 1 or more"),
        ("quality", shrink.quality, _is_from(1, shrink.quality) and (shrink.quality or 1) <= 100, "1 to 100"),
        ("workers", workers, _is_from(0, workers), "processes, 0 for none but this one, or None"),
    ):
        if not possible:
            raise SettingsError(f"{name}={value!r} is not possible. Use {advice}.")
    if shrink.quality is not None and shrink.decoded:
        raise SettingsError(f"quality={shrink.quality} would have no effect on decoded pixels. Leave one out.")


def _is_from(least: int, value: int | None) -> bool:
    return value is None or (type(value) is int and value >= least)


def _check_target(target: Path, *, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not is_pack(target):
        raise ArchiveError(f"{target} exists and is not a pack, so it is not replaced. Choose another DEST.")
    if not force:
        raise ArchiveError(f"{target} exists. Choose another DEST, or --force (force=True) to replace it.")


def _check_outside(target: Path, parts: dict[str, Payloads]) -> None:
    """Refuse a target inside its own source. Compares device and inode, because paths may contain links or mounts."""
    sources = [part.source for part in parts.values() if isinstance(part.source, FolderSource)]
    for root in [source.root for source in sources if not isinstance(source, RemoteSource)]:
        if any(folder.exists() and folder.samefile(root) for folder in target.absolute().resolve().parents):
            raise ArchiveError(f"{target} is inside {root}, the folder to pack. Choose a DEST outside of it.")


def _parts_of(
    source: object, shrink: Shrink, storage_options: Mapping[str, object] | None
) -> tuple[dict[str, Payloads], tuple[str, ...]]:
    """Return the parts of a pack by name, and their classes."""
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise SettingsError(f"A {type(source).__name__} cannot be packed. Pass a folder, or a map-style dataset.")
        if shrink != Shrink():
            raise SettingsError("short_side, quality and decoded are for folders of images. Leave them out.")
        return {ALL: Payloads(source, shrink)}, ()
    root = Root(place_of(source, storage_options), fresh=True)
    sources = {split: root.source(split) for split in (SPLITS if root.has_splits else (ALL,))}
    found = {split: Payloads(part, shrink) for split, part in sources.items() if part is not None}
    return found, next(iter(found.values())).source.classes


def _check_room(folder: Path, parts: dict[str, Payloads], format: Format) -> None:
    times, words = (1.05, "") if format == "lmdb" else (2.1, " (twice the data)")
    needed = sum(_estimated_bytes(part) for part in parts.values()) * times
    free = find_room(folder).left_bytes
    if needed > free:
        raise ArchiveError(
            f"Packing needs about {needed / 1e9:.2f} GB in {folder.parent} until it is done{words}, but only "
            f"{free / 1e9:.2f} GB are free. Free some, choose another DEST, or make images smaller (--short-side)."
        )


def _estimated_bytes(part: Payloads) -> int:
    """Estimate the bytes of a part in LMDB from some samples: all but small payloads take whole pages."""
    some = [each.data for each in part.__getitems__(list(range(0, len(part), max(1, len(part) // _LOOKED_AT))))]
    sizes = [len(data) + 64 for data in some if data is not None]
    taken = [size if size < 1024 else -(-size // 4096) * 4096 for size in sizes]
    return sum(taken) * len(part) // max(1, len(taken))


# --- reading the source -----------------------------------------------------------------------------------------------


def _fill(written: "PartWriter", workers: int | None, on_error: str) -> None:
    """Read and write all samples of a part."""
    waiting = list[Payload]()
    waiting_bytes = 0
    with progress_bar(f"Packing {written.name}", len(written.part), " samples") as bar:
        for payload in _payloads(written.part, workers):
            if payload.data is None and on_error == "raise":
                raise ArchiveError(f"{payload.problem} Fix the file, or skip it (--on-error skip), and pack again.")
            waiting.append(payload)
            waiting_bytes += len(payload.data or b"")
            bar.update()
            if waiting_bytes >= _WRITTEN_BYTES:
                written.append(waiting)
                waiting = []
                waiting_bytes = 0
    written.append(waiting)
    written.finish()


def _payloads(part: Payloads, workers: int | None) -> Iterator[Payload]:
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers, len(part) // _AT_ONCE)
    at_once = 1
    if workers:  # fewer samples together if they are large
        at_once = max(1, min(_AT_ONCE, _HANDED_OVER_BYTES // max(1, len(part[0].data or b""))))
    # A worker whose parent was killed would otherwise wait forever to return its samples.
    end = partial(end_with, os.getpid())
    loader = DataLoader(part, batch_size=at_once, num_workers=workers, collate_fn=list, worker_init_fn=end)
    for batch in loader:
        yield from batch


# --- the folder beside DEST -------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_LOCK = "lock"


@contextmanager
def in_the_making(target: Path) -> Iterator[Path]:
    """Yield a locked folder to pack into, removed on error. Leftovers of a killed process are removed first.

    Raises:
        ArchiveError: if another process packs there, if the folder cannot be made or belongs to another user, or if the
            disk is full.
    """
    partial = target.with_name(f".{target.name}.partial")
    lock = FileLock(partial / _LOCK, fallback_to_soft=False)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        make_private(partial)
    except OSError as error:
        raise ArchiveError(f"{partial} cannot be made or written to: {error.strerror}. Choose another DEST.") from error
    try:
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError) as error:  # not found: the other process has finished and renamed it
        raise ArchiveError(f"Another process is packing to {target}. Wait for it, or choose another DEST.") from error
    if os.path.lexists(f"{target}.partial"):
        logger.warning("%s.partial was left by an earlier version, and is not resumed. Remove it.", target)
    try:
        _put_back(target)
        _empty(partial)
        yield partial
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        _put_back(target)
        if _is_full_disk(error):
            raise ArchiveError(
                f"The disk of {target.parent} is full. Free some space there, and pack again."
            ) from error
        raise
    finally:
        lock.release()


def _is_full_disk(error: BaseException) -> bool:
    # LMDB reports an input/output error if a write fitted in part.
    text = str(error)
    of_lmdb = text.startswith("mdb_") and "Input/output error" in text
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or of_lmdb or "No space left" in text


def _empty(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _put_back(target: Path) -> None:
    """Restore the old pack if the process that was replacing it died between two renames."""
    old = _replaced(target)
    if is_pack(old) and not os.path.lexists(target):
        old.rename(target)
    elif is_pack(old):
        shutil.rmtree(old)


def finish(partial: Path, target: Path) -> None:
    """Move a complete pack into place, and then remove the old pack at ``target``."""
    if is_pack(target):
        target.rename(_replaced(target))
    partial.rename(target)
    one_part = next(entry for entry in target.iterdir() if entry.is_dir())
    target.chmod(stat.S_IMODE(one_part.stat().st_mode))  # it was private until now; its parts have the usual mode
    (target / _LOCK).unlink(missing_ok=True)
    shutil.rmtree(_replaced(target), ignore_errors=True)


# --- the data and the index of a part ---------------------------------------------------------------------------------


class PartWriter:
    """Writes the payloads and the index of one part.

    Attributes:
        digest: digest of the index, once written.
        problems: reasons of the samples left out.
    """

    digest = ""

    def __init__(self, folder: Path, part: Payloads, format: Format) -> None:
        self.part = part
        self.name = folder.name
        self._index = folder / "index.npz"
        self._data = folder / "data"
        self._data.mkdir(parents=True)
        self._write = _WRITERS[format](self._data)
        self._kept, self._sizes, self._checksums, self._changed_ns = list[int](), list[int](), list[int](), list[int]()
        self.problems: list[str] = []

    @property
    def samples(self) -> int:
        """Number of samples kept."""
        return len(self._kept)

    @property
    def total_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(self._sizes)

    def append(self, payloads: list[Payload]) -> None:
        """Write the next samples of the source."""
        self._write.append([payload.data for payload in payloads if payload.data is not None])
        for payload in payloads:
            if payload.data is None:
                self.problems.append(payload.problem)
            else:
                self._kept.append(len(self._changed_ns))
                self._sizes.append(len(payload.data))
                self._checksums.append(payload.checksum)
            self._changed_ns.append(payload.changed_ns)

    def finish(self) -> None:
        """Write the index, and complete the data file."""
        names, ends = flat_names([self.part.name(number).encode("utf-8", "surrogateescape") for number in self._kept])
        index = PartIndex(
            labels=self.part.labels[self._kept],
            sizes=np.array(self._sizes, dtype=np.int64),
            checksums=np.array(self._checksums, dtype=np.uint32),
            names=names,
            name_ends=ends,
        )
        self.digest = index.save(self._index)
        self._write.finish(index)

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each data file, by its path in the pack."""
        return {f"{self.name}/data/{file.name}": file.stat().st_size for file in sorted(self._data.iterdir())}

    def check_source(self) -> None:
        """Refuse samples whose files changed after they were read: the read may have overlapped a write.

        Checked at the end, not after each read, to catch a program that truncates a file and fills it later.
        """
        for number, changed_ns in enumerate(self._changed_ns):
            if self.part.changed_ns(number) != changed_ns:
                raise ArchiveError(
                    f"{self.part.source.name(number)} (sample {number}) changed while it was packed. Pack again when "
                    "no program writes there."
                )


class _LmdbWriter:
    def __init__(self, folder: Path) -> None:
        lmdb = require("lmdb", extra="pack", why="Packing")
        # nobody reads it yet
        self._environment = lmdb.open(str(folder), lock=False, readahead=False)
        self._count = 0

    def append(self, payloads: list[bytes]) -> None:
        page = self._environment.stat()["psize"]
        pages = self._environment.info()["last_pgno"] + 1 + sum(len(payload) // page + 2 for payload in payloads)
        self._environment.set_mapsize(pages * page + (16 << 20))  # LMDB keeps some pages for itself
        with self._environment.begin(write=True) as transaction:
            for number, payload in enumerate(payloads, self._count):
                transaction.put(lmdb_key(number), payload, append=True)
        self._count += len(payloads)

    def finish(self, _index: PartIndex) -> None:
        self._environment.close()


class _Hdf5Writer:
    """Writer of ``data.h5`` with two arrays: ``bytes``, uint8, all payloads concatenated; ``ends``, int64, their ends.

    HDF5 needs the size of an array to create it, so the payloads are first collected in a second file.
    """

    def __init__(self, folder: Path) -> None:
        self._h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
        self._path = folder / "data.h5"
        self._payloads = folder / "payloads"

    def append(self, payloads: list[bytes]) -> None:
        with self._payloads.open("ab") as file:
            file.writelines(payloads)

    def finish(self, index: PartIndex) -> None:
        with self._h5py.File(self._path, "w") as file:
            file.create_dataset("ends", data=np.cumsum(index.sizes))
            # Contiguous and uncompressed: bytes are written and read at a file offset, without the library.
            data = file.create_dataset("bytes", shape=(max(1, int(index.sizes.sum())),), dtype="u1")
            data[-1] = 0  # allocates its space
            offset = data.id.get_offset()
        with self._payloads.open("rb") as payloads, self._path.open("r+b") as plain:
            plain.seek(offset)
            shutil.copyfileobj(payloads, plain, 1 << 20)
        self._payloads.unlink()


_WRITERS: dict[Format, Callable[[Path], _LmdbWriter | _Hdf5Writer]] = {"lmdb": _LmdbWriter, "hdf5": _Hdf5Writer}

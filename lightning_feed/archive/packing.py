"""Packing many small files, or any map-style dataset, into a few large files: resumable, checked, atomic at the end.

Samples go straight into LMDB transactions. A journal beside them has a line for each sample of the source, written
after the transaction that holds its payload is on the disk; a call that was broken off is resumed after its last line.
A pack of another format is written from there at the end.
"""

import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_feed.archive.folder import FolderSource, index_of
from lightning_feed.archive.pack_formats import (
    ALL,
    FORMATS,
    Format,
    Manifest,
    PartIndex,
    is_pack,
    lmdb_key,
    open_lmdb,
    write_hdf5,
    write_litdata,
)
from lightning_feed.archive.pack_partial import (
    alone_in,
    begin_or_resume,
    finish,
    plan_of,
    put_back,
    report_full_disk,
)
from lightning_feed.archive.pack_samples import Payload, Payloads, Shrink
from lightning_feed.archive.packed_dataset import PackedDataset
from lightning_feed.archive.splits import SPLITS, split_folder
from lightning_feed.errors import ArchiveError, SettingsError
from lightning_feed.extras import require

_AT_ONCE = 16
"""Samples that a worker hands over together, at most."""
_HANDED_OVER_BYTES = 16 << 20
"""About as much as a worker hands over at once: two such lots wait for each worker."""
_LOOKED_AT = 256
"""Samples from which the size of the pack is estimated."""
_COMMIT_BYTES = 64 << 20
_COMMIT_S = 5.0
"""Payloads that were waiting for a transaction for longer, or are more bytes, are committed: a kill loses no more."""


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What was packed."""

    path: Path
    samples: int
    total_bytes: int
    """Of the payloads."""
    skipped: tuple[str, ...]
    """Samples that were left out, each with the reason; only with ``on_error="skip"``."""
    resumed_at: int
    """Samples that an earlier call had done."""
    took_s: float


def pack(  # noqa: PLR0913 - all but two are by name, and have a default
    source: Any,
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
) -> PackReport:
    """Pack a folder of class folders (with ``train``, ``val`` ... around them or not), or a map-style dataset.

    The pack is made in ``DEST.partial`` and renamed at the end. Called again after a kill or an error, it goes on where
    it was. HDF5 and LitData packs need room for twice the data until they are done.

    Args:
        source: a folder, or a dataset whose samples are nested dicts, lists and tuples of tensors, arrays, numbers,
            text, bytes and None.
        dest: where the pack is to be; a folder that does not exist.
        format: ``"lmdb"``, ``"hdf5"`` or ``"litdata"``.
        short_side: resize images whose shorter side is longer, once, to this many pixels.
        quality: of JPEGs that are written anew, 1 to 100: those that ``short_side`` makes smaller (None for 95), or
            all images, where ``short_side`` is not given.
        decoded: store pixels, uint8 (H, W, 3), in place of files.
        workers: processes that read and resize; None for one for each CPU.
        on_error: for images that cannot be read, ``"raise"``, or ``"skip"`` to leave them out and say so.
        force: replace a pack that is there.
        verify: read everything back and compare checksums.

    Raises:
        SettingsError: for a value that is impossible.
        DatasetError: when the source cannot be read.
        ArchiveError: when there is something at ``dest`` or it lies in the source, when there is no room, when another
            process packs there or another user could write there, when the disk is full, when the source changes
            meanwhile, or when the pack is not what was put in.
    """
    began = time.monotonic()
    target = Path(dest)
    partial = target.with_name(f"{target.name}.partial")
    shrink = Shrink(short_side=short_side, quality=quality, decoded=decoded)
    _check(format, shrink, workers, on_error)
    _check_target(target, force=force)
    parts, classes = _parts_of(source, shrink)
    _check_outside(target, parts)
    with report_full_disk(partial), alone_in(partial):
        put_back(partial, target)
        _check_target(target, force=force)  # again: another process may have packed there since
        begin_or_resume(partial, plan_of(parts, format))
        _check_room(partial, parts, format)
        stores = [_Store(partial / name, part, format) for name, part in parts.items()]
        for store in stores:
            with store:
                _fill(store, workers, on_error)
                store.write()
        for store in stores:
            store.check_source()
        Manifest(
            format=format,
            kind=stores[0].part.kind,
            classes=classes,
            parts={store.name: store.samples for store in stores},
            total_bytes=sum(store.total_bytes for store in stores),
            options={"short_side": short_side, "quality": shrink.written_quality},
            files={name: size for store in stores for name, size in store.files().items()},
            indexes={store.name: store.digest for store in stores},
        ).save(partial)
        if verify:
            verify_pack(partial)
        finish(partial, target)
    return PackReport(
        path=target,
        samples=sum(store.samples for store in stores),
        total_bytes=sum(store.total_bytes for store in stores),
        skipped=tuple(line.problem for store in stores for line in store.lines if line.size < 0),
        resumed_at=sum(store.resumed_at for store in stores),
        took_s=time.monotonic() - began,
    )


def verify_pack(path: str | Path) -> int:
    """Read every sample of a pack, and compare its size and its checksum with those of when it was packed.

    Returns:
        How many samples there are.

    Raises:
        ArchiveError: for the first that differs, or cannot be read.
    """
    manifest = PackedDataset.manifest_of(path)
    for name, count in manifest.parts.items():
        part = PackedDataset(path, name)
        with _bar(total=count, desc=f"Verifying {name}", unit=" samples") as bar:
            for index in range(count):
                part.payload(index)  # which compares it
                bar.update()
    return sum(manifest.parts.values())


def _bar(**options: Any) -> "tqdm[Any]":
    """A progress bar on a terminal. Without standard error, as in some services, there is none."""
    closed = sys.stderr is None or getattr(sys.stderr, "closed", False)
    return tqdm(disable=True if closed else None, leave=False, **options)


# --- before anything is written ---------------------------------------------------------------------------------------


def _check(format: str, shrink: Shrink, workers: int | None, on_error: str) -> None:
    if format not in FORMATS:
        raise SettingsError(f"format={format!r} is not a choice. Give one of {', '.join(map(repr, FORMATS))}.")
    if on_error not in ("raise", "skip"):
        raise SettingsError(f"on_error={on_error!r} is not a choice. Give 'raise' or 'skip'.")
    for name, value, least, advice in (
        ("short_side", shrink.short_side, 1, "pixels, 1 or more"),
        ("quality", shrink.quality, 1, "1 to 100"),
        ("workers", workers, 0, "processes, 0 for none but this one, or None"),
    ):
        possible = value is None or (type(value) is int and value >= least and (name != "quality" or value <= 100))
        if not possible:
            raise SettingsError(f"{name}={value!r} is not possible. Give {advice}.")
    if shrink.quality is not None and shrink.decoded:
        raise SettingsError(
            f"quality={shrink.quality} is of images that are written anew as JPEG, so it would have no effect on "
            "decoded pixels. Leave it or decoded out."
        )


def _check_target(target: Path, *, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not is_pack(target):
        raise ArchiveError(f"{target} exists and is no pack, so it is not replaced. Give another DEST.")
    if not force:
        raise ArchiveError(f"{target} exists. Give another DEST, or --force (force=True) to replace it.")


def _check_outside(target: Path, parts: dict[str, Payloads]) -> None:
    """Refuse a pack inside what is packed. By device and inode: a path may lead there by a link or another mount."""
    for part in parts.values():
        if not isinstance(part.source, FolderSource):
            continue
        root = part.source.folder()
        if any(folder.exists() and folder.samefile(root) for folder in target.absolute().resolve().parents):
            raise ArchiveError(
                f"{target} lies in {root}, which is to be packed: it would be taken for a part of the data. Give a "
                "DEST outside of it."
            )


def _parts_of(source: Any, shrink: Shrink) -> tuple[dict[str, Payloads], tuple[str, ...]]:
    """The parts of a pack by name, and the classes of all of them."""
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise SettingsError(f"A {type(source).__name__} cannot be packed. Give a folder, or a map-style dataset.")
        if shrink != Shrink():
            raise SettingsError(
                "short_side, quality and decoded are for folders of images. Leave them out for a dataset."
            )
        return {ALL: Payloads(source, shrink)}, ()
    root = Path(source)
    if not (root / "train").is_dir():
        whole = FolderSource(root, index_of(root))
        return {ALL: Payloads(whole, shrink)}, whole.classes
    train = FolderSource(root / "train", index_of(root / "train"))
    parts = {"train": Payloads(train, shrink)}
    for split in SPLITS[1:]:
        name = split_folder(root, split)
        if name is not None:
            parts[split] = Payloads(FolderSource(root / name, index_of(root / name, train.classes)), shrink)
    return parts, train.classes


def _check_room(partial: Path, parts: dict[str, Payloads], format: Format) -> None:
    times, words = (1.05, "") if format == "lmdb" else (2.1, " (twice the data)")
    needed = sum(_estimated_bytes(part) for part in parts.values()) * times
    missing = int(needed) - sum(file.stat().st_size for file in partial.rglob("data.mdb"))
    free = shutil.disk_usage(partial).free
    if missing > free:
        raise ArchiveError(
            f"Packing needs about {needed / 1e9:.2f} GB in {partial.parent} until it is done{words}, and "
            f"{free / 1e9:.2f} GB are free. Free some, give another DEST, or make images smaller (--short-side)."
        )


def _estimated_bytes(part: Payloads) -> int:
    """What a part takes in LMDB, which gives all but small payloads pages of their own: estimated from some samples."""
    some = [part[index].data for index in range(0, len(part), max(1, len(part) // _LOOKED_AT))]
    sizes = [len(data) + 64 for data in some if data is not None]
    taken = [size if size < 1024 else -(-size // 4096) * 4096 for size in sizes]
    return sum(taken) * len(part) // max(1, len(taken))


# --- the store --------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line of the journal: a sample of the source that is done."""

    size: int
    """Bytes of the payload; -1 for a sample that was left out."""
    checksum: int
    problem: str
    changed_ns: int


class _Store:
    """The payloads of one part in the making, in LMDB, and the journal of the samples that they were made of.

    As a context it is open for writing, and holds what an earlier call had done, up to the first sample that is damaged
    there, or has changed in its source since. Whatever ends the context, what was appended is committed.

    Attributes:
        lines: the journal.
        samples: how many of them were kept.
        resumed_at: how many of them an earlier call had done.
        digest: of the index that was written.
    """

    def __init__(self, folder: Path, part: Payloads, format: Format) -> None:
        self.part, self.name, self.format = part, folder.name, format
        self._index = folder / "index.npz"
        self._journal = folder / "journal"
        self._data = folder / "data"
        self._payloads = self._data if format == "lmdb" else folder / "store"
        self._pending: list[Payload] = []
        self._pending_bytes = 0
        self._committed_at = time.monotonic()

    @property
    def total_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(line.size for line in self.lines if line.size >= 0)

    def __enter__(self) -> "_Store":
        lmdb = require("lmdb", extra="pack", why="Packing")
        try:
            self._resume()
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError):
            shutil.rmtree(self._payloads)  # a crash of the machine can have damaged them
            self._resume()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._commit()
        finally:
            self._environment.close()

    def append(self, payload: Payload) -> None:
        """Add the next sample of the source."""
        self._pending.append(payload)
        self._pending_bytes += len(payload.data or b"")
        if self._pending_bytes >= _COMMIT_BYTES or time.monotonic() - self._committed_at >= _COMMIT_S:
            self._commit()

    def write(self) -> None:
        """Write the index of the part, and its data where they are of another format than LMDB."""
        self._commit()
        kept = [row for row, line in enumerate(self.lines) if line.size >= 0]
        names = [self.part.name(row).encode("utf-8", "surrogateescape") for row in kept]
        index = PartIndex(
            labels=self.part.labels[kept],
            sizes=np.array([self.lines[row].size for row in kept], dtype=np.int64),
            checksums=np.array([self.lines[row].checksum for row in kept], dtype=np.uint32),
            names=np.frombuffer(b"".join(names), dtype=np.uint8),
            name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        )
        self.digest = index.save(self._index)
        if self.format == "lmdb":
            return
        shutil.rmtree(self._data, ignore_errors=True)  # of a call that was broken off while it wrote it
        self._data.mkdir()
        write = write_hdf5 if self.format == "hdf5" else write_litdata
        with (
            _bar(total=self.total_bytes, desc=f"Writing {self.format}", unit="B", unit_scale=True) as bar,
            self._environment.begin() as transaction,
        ):
            write(self._data, (payload for _, payload in transaction.cursor()), index, bar.update)

    def files(self) -> dict[str, int]:
        """Bytes of each data file, by its path in the pack."""
        return {f"{self.name}/data/{file.name}": file.stat().st_size for file in sorted(self._data.iterdir())}

    def check_source(self) -> None:
        """Refuse samples whose files have changed since they were read: they may have been read while written.

        At the end, not after each read: what empties a file and fills it later is seen, too.
        """
        for row, line in enumerate(self.lines):
            if self.part.changed_ns(row) != line.changed_ns:
                raise ArchiveError(
                    f"{self.part.source.name(row)} (sample {row}) changed while it was packed, so the pack may hold a "
                    "part of it. Pack again when nothing writes there: what comes before that file is kept."
                )

    def _resume(self) -> None:
        """Take over what an earlier call had done, as far as it is undamaged, and drop the rest."""
        self.lines: list[_Line] = []
        self.samples, end = 0, 0
        self._environment = open_lmdb(self._payloads, write=True)
        try:
            with self._environment.begin() as transaction, self._journal.open("a+b") as journal:
                journal.seek(0)
                for text in journal:
                    line = _parsed(text)
                    if line is None or not self._is_sound(line, transaction):
                        break
                    self._add(line)
                    end += len(text)
                journal.truncate(end)
            with self._writing([]) as transaction:
                cursor = transaction.cursor()
                while cursor.set_range(lmdb_key(self.samples)):
                    cursor.delete()
        except BaseException:
            self._environment.close()
            raise
        self.resumed_at = len(self.lines)

    def _is_sound(self, line: _Line, transaction: Any) -> bool:
        """Whether the next sample is as it was packed, and as it is in the source."""
        payload = b"" if line.size < 0 else transaction.get(lmdb_key(self.samples))
        sound = payload is not None and zlib.crc32(payload) == line.checksum
        return sound and self.part.changed_ns(len(self.lines)) == line.changed_ns

    def _add(self, line: _Line) -> None:
        self.lines.append(line)
        self.samples += line.size >= 0

    def _commit(self) -> None:
        """Bring what was appended to the disk: payloads first, then the lines that speak of them."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        kept = [payload.data for payload in pending if payload.data is not None]
        with self._writing(kept) as transaction:
            for number, data in enumerate(kept, self.samples):
                transaction.put(lmdb_key(number), data, append=True)
        lines = [_Line(-1 if each.data is None else len(each.data), *each[1:]) for each in pending]
        with self._journal.open("ab") as journal:
            journal.writelines(json.dumps(line).encode() + b"\n" for line in lines)
        for line in lines:
            self._add(line)
        self._committed_at = time.monotonic()

    def _writing(self, payloads: list[bytes]) -> Any:
        """A transaction with room for these payloads."""
        page = self._environment.stat()["psize"]
        pages = self._environment.info()["last_pgno"] + 1 + sum(len(payload) // page + 2 for payload in payloads)
        self._environment.set_mapsize(pages * page + (16 << 20))  # LMDB keeps some pages for itself
        return self._environment.begin(write=True)


def _parsed(text: bytes) -> _Line | None:
    """A line of the journal; None where a kill or a crash of the machine left something else."""
    try:
        line = _Line(*json.loads(text))
    except (ValueError, TypeError):
        return None
    return line if text.endswith(b"\n") else None


# --- reading the source -----------------------------------------------------------------------------------------------


def _fill(store: _Store, workers: int | None, on_error: str) -> None:
    """Bring a store up to the end of its part."""
    part, first = store.part, store.resumed_at
    with _bar(total=len(part), initial=first, desc=f"Packing {store.name}", unit=" samples") as bar:
        for payload in _payloads(part, first, workers):
            if payload.data is None and on_error == "raise":
                raise ArchiveError(
                    f"{payload.problem} What is packed so far is kept: mend or remove it and pack again, or leave such "
                    "samples out with --on-error skip."
                )
            store.append(payload)
            bar.update()


def _payloads(part: Payloads, first: int, workers: int | None) -> Iterator[Payload]:
    left = range(first, len(part))
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers, len(left) // _AT_ONCE)
    at_once = 1
    if workers:  # fewer samples are handed over together where they are large
        at_once = max(1, min(_AT_ONCE, _HANDED_OVER_BYTES // max(1, len(part[first].data or b""))))
    loader = DataLoader(
        part, batch_size=at_once, sampler=left, num_workers=workers, collate_fn=list, worker_init_fn=_end_with_parent
    )
    for batch in loader:
        yield from batch


def _end_with_parent(_worker: int) -> None:
    """End this worker when its parent is killed: it would wait for ever to hand over what nobody takes."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # it is a worker process

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-parent").start()

"""Packs many small files, or any map-style dataset, into a few large ones: resumable, checked, atomic at the end."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.index_store import index_of
from lightning_feed.archive.pack_formats import WRITERS
from lightning_feed.archive.pack_manifest import ALL, FORMATS, Format, Kind, Manifest, PartIndex, is_pack
from lightning_feed.archive.pack_samples import Payloads, Shrink
from lightning_feed.archive.pack_spool import Spool
from lightning_feed.archive.packed_dataset import PackedDataset
from lightning_feed.errors import ArchiveError, SettingsError

_SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
_AT_ONCE = 16
"""Samples that a worker hands over together."""
_LOOKED_AT = 256
"""Samples from which the size of the pack is estimated."""


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
    quality: int = 95,
    decoded: bool = False,
    workers: int | None = None,
    on_error: str = "raise",
    force: bool = False,
    verify: bool = False,
) -> PackReport:
    """Pack a folder of class folders (with ``train``, ``val`` ... around them or not), or a map-style dataset.

    The pack is made in ``DEST.partial`` and renamed at the end. Called again after a kill or an error, it goes on where
    it was. Room is needed for twice the data until it is done.

    Args:
        source: a folder, or a dataset whose samples are nested dicts, lists and tuples of tensors, arrays, numbers,
            text, bytes and None.
        dest: where the pack is to be; a folder that does not exist.
        format: ``"lmdb"``, ``"hdf5"`` or ``"litdata"``.
        short_side: resize images whose shorter side is longer, once, to this many pixels.
        quality: of the JPEGs that this writes.
        decoded: store pixels, uint8 (H, W, 3), in place of files.
        workers: processes that read and resize; None for one for each CPU.
        on_error: for images that cannot be read, ``"raise"``, or ``"skip"`` to leave them out and say so.
        force: replace a pack that is there.
        verify: read everything back and compare checksums.

    Raises:
        SettingsError: for a value that is impossible.
        DatasetError: when the source cannot be read.
        ArchiveError: when there is something at ``dest``, when there is no room, when another process packs there,
            when the disk is full, or when the pack is not what was put in.
    """
    began = time.monotonic()
    target = Path(dest)
    _check(format, short_side, quality, on_error)
    _check_target(target, force=force)
    shrink = Shrink(short_side=short_side, quality=quality, decoded=decoded)
    parts, kind, classes = _parts_of(source, shrink)
    partial = target.with_name(f"{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    skipped: list[str] = []
    resumed_at = 0
    with _alone_in(partial), _full_disk_told(partial):
        _begin_or_go_on(partial, _plan_of(parts, kind, shrink, format))
        _check_room(partial, parts)
        counts, total_bytes = {}, 0
        for name, part in parts.items():
            folder = partial / name
            (folder / "spool").mkdir(parents=True, exist_ok=True)
            resumed_at += _fill(folder / "spool", part, name, workers, on_error, skipped)
            index = _write_part(folder, part, kind, format)
            counts[name] = len(index.sizes)
            total_bytes += int(index.sizes.sum())
        Manifest(
            format=format,
            kind=kind,
            classes=classes,
            parts=counts,
            total_bytes=total_bytes,
            options={"short_side": short_side, "quality": quality if short_side is not None else None},
        ).save(partial)
        if verify:
            verify_pack(partial)
        _finish(partial, target)
    return PackReport(
        path=target,
        samples=sum(counts.values()),
        total_bytes=total_bytes,
        skipped=tuple(skipped),
        resumed_at=resumed_at,
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
        if len(part) != count:
            raise ArchiveError(f"{path} has {len(part)} samples in {name!r}, and {count} were packed. Pack it again.")
        for index in tqdm(range(count), desc=f"Verifying {name}", unit=" samples", disable=None, leave=False):
            payload = part.payload(index)
            if len(payload) != part.index.sizes[index] or zlib.crc32(payload) != part.index.checksums[index]:
                raise ArchiveError(
                    f"{path}: sample {index} of {name!r} ({part.name(index)}) is not what was packed. The disk or a "
                    "copy has damaged it: copy or pack it again."
                )
    return sum(manifest.parts.values())


# --- before anything is written ---------------------------------------------------------------------------------------


def _check(format: str, short_side: int | None, quality: int, on_error: str) -> None:
    if format not in FORMATS:
        raise SettingsError(f"format={format!r} is not a choice. Give one of {', '.join(map(repr, FORMATS))}.")
    if short_side is not None and (isinstance(short_side, bool) or not isinstance(short_side, int) or short_side < 1):
        raise SettingsError(f"short_side={short_side!r} is not possible. Give pixels, 1 or more.")
    if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 100:
        raise SettingsError(f"quality={quality!r} is not possible. Give 1 to 100.")
    if on_error not in ("raise", "skip"):
        raise SettingsError(f"on_error={on_error!r} is not a choice. Give 'raise' or 'skip'.")


def _check_target(target: Path, *, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not is_pack(target):
        raise ArchiveError(f"{target} exists and is no pack, so it is not replaced. Give another DEST.")
    if not force:
        raise ArchiveError(f"{target} exists. Give another DEST, or --force (force=True) to replace it.")


def _parts_of(source: Any, shrink: Shrink) -> tuple[dict[str, Payloads], Kind, tuple[str, ...]]:
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise SettingsError(f"A {type(source).__name__} cannot be packed. Give a folder, or a map-style dataset.")
        if shrink.decoded or shrink.short_side is not None:
            raise SettingsError("short_side and decoded are for folders of images. Leave them out for a dataset.")
        return {ALL: Payloads(source, "samples", shrink)}, "samples", ()
    root = Path(source)
    kind: Kind = "decoded" if shrink.decoded else "files"
    if not (root / "train").is_dir():
        whole = FolderSource(root, index_of(root))
        return {ALL: Payloads(whole, kind, shrink)}, kind, whole.classes
    train = FolderSource(root / "train", index_of(root / "train"))
    parts = {"train": Payloads(train, kind, shrink)}
    for name in _SPLIT_FOLDERS[1:]:
        if (root / name).is_dir():
            split = "test" if name == "test" else "val"
            index = index_of(root / name, train.classes)
            parts.setdefault(split, Payloads(FolderSource(root / name, index), kind, shrink))
    return parts, kind, train.classes


def _plan_of(parts: dict[str, Payloads], kind: Kind, shrink: Shrink, format: Format) -> dict[str, Any]:
    """What a broken-off pack must have in common with this one for it to be gone on with."""
    return {
        "kind": kind,
        "format": format,
        "shrink": asdict(shrink),
        "parts": {name: [len(part), _fingerprint(part)] for name, part in parts.items()},
    }


def _fingerprint(part: Payloads) -> str:
    source = part.source
    if not isinstance(source, FolderSource):
        return f"{type(source).__module__}.{type(source).__qualname__}"
    digest = hashlib.blake2b(digest_size=16)
    for array in (source.index.names, source.index.ends, source.index.labels):
        digest.update(array.tobytes())
    return digest.hexdigest()


def _begin_or_go_on(partial: Path, plan: dict[str, Any]) -> None:
    """Keep what is there if it is of the same plan; else begin anew."""
    written = partial / "plan.json"
    try:
        same = json.loads(written.read_text()) == json.loads(json.dumps(plan))
    except (OSError, ValueError):
        same = False
    if not same:
        for entry in partial.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        written.write_text(json.dumps(plan))


def _check_room(partial: Path, parts: dict[str, Payloads]) -> None:
    needed = sum(_estimated_bytes(part) for part in parts.values())
    there = sum(file.stat().st_size for file in partial.rglob("payloads"))
    missing = int(2.1 * needed) - there
    free = shutil.disk_usage(partial).free
    if missing > free:
        raise ArchiveError(
            f"Packing needs about {missing / 1e9:.2f} GB in {partial.parent} until it is done (twice the data), and "
            f"{free / 1e9:.2f} GB are free. Free some, give another DEST, or make images smaller (--short-side)."
        )


def _estimated_bytes(part: Payloads) -> int:
    count = len(part)
    step = max(1, count // _LOOKED_AT)
    sizes = [len(payload) for payload, _, _ in (part[index] for index in range(0, count, step)) if payload is not None]
    return int(np.mean(sizes) * count) if sizes else 0


# --- packing ----------------------------------------------------------------------------------------------------------


def _fill(folder: Path, part: Payloads, name: str, workers: int | None, on_error: str, skipped: list[str]) -> int:
    """Bring a spool up to the end of its part. Gives how many samples were there before."""
    spool = Spool(folder)
    resumed_at = spool.done
    reasons = folder / "skipped.txt"
    skipped += reasons.read_text().splitlines() if resumed_at and reasons.exists() else []
    try:
        with tqdm(
            total=len(part), initial=resumed_at, desc=f"Packing {name}", unit=" samples", disable=None, leave=False
        ) as bar:
            for payload, checksum, problem in _payloads(part, resumed_at, workers):
                if payload is None:
                    if on_error == "raise":
                        spool.flush()
                        raise ArchiveError(
                            f"{problem} What is packed so far is kept: mend or remove it and pack again, or leave such "
                            "samples out with --on-error skip."
                        )
                    skipped.append(problem)
                    with reasons.open("a") as file:
                        file.write(problem.replace("\n", " ") + "\n")
                spool.append(payload, checksum)
                if spool.done % _AT_ONCE == 0:
                    spool.flush()
                bar.update()
                bar.set_postfix_str(f"{spool.total_bytes / 1e6:.0f} MB", refresh=False)
        spool.close()
    except BaseException:
        spool.abandon()
        raise
    return resumed_at


def _payloads(part: Payloads, first: int, workers: int | None) -> Iterator[tuple[bytes | None, int, str]]:
    left = range(first, len(part))
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers, len(left) // _AT_ONCE)
    loader = DataLoader(part, batch_size=_AT_ONCE, sampler=left, num_workers=workers, collate_fn=list)
    for batch in loader:
        yield from batch


def _write_part(folder: Path, part: Payloads, kind: Kind, format: Format) -> PartIndex:
    """Turn the spool of a part into the format, and write its index. The spool is removed."""
    finished = folder / "index.npz"
    spool = Spool(folder / "spool")
    spool.close()
    if finished.exists():
        return PartIndex.load(finished)
    kept = [record for record in spool.records() if record["kept"]]
    rows = np.array([record["source"] for record in kept], dtype=np.int64)
    labels = part.source.labels[rows] if kind != "samples" else np.zeros(len(rows), dtype=np.int64)
    names = [_name_of(part, int(row)).encode("utf-8", "surrogateescape") for row in rows]
    index = PartIndex(
        labels=labels,
        sizes=np.array([record["size"] for record in kept], dtype=np.int64),
        checksums=np.array([record["checksum"] for record in kept], dtype=np.uint32),
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
    )
    shutil.rmtree(folder / "data", ignore_errors=True)  # of a call that was broken off while it wrote it
    (folder / "data").mkdir()
    with tqdm(
        total=int(index.sizes.sum()), desc=f"Writing {format}", unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        WRITERS[format](folder / "data", spool.payloads(), index.sizes, bar.update)
    index.save(folder / "index.tmp")
    (folder / "index.tmp").replace(finished)
    return index


def _name_of(part: Payloads, row: int) -> str:
    return part.source.relative_name(row) if isinstance(part.source, FolderSource) else str(row)


def _finish(partial: Path, target: Path) -> None:
    for leftover in (*partial.glob("*/spool"), *partial.glob("*/index.tmp")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    (partial / "plan.json").unlink()
    old = None
    if is_pack(target):
        old = target.with_name(f"{target.name}.old-{os.getpid()}")
        target.rename(old)
    partial.rename(target)
    (target / "lock").unlink(missing_ok=True)
    if old is not None:
        shutil.rmtree(old)


@contextmanager
def _alone_in(partial: Path) -> Iterator[None]:
    """Hold the lock of a pack in the making. The system lets go of it when the process ends, however it does."""
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArchiveError(
                f"Another process is packing to {partial}. Wait for it to end, or give another DEST."
            ) from error
        yield


@contextmanager
def _full_disk_told(partial: Path) -> Iterator[None]:
    try:
        yield
    except ArchiveError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        if number not in (errno.ENOSPC, errno.EDQUOT) and "No space left" not in str(error):
            raise
        raise ArchiveError(
            f"The disk of {partial.parent} is full. What is packed so far is kept in {partial}: free some space and "
            "pack again, which goes on from there."
        ) from error

"""Packs many small files, or any map-style dataset, into a few large ones: resumable, checked, atomic at the end."""

import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.index_store import index_of
from lightning_feed.archive.pack_formats import WRITERS
from lightning_feed.archive.pack_manifest import ALL, FORMATS, Format, Kind, Manifest, PartIndex, digest_of, is_pack
from lightning_feed.archive.pack_partial import (
    alone_in,
    begin_or_go_on,
    complete_replacement,
    finish,
    full_disk_told,
    plan_of,
    put_back,
    unchanged,
)
from lightning_feed.archive.pack_samples import QUALITY, Payload, Payloads, Shrink
from lightning_feed.archive.pack_spool import KEPT, Spool
from lightning_feed.archive.packed_dataset import PackedDataset
from lightning_feed.archive.splits import SPLITS, split_folder
from lightning_feed.errors import ArchiveError, SettingsError

_AT_ONCE = 16
"""Samples that a worker hands over together, at most."""
_HANDED_OVER_BYTES = 16 << 20
"""About as much as a worker hands over at once: two such lots wait for each worker."""
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
    quality: int | None = None,
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
    _check(format, short_side, quality, on_error)
    _check_workers(workers)
    if quality is not None and decoded:
        raise SettingsError(
            f"quality={quality} is of images that are written anew as JPEG, so it would have no effect on decoded "
            "pixels. Leave it or decoded out."
        )
    complete_replacement(partial, target)
    _check_target(target, force=force)
    shrink = Shrink(short_side=short_side, quality=quality, decoded=decoded)
    parts, kind, classes = _parts_of(source, shrink)
    _check_outside(target, parts)
    skipped: list[str] = []
    resumed_at = 0
    with full_disk_told(partial), alone_in(partial):
        put_back(partial, target)
        _check_target(target, force=force)  # again: another process may have packed there since
        begin_or_go_on(partial, plan_of(parts, kind, format))
        _check_room(partial, parts)
        for name, part in parts.items():
            _drop_outdated(partial / name, part)
        counts, total_bytes = {}, 0
        for name, part in parts.items():
            folder = partial / name
            (folder / "spool").mkdir(parents=True, exist_ok=True)
            if (folder / "index.npz").exists():
                resumed_at += len(part)
                skipped += _reasons(folder / "spool")
            else:
                resumed_at += _fill(folder / "spool", part, name, workers, on_error, skipped)
            index = _write_part(folder, part, kind, format)
            counts[name] = len(index.sizes)
            total_bytes += int(index.sizes.sum())
        _check_source(partial, parts)
        Manifest(
            format=format,
            kind=kind,
            classes=classes,
            parts=counts,
            total_bytes=total_bytes,
            options={
                "short_side": short_side,
                "quality": QUALITY if quality is None and short_side and not decoded else quality,
            },
            files={
                f"{name}/data/{file.name}": file.stat().st_size
                for name in parts
                for file in sorted((partial / name / "data").iterdir())
            },
            indexes={name: digest_of((partial / name / "index.npz").read_bytes()) for name in parts},
        ).save(partial)
        if verify:
            _verify_new(partial)
        finish(partial, target)
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
        with _bar(total=count, desc=f"Verifying {name}", unit=" samples") as bar:
            for index in range(count):
                part.payload(index)  # which compares it
                bar.update()
    return sum(manifest.parts.values())


def _verify_new(partial: Path) -> None:
    try:
        verify_pack(partial)
    except ArchiveError:
        for finished in partial.glob("*/index.npz"):
            finished.unlink()  # so that the next call does not go on with what is damaged
        raise


def _bar(**options: Any) -> "tqdm[Any]":
    """A progress bar on a terminal. Without standard error, as in some services, there is none."""
    closed = sys.stderr is None or getattr(sys.stderr, "closed", False)
    return tqdm(disable=True if closed else None, leave=False, **options)


# --- before anything is written ---------------------------------------------------------------------------------------


def _check(format: str, short_side: int | None, quality: int | None, on_error: str) -> None:
    if format not in FORMATS:
        raise SettingsError(f"format={format!r} is not a choice. Give one of {', '.join(map(repr, FORMATS))}.")
    if short_side is not None and (isinstance(short_side, bool) or not isinstance(short_side, int) or short_side < 1):
        raise SettingsError(f"short_side={short_side!r} is not possible. Give pixels, 1 or more.")
    if quality is not None and (isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 100):
        raise SettingsError(f"quality={quality!r} is not possible. Give 1 to 100.")
    if on_error not in ("raise", "skip"):
        raise SettingsError(f"on_error={on_error!r} is not a choice. Give 'raise' or 'skip'.")


def _check_workers(workers: int | None) -> None:
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise SettingsError(f"workers={workers!r} is not possible. Give processes, 0 for none but this one, or None.")


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
        root = Path(part.source.name(0)[: -len(part.source.relative_name(0))])
        if any(folder.exists() and folder.samefile(root) for folder in target.absolute().resolve().parents):
            raise ArchiveError(
                f"{target} lies in {root}, which is to be packed: it would be taken for a part of the data. Give a "
                "DEST outside of it."
            )


def _parts_of(source: Any, shrink: Shrink) -> tuple[dict[str, Payloads], Kind, tuple[str, ...]]:
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise SettingsError(f"A {type(source).__name__} cannot be packed. Give a folder, or a map-style dataset.")
        if shrink != Shrink():
            raise SettingsError(
                "short_side, quality and decoded are for folders of images. Leave them out for a dataset."
            )
        return {ALL: Payloads(source, "samples", shrink)}, "samples", ()
    root = Path(source)
    kind: Kind = "decoded" if shrink.decoded else "files"
    if not (root / "train").is_dir():
        whole = FolderSource(root, index_of(root))
        return {ALL: Payloads(whole, kind, shrink)}, kind, whole.classes
    train = FolderSource(root / "train", index_of(root / "train"))
    parts = {"train": Payloads(train, kind, shrink)}
    for split in SPLITS[1:]:
        name = split_folder(root, split)
        if name is not None:
            index = index_of(root / name, train.classes)
            parts[split] = Payloads(FolderSource(root / name, index), kind, shrink)
    return parts, kind, train.classes


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
    if count == 0:
        return 0
    step = max(1, count // _LOOKED_AT)
    found = (part[index].data for index in range(0, count, step))
    sizes = [len(data) for data in found if data is not None]
    return int(np.mean(sizes) * count) if sizes else 0


# --- packing ----------------------------------------------------------------------------------------------------------


def _fill(folder: Path, part: Payloads, name: str, workers: int | None, on_error: str, skipped: list[str]) -> int:
    """Bring a spool up to the end of its part. Gives how many samples were there before."""
    spool = Spool(folder)
    resumed_at = spool.done
    reasons = folder / "skipped.txt"
    # As many as there are records of: a killed process may have written the reason of one more.
    left_out = np.flatnonzero(spool.records()["kept"] != KEPT)
    told = _reasons(folder)[: len(left_out)]
    if len(told) < len(left_out):  # lost in a crash: they are found again
        spool.cut(int(left_out[len(told)]))
        resumed_at = spool.done
    reasons.write_bytes(b"".join(line.encode("utf-8", "surrogateescape") + b"\n" for line in told))
    skipped += told
    try:
        with _bar(total=len(part), initial=resumed_at, desc=f"Packing {name}", unit=" samples") as bar:
            for payload, checksum, problem, changed_ns in _payloads(part, resumed_at, workers):
                if payload is None:
                    if on_error == "raise":
                        spool.flush()
                        raise ArchiveError(
                            f"{problem} What is packed so far is kept: mend or remove it and pack again, or leave such "
                            "samples out with --on-error skip."
                        )
                    skipped.append(problem)
                    with reasons.open("ab") as file:
                        file.write(problem.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n")
                spool.append(payload, checksum, changed_ns)
                if spool.done % _AT_ONCE == 0:
                    spool.flush()
                bar.update()
                bar.set_postfix_str(f"{spool.total_bytes / 1e6:.0f} MB", refresh=False)
        spool.close()
    except BaseException:
        spool.abandon()
        raise
    return resumed_at


def _payloads(part: Payloads, first: int, workers: int | None) -> Iterator[Payload]:
    left = range(first, len(part))
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers, len(left) // _AT_ONCE)
    at_once = _at_once(part, first) if workers else 1
    loader = DataLoader(
        part, batch_size=at_once, sampler=left, num_workers=workers, collate_fn=list, worker_init_fn=_end_with_parent
    )
    for batch in loader:
        yield from batch


def _at_once(part: Payloads, first: int) -> int:
    """Samples that a worker hands over together: fewer where they are large."""
    payload = part[first].data
    return max(1, min(_AT_ONCE, _HANDED_OVER_BYTES // max(1, len(payload or b""))))


def _end_with_parent(_worker: int) -> None:
    """End this worker when its parent is killed: it would wait for ever to hand over what nobody takes."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # it is a worker process

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-parent").start()


def _reasons(folder: Path) -> list[str]:
    """Why samples were left out."""
    try:
        written = (folder / "skipped.txt").read_bytes()
    except FileNotFoundError:
        return []
    return [line.decode("utf-8", "surrogateescape") for line in written.split(b"\n")[:-1]]


def _drop_outdated(folder: Path, part: Payloads) -> None:
    """Cut what is packed of a part at the first sample that is damaged, or has changed in the source since."""
    finished, spooled = folder / "index.npz", folder / "spool"
    if finished.exists():
        with suppress(ArchiveError):
            PartIndex.load(finished)
            if unchanged(part, spooled) == len(part):
                return
        finished.unlink()
    if spooled.exists():
        spool = Spool(spooled)
        spool.cut(min(spool.undamaged(), unchanged(part, spooled)))
        spool.close()


def _check_source(partial: Path, parts: dict[str, Payloads]) -> None:
    """Refuse to go on when a file has changed since it was read: it may have been read while it was written.

    At the end, not after each read: what empties a file and fills it later is seen, too.
    """
    for name, part in parts.items():
        first = unchanged(part, partial / name / "spool")
        if first < len(part):
            raise ArchiveError(
                f"{part.source.name(first)} (sample {first}) changed while it was packed, so the pack may hold a part "
                "of it. Pack again when nothing writes there: what comes before that file is kept."
            )


def _write_part(folder: Path, part: Payloads, kind: Kind, format: Format) -> PartIndex:
    """Turn the spool of a part into the format, and write its index; what is there already is taken."""
    finished = folder / "index.npz"
    if finished.exists():
        return PartIndex.load(finished)
    spool = Spool(folder / "spool")
    spool.close()
    kept = [record for record in spool.records() if record["kept"] == KEPT]
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
    with _bar(total=int(index.sizes.sum()), desc=f"Writing {format}", unit="B", unit_scale=True) as bar:
        WRITERS[format](folder / "data", spool.payloads(), index, bar.update)
    index.save(folder / "index.tmp")
    (folder / "index.tmp").replace(finished)
    return index


def _name_of(part: Payloads, row: int) -> str:
    return part.source.relative_name(row) if isinstance(part.source, FolderSource) else str(row)

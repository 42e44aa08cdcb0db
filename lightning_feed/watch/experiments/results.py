"""What the experiments gave: a frozen value, None for what was not run or could not be measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NamedCost:
    """What one step of a sample's way takes."""

    name: str
    """As in the user's code: ``RandomResizedCrop``, ``read``, ``decode``."""
    cpu_ms: float
    """CPU time per sample."""
    wall_ms: float
    """Wall time per sample, alone in one process."""


@dataclass(frozen=True, kw_only=True)
class KeyUse:
    """One part of the batch."""

    name: str
    """Its place: ``image``, ``0``, ``meta.path``."""
    bytes_per_batch: int
    """Sent to the training process, and from there to the device."""
    used: bool | None
    """Whether the module read it in a training step. None: cannot be told."""


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Where the bytes come from."""

    file_system: str | None = None
    """As the system names it: ``ext4``, ``overlay``, ``nfs4``."""
    kind: str | None = None
    """``"memory"``, ``"local"``, ``"rotational"``, ``"overlay"`` or ``"network"``."""
    read_mb_per_s: float | None = None
    """While the loader runs, from all workers."""
    files_per_s: float | None = None
    mean_file_bytes: float | None = None
    page_cache_pct: float | None = None
    """Share of what was read that no disk had to give, 0 to 100."""


@dataclass(frozen=True, kw_only=True)
class ExperimentResults:
    """Rates in batches per second, each of whole rounds after warm-up. Which experiment gives which is in brackets."""

    batch_size: int | None = None
    model_per_s: float | None = None
    """[X1] What the model takes when the same device batch comes again and again: G."""
    host_batch_per_s: float | None = None
    """[X2] The same with the same host batch, copied in each step."""
    loader_per_s: float | None = None
    """[X3] What the loader gives, alone, as configured: L."""
    loader_start_s: float | None = None
    """[X3] From ``iter(loader)`` to its first batch."""
    taking_ms: float | None = None
    """[X3] CPU time that the training process spends on taking one batch from its workers; null without workers."""
    cached_bytes_per_s: float | None = None
    """[X4] The loader with all files that it opens in the page cache: P."""
    no_transform_per_s: float | None = None
    """[X5] The loader without the dataset's transforms."""
    as_uint8_per_s: float | None = None
    """[X5] The loader with uint8 pictures at their final size: what else the transforms do is left to the device."""
    device_decode_per_s: float | None = None
    """[X5] What the device decodes, crops and resizes of an image folder, with nothing beside it."""
    costs: tuple[NamedCost, ...] = ()
    """[X5] Per sample: reading, decoding, and every transform by name."""
    cold_per_s: float | None = None
    """[X6] The loader with none of its files in the page cache."""
    ceiling_per_s: float | None = None
    """[X7] A data set of constant samples of the same shapes, same workers: what IPC, collating, pinning allow."""
    pinned_gb_per_s: float | None = None
    """[X8] Host to device."""
    pageable_gb_per_s: float | None = None
    """[X8]"""
    copy_ms: float | None = None
    """[X8] One batch to the device, from the memory that the loader gives."""
    worker_scaling: tuple[tuple[int, float], ...] = ()
    """[X3] (num_workers, batches per second) of the settings that were tried."""
    keys: tuple[KeyUse, ...] = ()
    disk: DiskFacts | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    """(experiment, why it was not run)."""

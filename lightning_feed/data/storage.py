"""A data module's storage: location, staging and caches.

The code for URLs, staging and caches is a third of the package, so it is imported only if a setting needs it.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias
from weakref import WeakSet

from lightning_feed.errors import SettingsError
from lightning_feed.load.build import name_datasets
from lightning_feed.storage.system import parse_limit

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_feed.storage.remote import RemotePlace
    from lightning_feed.storage.shared_cache import CacheStats, SampleCache

logger = logging.getLogger(__name__)

Cache: TypeAlias = Literal["bytes", "decoded", "device"]


@dataclass(kw_only=True)
class Storage:
    """Storage settings, with the resulting location and caches.

    Raises:
        SettingsError: a value is invalid, or would have no effect with the other settings.
    """

    data_dir: str | Path | None = None
    stage_to: str | Path | None = None
    stage_wait: bool = True
    stage_remove: bool = False
    stage_limit: int | str | None = None
    readahead: int | str = "1GiB"
    storage_options: Mapping[str, object] | None = None
    cache: Cache | None = None
    cache_limit: int | str = "50%"
    cache_shard: bool = False
    place: "Path | RemotePlace | None" = None
    """Location of the data. None until first used."""
    caches: "WeakSet[SampleCache]" = field(default_factory=WeakSet)
    """Caches in host memory. They live as long as their datasets."""
    total_bytes: int | None = None
    """Largest total size of all caches. None until the first is opened."""
    run: str | None = None
    """Name that keeps this run's caches apart from other runs'. The same on all ranks."""
    makings: int = 0

    def __post_init__(self) -> None:
        parse_limit(self.cache_limit, 1 << 40)
        parse_limit(self.readahead, None)
        if self.stage_limit is not None:
            parse_limit(self.stage_limit, None)
        for refused, why in self._refusals(self._url()):
            if refused:
                raise SettingsError(why)

    def _refusals(self, url: str) -> tuple[tuple[bool, str], ...]:
        """List the invalid combinations of settings: True if present, and the reason."""
        return (
            (
                self.cache not in (None, "bytes", "decoded", "device"),
                f"cache={self.cache!r} is not a choice. Use 'bytes', 'decoded', 'device' or None.",
            ),
            (
                not self.stage_wait,
                "stage_wait=False is not possible: training begins when the copy is complete. Leave it out. To begin "
                "at once, set stage_limit for a URL, or run lightning-feed stage before the training.",
            ),
            (
                self.cache_shard and self.cache != "device",
                f"cache_shard=True has no effect with cache={self.cache!r}. Set cache='device'.",
            ),
            (
                self.stage_to is not None and self.data_dir is None,
                f"stage_to={str(self.stage_to)!r} needs a data_dir to copy. Set data_dir.",
            ),
            (
                self.readahead != Storage.readahead and self.stage_limit is None,
                f"readahead={self.readahead!r} needs a cache. Set stage_limit, or leave readahead out.",
            ),
            (
                bool(self.storage_options) and not url,
                f"storage_options are for URLs, but data_dir={self.data_dir!r} is not a URL. Leave them out.",
            ),
            (
                self.stage_limit is not None and not (url and self.stage_to is not None),
                f"stage_limit={self.stage_limit!r} is for a cache of remote files in stage_to, but data_dir="
                f"{url or self.data_dir!r} and stage_to={self.stage_to!r}. Give a URL and stage_to, or leave "
                "stage_limit out.",
            ),
            (
                self.stage_remove and self.stage_limit is not None,
                "stage_remove=True does nothing for a URL that is read through a cache. Leave it out.",
            ),
            (
                self.stage_remove and self.stage_to is None,
                "stage_remove=True needs staging. Set stage_to, or leave it out.",
            ),
        )

    def _url(self) -> str:
        """``data_dir`` without secrets if it is a URL, else empty."""
        if not isinstance(self.data_dir, str):
            return ""
        from lightning_feed.storage.remote import is_url, without_secrets

        return without_secrets(self.data_dir) if is_url(self.data_dir) else ""

    def find(self) -> "Path | RemotePlace":
        """Return the location of the data. Stages it now if requested.

        Raises:
            ArchiveError: staging failed.
        """
        if self.data_dir is None:
            raise SettingsError("This data module was made without data_dir, so there is no folder to read from.")
        if self.place is None:
            self.place = self._find(self.data_dir)
        return self.place

    def _find(self, data_dir: str | Path) -> "Path | RemotePlace":
        from lightning_feed.storage.remote import RemotePlace, place_of

        if self.stage_to is None:
            return place_of(data_dir, self.storage_options)
        if self.stage_limit is None:
            from lightning_feed.storage.staging import stage

            options = self.storage_options
            return stage(data_dir, self.stage_to, remove_at_exit=self.stage_remove, storage_options=options).path
        from lightning_feed.storage.read_through import ReadThrough

        cache = ReadThrough(self.stage_to, parse_limit(self.stage_limit, None))
        ahead = parse_limit(self.readahead, None)
        return RemotePlace(str(data_dir), self.storage_options, cache=cache, readahead_bytes=ahead)

    def open_caches(self, trainer: "Trainer | None", made: Sequence[tuple[str, object]]) -> None:
        """Open caches in host memory for the datasets of some splits, passed as (split, dataset)."""
        if self.cache is None or self.cache == "device" or not made:
            return
        from lightning_feed.load.cacheable import open_caches

        self.run = self.run or _common_name(trainer)
        self.makings += 1
        limit = self.cache_limit if self.total_bytes is None else self.total_bytes - _limit_of(self.caches)
        if isinstance(limit, int) and limit <= 0:
            logger.info("Earlier splits have used up cache_limit, so %s is not cached.", ", ".join(dict(made)))
            return
        named = [found for split, dataset in made for found in name_datasets(dataset, split)]
        opened = open_caches(named, kind=self.cache, limit=limit, run=f"{self.run}/{self.makings}")
        self.caches.update(opened)
        if self.total_bytes is None:
            self.total_bytes = _limit_of(opened)

    def stats(self) -> "CacheStats | None":
        """Return the statistics over all caches. None without a cache."""
        found = [vars(cache.stats()) for cache in self.caches]
        if not found:
            return None
        from lightning_feed.storage.shared_cache import CacheStats

        sums = {name: sum(stats[name] for stats in found) for name in found[0]}
        return CacheStats(**{**sums, "full": bool(sums["full"])})

    def copy(self) -> "Storage":
        """Return a copy for a copy of the data module: same settings and location, separate caches."""
        return replace(self, caches=WeakSet(), total_bytes=None, run=None, makings=0)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self.copy()), "caches": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, caches=WeakSet())


def _common_name(trainer: "Trainer | None") -> str:
    """Draw a random name, the same on all ranks."""
    name = uuid.uuid4().hex
    return name if trainer is None or trainer.world_size == 1 else str(trainer.strategy.broadcast(name))


def _limit_of(caches: "WeakSet[SampleCache] | list[SampleCache]") -> int:
    return sum(cache.stats().limit_bytes for cache in caches)

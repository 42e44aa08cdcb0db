"""X4: the loader with all files that it opens in the page cache."""

import math
from dataclasses import replace

from lightning_feed.load.rounds import LoaderRate, RoundLimits
from lightning_feed.load.variant import Changes, burst_of
from lightning_feed.watch.experiments.subject import Part, rate_of
from lightning_feed.watch.experiments.subset import Subset


def measure_cached(parts: tuple[Part, ...], subset: Subset, limits: RoundLimits) -> LoaderRate:
    """The rate over the subset, again and again. The first time through is not counted: it fetches the files.

    Args:
        parts: the loaders.
        subset: small enough for memory.
        limits: how long. As many rounds are discarded as the subset has, at least.
    """
    burst = max(burst_of(part.loader) for part in parts)
    once = math.ceil(min(map(len, subset.batches.values())) / burst)
    limits = replace(limits, warm_rounds=max(limits.warm_rounds, once))
    return rate_of(parts, lambda part: Changes(batches=subset.batches[part], endless=True), limits)[0]

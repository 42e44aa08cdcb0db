"""Loaders that are only arithmetic: how fast they would be with any setting, for tests of what tunes them."""

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

from lightning_feed.trials.trial import Setting, Trial

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class SimulatedLoader:
    """One data set on one machine. Times in seconds for one batch."""

    cpu_s: float
    blocked_s: float = 0.0
    cpus: float = 4
    spread: float = 0.05
    """Of the batches' times: sigma of their logarithm."""
    slow_share: float = 0.0
    slow_times: float = 1.0
    """So many batches take so many times as long."""
    batch_bytes: int = MIB
    receive_s: float = 2e-4
    """That this process takes for a batch from a worker process."""
    devices: float = 1000.0
    """Reads that storage serves side by side."""
    crowding: float = 0.05
    """What each worker beyond the CPUs costs, as a share."""
    gil_share: float = 1.0
    """Of the work, that only one thread can do at a time."""
    noise: float = 0.02
    """Of a measured rate."""

    def rate(self, setting: Setting, batches: int = 1200, seed: int = 0) -> tuple[float, float]:
        """(batches per second, 99th percentile of gaps)."""
        draw = random.Random(seed)
        workers, threads = setting.num_workers, setting.workers == "thread"
        waiting = max(1.0, workers / self.devices)
        if threads:
            free = (self.cpu_s + self.blocked_s) * (1 - self.gil_share) / max(1, workers)
            usual = max(self.cpu_s * self.gil_share + free * waiting, self.cpu_s / self.cpus)
        else:
            # Each waits for a CPU as long as the others keep them all, and that is longer when many take turns.
            queued = workers * self.cpu_s / self.cpus
            queued *= 1 + self.crowding * max(0.0, queued / (self.cpu_s + self.blocked_s) - 1)
            usual = ((self.cpu_s + self.blocked_s * waiting) ** 6 + queued**6) ** (1 / 6)
        ahead = workers * (setting.prefetch_factor or 2)
        if workers and not threads:  # whole rounds after the first batches
            batches = ahead + workers * (-(-batches // workers))
        times = []
        for _ in range(batches):
            one = usual * draw.lognormvariate(-(self.spread**2) / 2, self.spread)
            times.append(one * self.slow_times if draw.random() < self.slow_share else one)
        if not workers or threads:
            return batches / sum(times), sorted(times)[int(0.99 * batches)]
        made, came = [0.0] * batches, [0.0] * batches
        for k, one in enumerate(times):
            start = max(made[k - workers] if k >= workers else 0.0, came[k - ahead] if k >= ahead else 0.0)
            made[k] = start + one
            came[k] = max(made[k], came[k - 1] + self.receive_s if k else 0.0)
        gaps = [after - before for before, after in zip(came[ahead - 1 :], came[ahead:], strict=False)]
        longest = sorted(max(gaps[k : k + workers]) for k in range(0, len(gaps), workers))
        return (batches - ahead) / (came[-1] - came[ahead - 1]), longest[int(0.99 * len(longest))]

    def trial(self, setting: Setting, seed: int, seconds: float = 2.5) -> Trial:
        """As measured: those batches that come in so many seconds, and noise."""
        batches = min(500, max(8, 3 * setting.num_workers, int(seconds * self._true_rate(setting))))
        rate, gap = self.rate(setting, batches, seed)
        return Trial(
            setting=setting,
            batches_per_s=rate * random.Random(seed + 1).lognormvariate(0, self.noise),
            start_s=0.05 * setting.num_workers,
            cpu_s_per_batch=self.cpu_s * random.Random(seed + 2).lognormvariate(0, self.noise),
            memory_bytes=setting.num_workers * 200 * MIB,
            batch_bytes=self.batch_bytes,
            gap_p99_s=gap,
            seconds=1.0,
        )

    def best(self, most: int, kinds: Any = ("process",), demand: float | None = None) -> float:
        """What training could get from the best setting of the whole grid."""
        prefetches = (2, 4, 8) if self.slow_share or self.spread > 0.3 else (2,)
        grid = [Setting(num_workers=0, prefetch_factor=None)]
        grid += [
            Setting(num_workers=workers, prefetch_factor=prefetch, workers=kind)
            for kind in kinds
            for workers in range(1, most + 1)
            for prefetch in (prefetches if kind == "process" else (2,))
        ]
        return max(self.gives(setting, demand) for setting in grid)

    @functools.cache  # noqa: B019 - loaders are few, and frozen
    def _true_rate(self, setting: Setting) -> float:
        return self.rate(setting)[0]

    def gives(self, setting: Setting, demand: float | None) -> float:
        """Batches per second that training gets: without workers, loading and training take turns."""
        rate = self._true_rate(setting)
        if demand is None:
            return rate
        return min(rate, demand) if setting.num_workers else 1 / (1 / rate + 1 / demand)


KINDS = ("cpu", "io", "mixed", "tiny", "huge", "heavy tail", "in memory", "thread friendly")


def draw_loader(kind: str, seed: int) -> SimulatedLoader:
    """One of a kind, by chance."""
    draw = random.Random(f"{kind} {seed}")
    cpus = draw.choice([1, 2, 4, 8, 16])
    cpu_s, far = draw.uniform(0.01, 0.2), draw.uniform
    common = {"cpus": cpus, "crowding": far(0, 0.3), "spread": far(0.01, 0.15), "noise": far(0.005, 0.03)}
    plain = SimulatedLoader(cpu_s=cpu_s, **common)
    if kind == "cpu":
        return plain
    if kind == "io":
        return replace(plain, cpu_s=0.03 * cpu_s, blocked_s=cpu_s, devices=far(2, 64))
    if kind == "mixed":
        return replace(plain, blocked_s=cpu_s * far(0.3, 3), devices=far(2, 64))
    if kind == "tiny":
        return replace(plain, cpu_s=far(3e-4, 3e-3), receive_s=far(1e-4, 5e-4))
    if kind == "huge":
        return replace(plain, cpu_s=far(0.1, 0.4), batch_bytes=300 * MIB, receive_s=far(0.02, 0.1))
    if kind == "heavy tail":
        return replace(
            plain, cpu_s=0.3 * cpu_s, blocked_s=0.7 * cpu_s, slow_share=far(0.01, 0.05), slow_times=far(3, 8)
        )
    if kind == "in memory":
        return replace(plain, cpu_s=far(2e-5, 2e-4), receive_s=far(1e-4, 5e-4))
    return replace(plain, gil_share=far(0.02, 0.3), receive_s=far(1e-3, 2e-2))

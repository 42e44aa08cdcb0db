"""What to change about a loader that training waits for, by cause."""

from collections.abc import Callable

from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.causes_data import HANDOVER_PCT
from lightning_feed.watch.verdict.diagnosis import Cause, LoopFacts, Measurements, Remedy
from lightning_feed.watch.verdict.remedies_dali import dali_remedies
from lightning_feed.watch.verdict.remedies_images import decoder_remedies, image_remedies, sends_uint8
from lightning_feed.watch.verdict.remedies_uint8 import uint8_remedies
from lightning_feed.watch.verdict.shares import Shares

SLOW_START_S = 1.0
"""Time to the first batch of an epoch that is worth doing something about, where it is not the cause."""
SMALL_FILE_BYTES = 1 << 20
"""Files below this mean size are better read packed."""
MOST_WAITING = 4
"""Times as many workers, at most, where they only wait."""
NOT_TRANSFORMS = ("read", "decode", "load")
"""Steps of a sample's way that are no transforms, as experiments name them: see :func:`step_of`."""
STAGE = 'FastDataModule(data_dir="data", stage_to="/dev/shm/<user>")'
PACK = "lightning-feed pack data packed"

UNUSED_SHARE = 0.1
"""Share of a batch's bytes in parts that nobody reads, from which leaving them out is worth naming."""
CACHED_GAIN = 0.9
"""Of the step time: files in memory that leave more of it are within what two experiments differ by."""
_BY_READING: tuple[Cause, ...] = ("cpu", "no workers", "oversubscribed", "waiting", "unknown")
_BY_BYTES: tuple[Cause, ...] = ("cpu", "no workers", "oversubscribed", "pin thread", "waiting")
"""Where a batch of fewer bytes is made, or handed over, sooner."""

_BEFORE_DECODING: tuple[Cause, ...] = ("epoch start", "one rank", "no workers", "cold reads")
"""Where no decoder behind the workers is at fault."""

Remedies = list[Remedy]


def data_remedies(measured: Measurements, shares: Shares, cause: Cause) -> Remedies:
    """What to change, the most promising first."""
    if measured.facts.dali_device is not None:  # no workers, no collate, no samples that Python sees
        return dali_remedies(measured, cause)
    by_cause: dict[Cause, Callable[[Measurements, Shares], Remedies]] = {
        "epoch start": _epoch_start,
        "one rank": _one_rank,
        "head of line": _head_of_line,
        "pin thread": _pin_thread,
        "oversubscribed": _oversubscribed,
        "cold reads": _cold_reads,
        "waiting": _waiting,
        "jitter": _jitter,
    }
    remedies = by_cause.get(cause, _work)(measured, shares)
    facts = measured.facts
    if sends_uint8(facts):
        remedies = [remedy for remedy in remedies if remedy.changes not in ("device_transform=True", "transforms=off")]
    if cause not in _BEFORE_DECODING:
        remedies = decoder_remedies(facts) + remedies
    if cause in _BY_READING:
        remedies += _memory_by_experiment(measured, shares)
    if cause in _BY_BYTES:
        remedies += unused_keys(measured, UNUSED_SHARE)
    starts_slowly = (measured.stats.epoch_start_s or 0) >= SLOW_START_S
    if starts_slowly and cause != "epoch start" and facts.persistent_workers is False and facts.num_workers:
        remedies.append(_persistent(facts))
    return remedies


def loader_line(facts: LoopFacts, **settings: object) -> str:
    """The line that sets these for the training loader: torch's, or a FastDataModule's."""
    needs_workers = settings.keys() & {"prefetch_factor", "persistent_workers", "in_order"}
    if facts.ours is False and needs_workers:  # torch refuses the one, or ignores it, without the other
        settings = {"num_workers": facts.num_workers, **settings}
    given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    if facts.ours is False:
        return f"DataLoader(dataset, {given})"
    return f"FastDataModule(loader=LoaderSettings({given}))"


def step_of(name: str) -> str:
    """The name of a cost without that of its loader, which several loaders put before it: ``load`` of ``"a: load"``."""
    return name.rpartition(": ")[2]


def unused_keys(measured: Measurements, least_share: float = 0.0) -> Remedies:
    """Leave parts of the batch out that no training step reads, where they are more than this share of its bytes."""
    found = measured.experiments
    keys = () if found is None else found.keys
    unused = tuple(key.name for key in keys if key.used is False)
    spared = sum(key.bytes_per_batch for key in keys if key.used is False)
    if not unused or len(unused) == len(keys) or spared < least_share * sum(key.bytes_per_batch for key in keys):
        return []  # a step that reads nothing of its batch is a trial, and needs one all the same
    return [
        Remedy(
            code=f"FastDataModule(drop_keys={unused!r})",
            why="no training step reads them",
            changes=f"drop_keys={'+'.join(unused)}",
        )
    ]


def _change(facts: LoopFacts, why: str, predicted: float | None = None, **settings: object) -> Remedy:
    names = ",".join(f"{name}={value!r}" for name, value in settings.items())
    return Remedy(code=loader_line(facts, **settings), why=why, predicted_step_ms=predicted, changes=names)


def _persistent(facts: LoopFacts) -> Remedy:
    return _change(facts, "workers are started anew at each epoch", persistent_workers=True)


def _threads(why: str) -> Remedy:
    return Remedy(
        code='FastDataModule(loader=LoaderSettings(workers="thread"))',
        why=f"{why}; only what releases the GIL runs beside training",
        changes="workers='thread'",
    )


def _epoch_start(measured: Measurements, shares: Shares) -> Remedies:
    facts = measured.facts
    if facts.persistent_workers is False and facts.num_workers:
        return [_persistent(facts)]
    if facts.num_workers and facts.workers == "process":
        return [_threads("threads start at once")]
    return _more_workers(measured, shares) or _uint8(measured, shares)


def _one_rank(measured: Measurements, shares: Shares) -> Remedies:
    ranks = measured.ranks
    which = "one" if ranks is None else ranks.slow_rank
    median = None
    if ranks is not None and ranks.slow_rank is not None and ranks.slow_rank < len(ranks.data_idle_ms_by_rank):
        by_rank = sorted(ranks.data_idle_ms_by_rank)
        median = ranks.data_idle_ms_by_rank[ranks.slow_rank] - by_rank[(len(by_rank) - 1) // 2]
    return [
        Remedy(
            code=STAGE,
            why=f"rank {which} alone is slow: give its node a copy of its own, and compare the nodes' disks and CPUs",
            predicted_step_ms=predict.without(shares, median),
            changes="staged=True",
        )
    ]


def _head_of_line(measured: Measurements, shares: Shares) -> Remedies:
    facts, remedies = measured.facts, []
    # torch's own DataLoader has in_order from 2.6 on, the oldest that we support.
    if facts.in_order is not False and (facts.num_workers or 0) > 1:
        remedies.append(
            _change(
                facts,
                "a finished batch overtakes a slow one; the order is then left to chance",
                predict.in_any_order(measured, shares),
                in_order=False,
            )
        )
    remedies += _deeper(facts, "finished batches bridge a slow one", None)
    return remedies


def _pin_thread(measured: Measurements, shares: Shares) -> Remedies:
    return [
        *_uint8(measured, shares),
        _change(measured.facts, "to compare: one thread pins all batches, and cannot keep up", pin_memory=False),
    ]


def _oversubscribed(measured: Measurements, shares: Shares) -> Remedies:
    facts, remedies = measured.facts, []
    workers, cpus = facts.num_workers, facts.usable_cpus
    if workers and cpus and workers > cpus:
        remedies.append(
            _change(
                facts,
                f"num_workers {workers} -> {cpus}; {cpus} CPUs may be used",
                predict.by_trial(measured, shares, cpus),
                num_workers=cpus,
            )
        )
    else:
        remedies.append(
            Remedy(
                code="torch.set_num_threads(1)",
                why="if threads of the training process take the workers' CPUs; else other programs do",
            )
        )
    remedies += image_remedies(measured, shares)
    remedies += _uint8(measured, shares)
    return remedies


def _work(measured: Measurements, shares: Shares) -> Remedies:
    """Workers compute, or there are none, or nothing is known: more of them while there are CPUs, else less work."""
    facts = measured.facts
    remedies = _more_workers(measured, shares)
    if not remedies and not facts.num_workers:
        remedies.append(
            Remedy(
                code="class Data(FastDataModule): make_dataset = lambda self, split: ...",
                why="a FastDataModule loads in as many worker processes as the machine has CPUs for",
            )
        )
    remedies += image_remedies(measured, shares)
    remedies += _uint8(measured, shares)
    return remedies + _cheaper_transforms(measured, shares)


def _cold_reads(measured: Measurements, shares: Shares) -> Remedies:
    found = measured.experiments
    cached = predict.with_bytes_cached(measured, shares)
    remedies = [
        _staged(cached),
        Remedy(
            code='FastDataModule(cache="bytes")',
            why="files are kept in host memory from the first epoch on, those that fit",
            predicted_step_ms=cached,
            changes="cache='bytes'",
        ),
    ]
    size = found.disk.mean_file_bytes if found is not None and found.disk is not None else None
    if size is None or size < SMALL_FILE_BYTES:
        remedies.append(Remedy(code=PACK, why="a few large files are read faster than many small ones", changes="pack"))
    return remedies + _more_waiting(measured, shares)


def _staged(predicted: float | None) -> Remedy:
    return Remedy(
        code=STAGE,
        why="a copy in memory, or on a local disk: no more waiting for storage",
        predicted_step_ms=predicted,
        changes="staged=True",
    )


def _memory_by_experiment(measured: Measurements, shares: Shares) -> Remedies:
    """Files in memory, where the loader was seen to gain by it: a fast disk takes CPU time, more than waiting."""
    found = measured.experiments
    if found is None or not found.cached_bytes_per_s:
        return []
    cached = predict.with_bytes_cached(measured, shares)
    return [_staged(cached)] if cached is not None and cached < CACHED_GAIN * shares.step_ms else []


def _waiting(measured: Measurements, shares: Shares) -> Remedies:
    if (measured.loaders.handover_pct or 0.0) < HANDOVER_PCT:
        return _more_waiting(measured, shares) + _deeper(measured.facts, "waits overlap with more steps", None)
    remedies = _uint8(measured, shares)
    if measured.facts.workers == "process":
        remedies.append(_threads("threads hand over a reference, not a copy"))
    return remedies


def _jitter(measured: Measurements, shares: Shares) -> Remedies:
    floor = predict.floor_ms(measured, shares)
    remedies = _deeper(
        measured.facts, "batches in stock bridge the slow ones: the loader is fast enough in the mean", floor
    )
    return remedies or _more_workers(measured, shares)


def _more_workers(measured: Measurements, shares: Shares) -> Remedies:
    """Up to a worker for each CPU."""
    facts = measured.facts
    workers, cpus = facts.num_workers, facts.usable_cpus
    if workers is None or cpus is None or workers >= cpus:
        return []
    more = min(cpus, max(2 * workers, workers + 2))
    predicted = predict.with_workers(measured, shares, more)
    if not predict.worth_it(predicted, shares):
        return []
    return [_change(facts, f"num_workers {workers} -> {more}; {cpus} CPUs may be used", predicted, num_workers=more)]


def _more_waiting(measured: Measurements, shares: Shares) -> Remedies:
    """As many workers as reach the rest of the step: those that wait need no CPU each."""
    facts, floor = measured.facts, predict.floor_ms(measured, shares)
    workers, period = facts.num_workers, predict.period_ms(measured, shares)
    if not workers or period is None:
        return []
    needed = -(-workers * period // floor) if floor > 0 else MOST_WAITING * workers
    more = int(max(workers + 1, min(needed, MOST_WAITING * workers)))
    predicted = predict.with_workers(measured, shares, more)
    if not predict.worth_it(predicted, shares):
        return []
    why = f"num_workers {workers} -> {more}: workers that wait need no CPU each"
    return [_change(facts, why, predicted, num_workers=more)]


def _deeper(facts: LoopFacts, why: str, predicted: float | None) -> Remedies:
    if not facts.num_workers or facts.prefetch_factor is None:
        return []
    deeper = 2 * facts.prefetch_factor
    return [
        _change(facts, f"prefetch_factor {facts.prefetch_factor} -> {deeper}: {why}", predicted, prefetch_factor=deeper)
    ]


def _uint8(measured: Measurements, shares: Shares) -> Remedies:
    why = "uint8 batches: less to compute in the workers, less to send between processes"
    return uint8_remedies(measured.facts, why, predict.as_uint8(measured, shares))


def _cheaper_transforms(measured: Measurements, shares: Shares) -> Remedies:
    """The dearest by name, and what leaving out all of them would give: the most that cheaper ones can."""
    predicted = predict.without_transforms(measured, shares)
    found = measured.experiments
    costs = [] if found is None else [cost for cost in found.costs if step_of(cost.name) not in NOT_TRANSFORMS]
    if predicted is None or not costs or not predict.worth_it(predicted, shares):
        return []
    dearest = sorted(costs, key=lambda cost: cost.cpu_ms, reverse=True)[:2]
    named = " and ".join(f"{cost.name} ({cost.cpu_ms:.1f} ms)" for cost in dearest)
    every = sum(cost.cpu_ms for cost in costs)
    return [
        Remedy(
            code=f"transform = v2.Compose([...])  # without {' and '.join(cost.name for cost in dearest)}",
            why=f"of {every:.1f} ms of CPU time that transforms take for a sample: {named}; the step time is that of "
            "none at all",
            predicted_step_ms=predicted,
            changes="transforms=off",
        )
    ]

"""Says what limits training, with the figures it rests on and what to change. A pure function of what was measured."""

from lightning_feed.watch.stats import StarvationStats
from lightning_feed.watch.verdict.diagnosis import Bottleneck, Diagnosis, Grade, LoopFacts, Measurements, Remedy

FRAMEWORK_PCT, COPY_PCT, DATA_PCT = 10.0, 5.0, 5.0
"""Shares of a step from which its parts are at fault."""
JITTER_PCT, HIGH_PCT = 2.0, 20.0
"""Further limits of the grade; 5 and 20 are those of TensorFlow's input-pipeline analyzer."""
MIN_STEPS = 10
"""With fewer steps there is no verdict."""
SLOW_START_S = 1.0
"""Time to the first batch of an epoch that is worth telling."""
SLACK_SHARE = 0.01
"""Share of a step from which a hidden wait is worth telling."""
SHORT_STEP_MS = 10.0


def diagnose(measured: Measurements) -> Diagnosis:
    """Find what limits training.

    The parts of a step are held against their limits in the order framework (10 %), copy (5 %), data (5 %). Of those
    over their limit the dearest is the bottleneck, the earlier on a tie; the others are named. With none, training is
    limited by what it computes.
    """
    stats, facts = measured.stats, measured.facts
    if stats.steps < MIN_STEPS or stats.starved_pct is None or stats.input_pct is None or not stats.step_ms:
        reason = f"{stats.steps} steps were measured, and a verdict needs {MIN_STEPS}: the first of an epoch and those "
        return Diagnosis(
            bottleneck="unknown",
            grade="not measured",
            confidence="low",
            evidence=(reason + "after a validation do not count",),
            remedies=(),
            measurements=measured,
        )
    shares: dict[Bottleneck, float] = {
        "framework": 100 * (stats.other_ms or 0) / stats.step_ms,
        "copy": stats.input_pct - stats.starved_pct,
        "data": stats.starved_pct,
    }
    limits: dict[Bottleneck, float] = {"framework": FRAMEWORK_PCT, "copy": COPY_PCT, "data": DATA_PCT}
    over = [cause for cause, share in shares.items() if share >= limits[cause]]
    over.sort(key=lambda cause: -shares[cause])
    find = {"framework": _framework, "copy": _copy, "data": _data}
    return Diagnosis(
        bottleneck=over[0] if over else "compute",
        grade=_grade(stats.starved_pct),
        confidence=stats.confidence,
        evidence=tuple(_evidence(stats, facts, over, shares)),
        remedies=tuple(remedy for cause in over for remedy in find[cause](stats, facts)),
        measurements=measured,
    )


def in_ms(value: float | None, step_ms: float) -> str:
    """Milliseconds as text, with a digit more where steps are short."""
    return "?" if value is None else f"{value:.{1 if step_ms >= SHORT_STEP_MS else 2}f}"


def _grade(starved_pct: float) -> Grade:
    if starved_pct < JITTER_PCT:
        return "fed"
    if starved_pct < DATA_PCT:
        return "fed, some jitter"
    return "moderately data-bound" if starved_pct < HIGH_PCT else "highly data-bound"


def _evidence(
    stats: StarvationStats, facts: LoopFacts, over: list[Bottleneck], shares: dict[Bottleneck, float]
) -> list[str]:
    parts = {
        "framework": ("between the steps", stats.other_ms),
        "copy": ("on the way to the device", stats.h2d_ms),
        "data": ("waiting for data", stats.data_idle_ms),
    }
    whole = stats.step_ms or 0.0
    step = in_ms(whole, whole)
    said = []
    for cause in over:
        where, ms = parts[cause]
        said.append(f"{in_ms(ms, whole)} of {step} ms ({shares[cause]:.0f} %) {where}")
    if not over:
        said.append(f"{in_ms(stats.compute_ms, whole)} of {step} ms are the step itself")
    if stats.hidden_wait_ms is not None and stats.hidden_wait_ms >= SLACK_SHARE * whole:
        hidden, wait = in_ms(stats.hidden_wait_ms, whole), in_ms(stats.next_wait_ms, whole)
        said.append(f"{hidden} of {wait} ms in next(loader) cost nothing")
    if stats.epoch_start_s is not None and stats.epoch_start_s >= SLOW_START_S:
        said.append(f"the first batch of an epoch comes after {stats.epoch_start_s:.1f} s")
    if "data" in over and facts.num_workers is not None:
        cpus = f" on {facts.usable_cpus} CPUs" if facts.usable_cpus is not None else ""
        said.append(f"the loader has {facts.num_workers} workers{cpus}")
    if stats.lost_steps:
        said.append(f"{stats.lost_steps} steps could not be measured on the device")
    return said


def _framework(stats: StarvationStats, facts: LoopFacts) -> list[Remedy]:
    without = _without(stats, stats.other_ms)
    remedies = [
        Remedy(
            code='trainer = Trainer(profiler="simple")',
            why="names the callback or hook that takes the time between the steps",
            predicted_step_ms=without,
        )
    ]
    if facts.device_type != "cpu":
        remedies.append(
            Remedy(
                code='self.log("loss", loss, prog_bar=False)',
                why="a metric in the progress bar makes the host wait for the device in each step",
            )
        )
    if facts.world_size > 1:
        remedies.append(
            Remedy(
                code="trainer = Trainer(devices=1)",
                why="to compare: with several ranks Lightning since 2.5.2 waits for the device in each step",
            )
        )
    return remedies


def _copy(stats: StarvationStats, facts: LoopFacts) -> list[Remedy]:
    without = _without(stats, stats.h2d_ms)
    if facts.device_type == "cpu":
        return [
            Remedy(
                code="def collate(self, samples, split): ...",
                why="nothing is copied on the CPU: do the work of the transfer hooks in the workers",
                predicted_step_ms=without,
            )
        ]
    remedies = []
    if facts.pin_memory is False:
        remedies.append(
            Remedy(
                code="FastDataModule(loader=LoaderSettings(pin_memory=True))",
                why="a copy from pageable memory makes the host wait and does not overlap",
            )
        )
    if not stats.prefetch_active:
        remedies.append(
            Remedy(
                code="trainer = Trainer(callbacks=[PrefetchCallback(), GPUStarvationCallback()])",
                why="copies the next batch while this one computes",
                predicted_step_ms=without,
            )
        )
    remedies.append(
        Remedy(
            code="def device_transform(self, batch, split): return batch[0].float().div(255), batch[1]",
            why="uint8 travels in a quarter of the bytes; leave unused keys out of the batch",
        )
    )
    return remedies


def _data(stats: StarvationStats, facts: LoopFacts) -> list[Remedy]:
    remedies = []
    workers, cpus = facts.num_workers, facts.usable_cpus
    if workers is not None and cpus is not None and workers < cpus:
        more = min(cpus, max(2 * workers, workers + 2))
        remedies.append(
            Remedy(
                code=f"FastDataModule(loader=LoaderSettings(num_workers={more}))",
                why=f"num_workers {workers} -> {more}; {cpus} CPUs may be used",
                predicted_step_ms=_with_workers(stats, workers, more),
            )
        )
    elif workers is None or workers == 0:
        remedies.append(
            Remedy(
                code="class Data(FastDataModule): make_dataset = lambda self, split: ...",
                why="a FastDataModule loads in as many worker processes as the machine has CPUs for",
            )
        )
    remedies.append(
        Remedy(
            code="def device_transform(self, batch, split): return batch[0].float().div(255), batch[1]",
            why="uint8 batches: less to compute in the workers, less to send between processes",
        )
    )
    if facts.persistent_workers is False and (stats.epoch_start_s or 0) >= SLOW_START_S:
        remedies.append(
            Remedy(
                code="FastDataModule(loader=LoaderSettings(persistent_workers=True))",
                why="workers are started anew at each epoch",
            )
        )
    return remedies


def _without(stats: StarvationStats, part_ms: float | None) -> float | None:
    return None if stats.step_ms is None or part_ms is None else stats.step_ms - part_ms


def _with_workers(stats: StarvationStats, workers: int, more: int) -> float | None:
    """Step time at best: the slower of the loader, whose rate grows with its workers, and the step without waiting.

    While data limit, a loader with workers makes one batch each step. Without workers it makes one each ``next_wait``.
    """
    without = _without(stats, stats.data_idle_ms)
    period_ms = stats.step_ms if workers else stats.next_wait_ms
    if without is None or period_ms is None:
        return None
    return max(without, period_ms * max(workers, 1) / more)

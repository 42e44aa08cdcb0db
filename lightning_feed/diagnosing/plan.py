"""Which experiments are run, for how long, and what they gave so far."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_feed import _host
from lightning_feed.diagnosing.beside import left_out
from lightning_feed.diagnosing.data import loader_facts, measure_loader, request_loaders, with_key_uses
from lightning_feed.diagnosing.failure import in_a_line, told
from lightning_feed.diagnosing.fits import AS_IT_IS, FEWEST_CYCLES, Bench
from lightning_feed.diagnosing.replay import Sample
from lightning_feed.diagnosing.trainer import LATEST, Limits
from lightning_feed.errors import FeedError
from lightning_feed.watch.experiments.results import ExperimentResults
from lightning_feed.watch.stats import StarvationStats
from lightning_feed.watch.verdict.diagnosis import Measurements

MODEL_EXPERIMENTS = ("X1", "X2")
DATA_EXPERIMENTS = ("X3", "X4", "X5", "X6", "X7", "X8")
EXPERIMENTS = (*MODEL_EXPERIMENTS, *DATA_EXPERIMENTS)
RUN_SHARE, REPLAY_SHARE = 0.17, 0.06
"""Shares of the budget for the run as it is, and for each replay. The data experiments have the rest."""
RUN_STEPS, REPLAY_STEPS = 200, 300
QUICK_RUN_STEPS, QUICK_REPLAY_STEPS = 80, 80
REPLAYED = (8, 4, 2)
"""Batches of a run with batches of several shapes that are replayed: as many of these as there is time for."""
PASSES = 5
"""Times that all of them come: one is warm-up, and two must be left behind it."""
FEWEST_RUN_STEPS = 12
"""The first does not count, and a verdict needs ten."""


@dataclass
class Found:
    """What was asked for, and what is known by now. It can be read at any time."""

    asked: tuple[str, ...]
    budget_s: float
    quick: bool
    bench: Bench | None = None
    results: ExperimentResults = field(default_factory=ExperimentResults)
    left_out: dict[str, str] = field(default_factory=dict)
    """Experiment -> why it was not run."""

    def anything(self) -> bool:
        """Whether something was measured."""
        measured = self.bench.measured if self.bench is not None else None
        return self.results != ExperimentResults() or (measured is not None and measured.stats.step_ms is not None)

    def measurements(self) -> Measurements:
        """All of it, for the verdict."""
        bench = self.bench
        measured = bench.measured if bench is not None else None
        if measured is None:
            facts = loader_facts(bench) if bench is not None else None
            nothing = StarvationStats(steps=0, confidence="low")
            measured = Measurements(stats=nothing) if facts is None else Measurements(stats=nothing, facts=facts)
        results = self.results
        left_out = (*results.left_out, *self.left_out.items())
        results = replace(
            results, batch_size=results.batch_size or measured.facts.batch_size, left_out=tuple(sorted(left_out))
        )
        if bench is not None:
            results = with_key_uses(results, bench)
        return replace(measured, experiments=results)


def run_all(found: Found, model_state: list[Any], bar: Any) -> None:
    """Run what was asked for. Ctrl-C comes through; ``found`` has what was measured by then.

    A Ctrl-C that was lost ends it between the steps of a fit, and between the experiments.

    Args:
        found: filled in.
        model_state: a snapshot of the module, to begin each replay with.
        bar: a tqdm bar of 100 steps.

    Raises:
        FeedError: when the run as it is fails.
    """
    bench = found.bench
    assert bench is not None
    if bench.model is None:
        for name in MODEL_EXPERIMENTS:
            if name in found.asked:
                found.left_out[name] = "no module was given"
        with told("the data module could not be set up"):
            request_loaders(bench)
    else:
        _run_as_it_is(found, bench, _phase(bar, "the run as it is", 0, 17))
        _replays(found, bench, model_state, bar)
        for state in model_state:
            state.restore()
    _measure_loader(found, bench, bar)
    try:
        bench.tear_down()
    except Exception as error:  # noqa: BLE001  # what was measured is worth more
        found.left_out["teardown"] = f"the data module's failed: {in_a_line(error)}"
    bench.stops.look()
    bar.update(bar.total - bar.n)


def _measure_loader(found: Found, bench: Bench, bar: Any) -> None:
    wanted = [name for name in DATA_EXPERIMENTS if name in found.asked]
    if not wanted:
        return
    spent = RUN_SHARE + 2 * REPLAY_SHARE if bench.model is not None else 0.0

    def on_progress(words: str, share: float) -> None:
        bench.stops.look()
        _phase(bar, words, 100 * (spent + (1 - spent) * share), 0)

    mine = found.results
    try:
        for results in measure_loader(bench, wanted, (1 - spent) * found.budget_s, on_progress):
            found.results = replace(results, model_per_s=mine.model_per_s, host_batch_per_s=mine.host_batch_per_s)
    except FeedError as error:
        if bench.measured is None:
            raise
        said = {name for name, _ in found.results.left_out}
        found.left_out.update({name: str(error) for name in wanted if name not in said | _made(found.results)})


def _made(results: ExperimentResults) -> set[str]:
    """The experiments with the loader that have given something."""
    gave = {
        "X3": results.loader_per_s,
        "X4": results.cached_bytes_per_s,
        "X5": results.costs or results.no_transform_per_s,
        "X6": results.cold_per_s,
        "X7": results.ceiling_per_s,
        "X8": results.copy_ms,
    }
    return {name for name, value in gave.items() if value}


def _run_as_it_is(found: Found, bench: Bench, progress: Callable[[int, int], None]) -> None:
    steps = QUICK_RUN_STEPS if found.quick else RUN_STEPS
    limits = Limits(least=FEWEST_RUN_STEPS, most=steps, seconds=RUN_SHARE * found.budget_s)
    with told(AS_IT_IS):
        bench.run_as_it_is(limits, progress)
    beside = left_out(bench.trainer, bench.model, bench.datamodule, bench.callbacks)
    if beside:
        found.left_out["the rest of the fit"] = beside
    if bench.trainer.num_devices * bench.trainer.num_nodes > 1:
        found.left_out["ranks"] = (
            "trained on one device; GPUStarvationCallback() measures in the run itself what ranks cost each other"
        )


def _replays(found: Found, bench: Bench, model_state: list[Any], bar: Any) -> None:
    given = {"X1": ("model_per_s", bench.device_batches), "X2": ("host_batch_per_s", bench.host_batches)}
    for number, (name, (result, sample)) in enumerate(given.items()):
        bench.stops.look()
        if name not in found.asked:
            continue
        if sample.first is None:
            found.left_out[name] = (
                "training_step takes dataloader_iter, and fetches for itself"
                if _host.takes_iterator(bench.model)
                else "the run as it is gave no batch"
            )
            continue
        for state in model_state:
            state.restore()  # the same weights in each: a long fit of one batch ends in other numbers than training
        batches, limits = _batches_and_limits(found, bench, sample)
        many = "batch" if len(batches) == 1 else "batches"
        where = "on the device" if name == "X1" else "from the host"
        progress = _phase(bar, f"{name}: the same {many} {where} again and again", 17 + 6 * number, 6)
        try:
            per_s = bench.replay(batches, limits, progress, on_device=name == "X1")
        except Exception as error:  # noqa: BLE001  # the other experiments do not need this one
            bench.stops.look()  # Ctrl-C reaches the workers too, and they fail of it
            found.left_out[name] = f"it failed: {in_a_line(error)}"
            continue
        if per_s is None:
            found.left_out[name] = "too few steps in the time that there was: give it more, or leave --quick out"
        changed: dict[str, Any] = {result: per_s}
        found.results = replace(found.results, **changed)


def _batches_and_limits(found: Found, bench: Bench, sample: Sample) -> tuple[list[Any], Limits]:
    """As many batches of the run as can be replayed often enough in the time that there is."""
    accumulate, seconds = bench.trainer.accumulate_grad_batches, REPLAY_SHARE * found.budget_s
    most = (QUICK_REPLAY_STEPS if found.quick else REPLAY_STEPS) * accumulate
    step_ms = bench.measured.stats.step_ms if bench.measured is not None else None
    for count in REPLAYED:
        least = PASSES * math.lcm(accumulate, count)
        if step_ms is not None and least <= most and least * step_ms * 1e-3 <= LATEST * seconds:
            batches = sample.take(count)
            if len(batches) > 1:
                return batches, Limits(least=least, most=most, seconds=seconds)
            break
    least = (FEWEST_CYCLES * 4 // 3 + 4) * accumulate
    return sample.take(1), Limits(least=least, most=most, seconds=seconds)


def _phase(bar: Any, words: str, start: float, share: float) -> Callable[[int, int], None]:
    """Says on the bar what runs now; the rest of ``share`` is filled by ``progress(done, most)``."""
    bar.set_description_str(words)
    bar.update(start - bar.n)

    def progress(done: int, most: int) -> None:
        bar.update(start + share * min(1.0, done / most) - bar.n)

    return progress

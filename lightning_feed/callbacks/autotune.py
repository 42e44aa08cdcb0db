"""AutotuneCallback: workers and prefetch of the training loader, adjusted between epochs by measured starvation."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed.callbacks.starvation import GPUStarvationCallback
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.errors import SettingsError
from lightning_feed.load.machine import MEMORY_SHARE, SHM_SHARE, WORKER_BYTES, read_machine
from lightning_feed.load.rank_store import connected, gather
from lightning_feed.load.settings import MOST, TORCH_PREFETCH
from lightning_feed.load.trials.epoch_controller import (
    FEWEST_STEPS,
    ControllerState,
    EpochFigures,
    Move,
    Room,
    decide,
    reconfigure,
    why_fixed,
    why_no_workers,
    worst,
)
from lightning_feed.transfer.resident import ResidentLoader
from lightning_feed.watch.guard import Guard, Once, guarded, say
from lightning_feed.watch.loop import LoopSums
from lightning_feed.watch.verdict.diagnosis import LoopFacts

logger = logging.getLogger(__name__)
_FAILED = "its measuring failed on a rank, which has said why"
_TAKE_OUT = "take out what it had put in"


@dataclass(frozen=True, kw_only=True)
class EpochMove:
    """A change that was made."""

    epoch: int
    """The first that has it, as the Trainer counts."""
    move: Move


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank tells the others before an epoch, so that all of them decide the same."""

    aside: str
    """Why its loader cannot be changed; empty where it can."""
    num_workers: int = 0
    prefetch_factor: int | None = None
    room: Room | None = None
    """None where it does nothing."""
    figures: EpochFigures | None = None
    """None while there are too few steps."""


class AutotuneCallback(Callback):
    """Adjusts ``num_workers`` and ``prefetch_factor`` of the training loader between epochs, by measured starvation.

    It sets more workers while training waits for data and CPUs are free, and fewer while the queue of batches is never
    empty. A change that made steps longer is undone. After three changes the settings stay. Each change is logged with
    its reason, and as the metrics ``feed/num_workers`` and ``feed/prefetch_factor``; ``moves`` keeps them.

    The figures are those of the Trainer's GPUStarvationCallback; without one it measures for itself, and logs no
    figures. Samples come in the same order as without the callback. Random numbers that a data set draws in a worker
    (augmentation) differ with the number of workers, as they do when that is set by hand.

    It works with one training loader of a map-style data set, with worker processes or threads. With iterable data
    sets, several loaders, loaders that iterate in their own way (StatefulDataLoader), and data on the device it does
    nothing, and says so once.

    Args:
        max_workers: the most workers; None: as many as CPUs, memory and /dev/shm allow.

    Raises:
        SettingsError: when ``max_workers`` is not a positive integer.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed.callbacks.autotune import AutotuneCallback
        >>> autotune = AutotuneCallback(max_workers=8)
        >>> trainer = Trainer(callbacks=[autotune], logger=False, accelerator="cpu")
        >>> autotune.moves
        ()
    """

    def __init__(self, max_workers: int | None = None) -> None:
        whole = isinstance(max_workers, int) and not isinstance(max_workers, bool)
        if max_workers is not None and (not whole or not 1 <= max_workers <= MOST):
            raise SettingsError(
                f"AutotuneCallback(max_workers={max_workers!r}): give the most workers that it may use, a whole number "
                f"from 1 to {MOST}, or leave it out to let CPUs and memory decide."
            )
        self.max_workers = max_workers
        self._moves: list[EpochMove] = []
        self._once = Once(logger)
        self._guard = self._new_guard()
        self._forget()

    def _new_guard(self) -> Guard:
        return Guard("AutotuneCallback", self._give_up)

    def _forget(self) -> None:
        self._run: StarvationRun | None = None
        self._sums: LoopSums | None = None
        self._decided: LoopSums | None = None
        """What was summed before the last epoch, and at the last decision."""
        self._state: ControllerState | None = None
        self._aside = ""
        self._over = False
        self._tried_a_worker = False
        self._epochs = 0
        self._put_back: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners. A running fit can be neither.
        return {**self.__dict__, "_run": None, "_put_back": None}

    @property
    def moves(self) -> tuple[EpochMove, ...]:
        """The changes of this fit or the last one, in their order."""
        return tuple(self._moves)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure, where there is something to adjust."""
        self._guard = self._new_guard()
        self._guard.measure(self._begin, trainer)

    def _begin(self, trainer: Any) -> None:
        self._let_go()
        self._forget()
        self._moves = []
        self._aside = self._why_aside(trainer)
        if self._aside:
            self._once.say(trainer, logging.INFO, f"AutotuneCallback does nothing: {self._aside}.")
            return
        if not any(isinstance(one, GPUStarvationCallback) for one in trainer.callbacks):
            self._run = StarvationRun(trainer, every=0, guard=self._guard)
        self._log(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide, and change the loader before Lightning begins its next pass."""
        if self._run is not None:
            self._guard.measure(self._run.epoch_began)
        if not self._epochs:
            return
        if not self._over:
            # Told by a rank that has failed, too: the others wait for it.
            mine = self._guard.measure(self._tell, trainer) or RankState(aside=self._aside or _FAILED)
            every = self._guard.attempt("ask the other ranks", gather, trainer, mine)
            self._over = every is None or any(one.aside for one in every)
            self._guard.measure(self._decide, trainer, every or [RankState(aside=_FAILED)])
        self._guard.measure(self._apply, trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The pass has begun."""
        if self._put_back is not None:  # not before: the pass would draw from the loader's own generator
            self._guard.attempt("put back the generator of the training loader", self._restore)
        if self._run is not None:
            self._guard.measure(self._run.batch_came, batch)

    @guarded
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Count the step, where this callback measures for itself."""
        if self._run is not None:
            self._run.step_ended()

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step in which this validation lies."""
        if self._run is not None:
            self._run.validation_began()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """There are figures now."""
        self._epochs += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure no more."""
        self._guard.attempt(_TAKE_OUT, self._let_go)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take out what was put in: teardown is not called after an exception."""
        self._guard.attempt(_TAKE_OUT, self._let_go)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take out what was put in."""
        self._guard.attempt(_TAKE_OUT, self._let_go)

    def _let_go(self) -> None:
        try:
            self._restore()
        finally:
            self._stop_measuring()

    def _stop_measuring(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _restore(self) -> None:
        put_back, self._put_back = self._put_back, None
        if put_back is not None:
            put_back()

    def _give_up(self) -> None:
        self._aside = _FAILED
        self._stop_measuring()

    # --- between epochs -----------------------------------------------------------------------------------------------

    def _decide(self, trainer: Any, every: list[RankState]) -> None:
        aside = next((one.aside for one in every if one.aside), "")
        if aside:
            self._aside = aside
            self._once.say(trainer, logging.INFO, f"AutotuneCallback does nothing: {aside}.")
        known = [one.figures for one in every if one.figures is not None]
        if aside or len(known) < len(every):
            return
        self._decided = self._sums
        now = self._state or ControllerState(num_workers=every[0].num_workers, prefetch_factor=every[0].prefetch_factor)
        self._state, move = decide(now, worst(known), _narrowest([one.room for one in every if one.room is not None]))
        self._over = bool(self._state.frozen)  # the same on all ranks, whatever fails on one of them below
        self._apply(trainer)
        if move is not None:
            self._moves.append(EpochMove(epoch=trainer.current_epoch, move=move))
            if trainer.is_global_zero:
                said = f"AutotuneCallback, epoch {trainer.current_epoch}: {_described(now, move)}"
                say(logger, logging.INFO, said)
            self._log(trainer)
        elif self._state.held:
            self._once.say(trainer, logging.INFO, f"AutotuneCallback changes nothing: {self._state.held}.", of="held")
        if self._state.frozen:
            self._once.say(trainer, logging.INFO, f"AutotuneCallback is done: {self._state.frozen}.")

    def _tell(self, trainer: Any) -> RankState:
        """What this rank knows before the next epoch."""
        aside = self._aside or self._why_aside(trainer)
        if aside:
            return RankState(aside=aside)
        (loader,) = _host.train_loaders(trainer)
        workers = self._state.num_workers if self._state is not None else loader.num_workers
        run = self._measuring(trainer)
        now = self._sums = run.settled() if run is not None else None
        figures = None if now is None else figures_of(now - self._decided if self._decided is not None else now)
        if figures is not None and not workers and not self._tried_a_worker:
            self._tried_a_worker = True
            aside = why_no_workers(loader)
        return RankState(
            aside=aside,
            num_workers=workers,
            prefetch_factor=loader.prefetch_factor if workers else None,
            room=_room(trainer, loader, run.main.facts if run is not None else LoopFacts(), most=self.max_workers),
            figures=figures,
        )

    def _measuring(self, trainer: Any) -> StarvationRun | None:
        """This callback's own run, or that of the GPUStarvationCallback beside it."""
        beside = (one.measured_fit for one in trainer.callbacks if isinstance(one, GPUStarvationCallback))
        return self._run or next((run for run in beside if run is not None), None)

    def _why_aside(self, trainer: Any) -> str:
        """Why there is nothing to adjust in this fit; empty where there is."""
        first = next(one for one in trainer.callbacks if isinstance(one, AutotuneCallback))
        if first is not self:
            return "another AutotuneCallback is at work"
        loaders = _host.train_loaders(trainer)
        if len(loaders) != 1:
            return f"there are {len(loaders)} training loaders, and which of them is waited for is not measured"
        if trainer.world_size > 1 and not connected():
            return "the ranks are not connected by torch.distributed, so they cannot agree"
        if isinstance(loaders[0], ResidentLoader):
            return "the training set is on the device, so there is nothing to load"
        return why_fixed(loaders[0])

    def _apply(self, trainer: Any) -> None:
        """Let the loader have what was decided. Loaders that were made anew for this epoch do not have it yet."""
        now = self._state
        loaders = _host.train_loaders(trainer)
        if now is None or self._aside or len(loaders) != 1:
            return
        loader = loaders[0]
        has = loader.num_workers, loader.prefetch_factor if loader.num_workers else None
        if has != (now.num_workers, now.prefetch_factor if now.num_workers else None):
            prefetch = (now.prefetch_factor or TORCH_PREFETCH) if now.num_workers else None
            self._put_back = reconfigure(loader, now.num_workers, prefetch)

    # --- telling ------------------------------------------------------------------------------------------------------

    def _log(self, trainer: Any) -> None:
        """The settings of the epochs to come, as metrics."""
        if not trainer.is_global_zero or not trainer.loggers:
            return
        (loader,) = _host.train_loaders(trainer)
        tags = {"feed/num_workers": float(loader.num_workers)}
        if loader.num_workers:
            tags["feed/prefetch_factor"] = float(loader.prefetch_factor)
        step = _host.steps_logged(trainer)
        for number, each in enumerate(trainer.loggers):
            task = f"log its settings to {type(each).__name__} (trainer.loggers[{number}])"
            self._guard.attempt(task, each.log_metrics, tags, step=step)


def _described(before: ControllerState, move: Move) -> str:
    changed = [
        f"{name} {old} -> {new}"
        for name, old, new in (
            ("num_workers", before.num_workers, move.num_workers),
            ("prefetch_factor", before.prefetch_factor, move.prefetch_factor),
        )
        if old != new
    ]
    return f"{', '.join(changed)}: {move.reason}"


def _room(trainer: Any, loader: Any, facts: LoopFacts, *, most: int | None) -> Room:
    """What the machine leaves to this rank's loader, its present workers included.

    Args:
        trainer: that fits.
        loader: that loads for it.
        facts: of the run. An epoch's batches are as many workers as can be used.
        most: workers that the user allows; None for any number.
    """
    machine, ranks = read_machine(), max(1, trainer.num_devices)
    limits, in_flight = [most], None
    if getattr(loader, "workers", "process") != "thread":
        limits.append(facts.batches_per_epoch)
        if machine.available_memory_bytes is not None:
            more = MEMORY_SHARE * machine.available_memory_bytes / (WORKER_BYTES[machine.start_method] * ranks)
            limits.append(loader.num_workers + int(more))
        if machine.free_shm_bytes is not None and facts.batch_bytes:
            in_flight = int(SHM_SHARE * machine.free_shm_bytes / (facts.batch_bytes * ranks))
    return Room(usable_cpus=max(1, machine.usable_cpus // ranks), most_in_flight=in_flight, most_workers=_least(limits))


def _narrowest(rooms: list[Room]) -> Room:
    """The room that all ranks have."""
    return Room(
        usable_cpus=min(room.usable_cpus for room in rooms),
        most_in_flight=_least(room.most_in_flight for room in rooms),
        most_workers=_least(room.most_workers for room in rooms),
    )


def _least(limits: Iterable[int | None]) -> int | None:
    return min((one for one in limits if one is not None), default=None)


def figures_of(sums: LoopSums) -> EpochFigures | None:
    """The figures of what was summed since the last decision; None while there are too few steps."""
    stats = sums.steps.stats(settled=True, trusted_clock=True, prefetch_active=None)
    if stats.steps < FEWEST_STEPS or stats.step_ms is None or stats.data_idle_ms is None:
        return None
    loaders = sums.loaders.to_stats()
    return EpochFigures(
        steps=stats.steps,
        step_ms=stats.step_ms,
        data_idle_ms=stats.data_idle_ms,
        queue_ready=loaders.queue_ready,
        queue_capacity=loaders.queue_capacity,
        on_cpu_pct=loaders.workers_on_cpu_pct,
        run_queue_pct=loaders.workers_run_queue_pct,
    )

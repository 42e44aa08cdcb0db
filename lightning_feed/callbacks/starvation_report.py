"""Facts of a Trainer's run, and its report and hyperparameters given to loggers."""

import inspect
import io
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from lightning_feed import _host
from lightning_feed._host.loops import bar_refresh_rate
from lightning_feed.callbacks.loader_place import find_place, users_line
from lightning_feed.callbacks.prefetch import PrefetchCallback, Stage
from lightning_feed.load.iterable import divides_among_workers
from lightning_feed.load.machine import read_machine
from lightning_feed.watch import loop
from lightning_feed.watch.facts import (
    batches_ahead,
    may_leave_process,
    may_persist,
    with_loaders,
)
from lightning_feed.watch.guard import Guard
from lightning_feed.watch.loader_state import loaders_in
from lightning_feed.watch.reports.document import as_json
from lightning_feed.watch.reports.files import as_html, diagnosis_markdown
from lightning_feed.watch.reports.report import Report, headline
from lightning_feed.watch.stats import SOME_STEPS, choose_tags, to_tags
from lightning_feed.watch.verdict.diagnosis import Diagnosis, HookPlace, LoopFacts

_INTERVALS = ("every_n_steps", "log_every_n_steps", "every_n_train_steps", "refresh_rate")
"""What a callback's constructor calls the number of steps from one time that it does its work to the next."""
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def facts_of(trainer: Any, guard: Guard, stage: Stage = "fit", *, before: LoopFacts | None = None) -> LoopFacts:
    """All that can be told of a stage's loop before its first batch, and what its batches have told ``before``."""
    machine = read_machine()
    facts = LoopFacts(
        stage=stage,
        device_type=trainer.strategy.root_device.type,
        usable_cpus=max(1, machine.usable_cpus // trainer.num_devices),
        free_shm_bytes=machine.free_shm_bytes,
        world_size=trainer.world_size,
        batches_per_epoch=_host.batches_of(trainer, stage),
        log_every_n_steps=trainer.log_every_n_steps,
        **(_beside_training(trainer) if stage == "fit" else {}),
        batch_hooks=any(
            _host.is_overridden(owner, hook)
            for owner in (trainer.lightning_module, trainer.datamodule)
            for hook in _BATCH_HOOKS
        ),
        **(tell() if (tell := getattr(trainer.datamodule, "_feed_facts", None)) is not None else {}),
        **_package(trainer),
    )
    loaders = _loaders(trainer, stage)
    facts = with_loaders(facts, loaders)
    if stage == "fit":
        facts = _with_traits(facts, trainer, loaders)
        place = before.place if before is not None else None
        # It reads the user's source, objects and settings, which may be anything.
        place = place or guard.attempt("tell where the training loader is made", find_place, trainer, loaders)
        hooks = before.hook_places if before is not None else guard.attempt("find the hooks", _hook_places, trainer)
        facts = replace(facts, place=place, hook_places=hooks or ())
    if before is not None:
        kept = {name: getattr(before, name) for name in ("batch_bytes", "batch_tensors", "syncs")}
        facts = replace(facts, **kept)
    return facts


def _with_traits(facts: LoopFacts, trainer: Any, loaders: list[Any]) -> LoopFacts:
    """What remedies go by: how the loaders are set up, and what their workers may do."""
    streams = [divided for loader in loaders if (divided := divides_among_workers(loader)) is not None]
    return replace(
        facts,
        every_num_workers=tuple(loader.num_workers for loader in loaders if hasattr(loader, "num_workers")),
        shards_by_worker=all(streams) if streams else None,
        may_leave_process=all(may_leave_process(loader) is not False for loader in loaders) if streams else None,
        may_persist=may_persist(loaders, reloaded=bool(trainer.reload_dataloaders_every_n_epochs)),
        bar_refresh_rate=bar_refresh_rate(trainer),
    )


def _hook_places(trainer: Any) -> tuple[HookPlace, ...]:
    module = trainer.lightning_module
    named = [(one, f"[Callback]{type(one).__qualname__}") for one in trainer.callbacks]
    named.append((module, f"[LightningModule]{type(module).__name__}"))
    return tuple(place for owner, name in named for place in _places(owner, name))


def _places(owner: Any, name: str) -> Iterator[HookPlace]:
    parameters = inspect.signature(type(owner)).parameters if name.startswith("[Callback]") else {}
    given = {one: getattr(owner, one, None) for one in _INTERVALS if one in parameters}
    interval = next((one for one, steps in given.items() if type(steps) is int and steps == 1), "")
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        at = users_line(getattr(owner, hook, None))
        if at:
            yield HookPlace(name=f"{name}.{hook}", at=at, interval=interval)


def queue_of(trainer: Any, stage: Stage = "fit") -> int:
    """Batches that the loaders of a stage may hold ready."""
    return batches_ahead(_loaders(trainer, stage))


def _beside_training(trainer: Any) -> dict[str, Any]:
    """How often there is a validation, where it may be made rarer, and a checkpoint."""
    every, between = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if between in (float("inf"), trainer.num_training_batches) and every is not None:
        between = None  # at the end of an epoch
    elif between is None:
        every = None  # by time
    needed = _host.needs_metrics_every(trainer)
    if "step" in needed or ("epoch" in needed and None in (every, between)):
        every = between = None  # rarer, a scheduler would find no metric, and that ends the fit
    savers = [_host.steps_between_checkpoints(one) for one in trainer.checkpoint_callbacks]
    return {
        "check_val_every_n_epoch": every,
        "val_check_batches": between,
        "checkpoint_steps": savers[0] or None if len(savers) == 1 else None,
    }


def _loaders(trainer: Any, stage: str) -> list[Any]:
    """The loaders of a stage; in the place of a wrapper what is in it."""
    return [inner for loader in _host.loop_loaders(trainer, stage) for inner in loaders_in(loader)]


def prefetch_active(trainer: Any) -> bool | None:
    """Whether a PrefetchCallback of this Trainer is at work; None: it has none."""
    found = [callback.active for callback in trainer.callbacks if isinstance(callback, PrefetchCallback)]
    return any(found) if found else None


def _package(trainer: Any) -> dict[str, Any]:
    """What trains, and its version: a user's subclass of Trainer lives elsewhere."""
    modules = (kind.__module__.partition(".")[0] for kind in type(trainer).__mro__)
    found = next((name for name in modules if name in ("lightning", "pytorch_lightning")), None)
    if found is None:
        return {}
    package = "lightning.pytorch" if found == "lightning" else found
    return {"package": package, "lightning": str(sys.modules[found].__version__)}


TEXT_TAG = "feed/report"
SLOW_S = 1e-3
"""A call of a logger that takes longer is slow."""


class Pace:
    """Gives figures to one logger: where each of its calls takes long, only so often that they cost 1 % of the time."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=3)
        self._next_s = -math.inf

    def give(self, to: Any, tags: dict[str, float], step: int) -> None:
        """Log the figures, or leave this window out."""
        began = loop.clock()
        if not tags or began < self._next_s:
            return
        to.log_metrics(tags, step=step)
        self._took.append(loop.clock() - began)
        least = min(self._took)  # one slow call may have other reasons
        if len(self._took) == self._took.maxlen and least >= SLOW_S:
            self._next_s = loop.clock() + 100 * least


def tells_nothing(found: Diagnosis, steps: int) -> bool:
    """Whether a fit was so short, with ``steps`` steps, that nobody expects a verdict."""
    return found.bottleneck == "unknown" and steps < SOME_STEPS


def run_folder(trainer: Any) -> Path | None:
    """The folder of this run: of the first logger that has one on this machine, else that of the checkpoints.

    Not ``trainer.log_dir``: that is a broadcast, which all ranks have to take part in. Loggers may give anything.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    for one in trainer.loggers:
        found = _path(getattr(one, "log_dir", None))
        if found is None and (saved := _path(getattr(one, "save_dir", None))) is not None:
            version = one.version if isinstance(one.version, str) else f"version_{one.version}"
            found = saved / str(one.name) / version  # where ModelCheckpoint puts its checkpoints
        if found is not None:
            return found
    return _path(getattr(trainer.checkpoint_callback, "dirpath", None))


def _path(folder: Any) -> Path | None:
    """None too for an address (``s3://bucket/runs``), of which a path would make a folder here."""
    if not isinstance(folder, (str, PurePath)) or "://" in str(folder):
        return None
    return Path(folder)


def achieved(found: Diagnosis) -> dict[str, float]:
    """What a run's settings gave, to stand beside them in a table of runs. What was not measured is absent."""
    stats, size = found.stats, found.measurements.facts.batch_size
    figures: dict[str, float] = {}
    if stats.starved_pct is not None:
        figures["feed_final/starved_pct"] = stats.starved_pct
    if stats.step_ms and size:
        figures["feed_final/samples_per_s"] = 1e3 * size / stats.step_ms
    return figures


def give_report(to: Any, report: Report, step: int) -> None:
    """Give a report to a logger in the form that it shows best; nothing to one that takes neither pages nor text.

    Weights & Biases gets the page, and in the run's summary the verdict with the figures of the whole run; TensorBoard
    and Comet get Markdown; MLflow the files ``feed_report.md`` and ``feed_report.json`` as artifacts.
    """
    found = report.diagnosis
    experiment: Any = getattr(to, "experiment", None)
    if any(kind.__name__ == "WandbLogger" for kind in type(to).__mro__):
        import wandb

        experiment.log({TEXT_TAG: wandb.Html(io.StringIO(as_html(report))), "trainer/global_step": step})
        whole = choose_tags(to_tags(found.stats), "core", tensorboard=False)
        experiment.summary.update({**whole, "feed/verdict": headline(found)})  # else W&B shows the last window there
    elif callable(getattr(experiment, "add_text", None)):
        experiment.add_text(TEXT_TAG, diagnosis_markdown(found), step)
    elif callable(getattr(experiment, "log_text", None)):
        run_id = getattr(to, "run_id", None)
        if run_id is None:
            experiment.log_text(diagnosis_markdown(found), step=step)
        else:
            experiment.log_text(run_id, diagnosis_markdown(found), "feed_report.md")
            experiment.log_text(run_id, as_json(report), "feed_report.json")


_HPARAMS_RUN = "feed"
"""The folder in a TensorBoard run's folder, where TensorBoard finds them."""


def tuned_hparams(datamodule: Any) -> dict[str, Any]:
    """The settings of the training loader as hyperparameters, so that runs can be compared by them.

    Args:
        datamodule: a FastDataModule or a wrapped data module whose training loader was made.

    Returns:
        ``feed/num_workers`` and so on; of several training loaders with their names. Empty for other data modules, and
        before the loader is made.
    """
    found = getattr(datamodule, "recommendations", None)
    if not isinstance(found, Mapping):
        return {}
    chosen = {name: one for name, one in found.items() if name == "train" or str(name).startswith("train[")}
    params: dict[str, Any] = {}
    for name, one in chosen.items():
        prefix = "feed/" if len(chosen) == 1 else f"feed/{name}/"
        for value in ("num_workers", "workers", "prefetch_factor", "pin_memory", "persistent_workers"):
            params[prefix + value] = getattr(one, value) if getattr(one, value) is not None else 0
    return params


def log_hparams(logger: Any, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Give a logger of Lightning's hyperparameters with what they led to. Once, at the end of a fit, on rank 0.

    TensorBoard takes the first hyperparameters of a run and no others, and those are the user's: so these go, with the
    user's, into a run of their own in the folder ``feed`` of that run. Other loggers get them as further
    hyperparameters, and the metrics as metrics.

    Args:
        logger: one of ``trainer.loggers``.
        params: of :func:`tuned_hparams`.
        metrics: what runs are to be compared by, such as ``feed_final/starved_pct``.
    """
    if not params:
        return
    add = getattr(logger.experiment, "add_hparams", None)
    if add is None:
        logger.log_hyperparams(dict(params))
        logger.log_metrics(dict(metrics))
        return
    users = _flat(getattr(logger, "hparams", None) or {})
    # torch's SummaryWriter and tensorboardX's differ in the name of that argument.
    name = "run_name" if "run_name" in inspect.signature(add).parameters else "name"
    add({**users, **params}, dict(metrics), **{name: _HPARAMS_RUN})


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters with their places as names, and as text what TensorBoard does not take as it is."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat

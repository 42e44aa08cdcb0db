"""All code that uses Lightning's private parts.

Each function names the versions against which its private parts were checked, and, if known, a public interface that
would replace them. The functions take objects of both packages (``lightning`` and ``pytorch_lightning``). Nothing is
imported from either: their classes are recognized by name.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeAlias

from lightning_feed.errors import SettingsError

AnyTrainer: TypeAlias = Any
"""A Trainer of lightning or pytorch_lightning."""
AnyModule: TypeAlias = Any
"""A LightningModule of either package."""
AnyDataModule: TypeAlias = Any
"""A LightningDataModule of either package."""
Original: TypeAlias = Callable[..., Any]
"""The replaced method, of Lightning or the user, which a wrap calls."""
Stage = Literal["fit", "validate", "test", "predict"]
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def package_of(first: object, *others: object) -> ModuleType:
    """The package that a Trainer, a module or a data module comes from: ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        SettingsError: it comes from neither, or ``others`` come from the other package, whose objects do not fit.
    """
    found = [PACKAGES[top] for base in type(first).__mro__ if (top := base.__module__.partition(".")[0]) in PACKAGES]
    if isinstance(first, type):
        raise SettingsError(f"{first.__name__} is a class. Pass an object of it: {first.__name__}(...).")
    if not found:
        raise SettingsError(
            f"{type(first).__module__}.{type(first).__qualname__} comes from neither lightning.pytorch nor "
            "pytorch_lightning. Give a Trainer, a LightningModule and a LightningDataModule of one of them."
        )
    for other in others:
        if package_of(other).__name__ != found[0]:
            raise SettingsError(
                f"{type(first).__name__} comes from {found[0]} and {type(other).__name__} from "
                f"{package_of(other).__name__}, but the packages do not accept each other's objects. Import both from "
                "one."
            )
    return import_module(found[0])


def epochs_processed(trainer: AnyTrainer) -> int:
    """Number of completed training epochs, which is the number of the present epoch.

    Lightning passes it to ``sampler.set_epoch``. In a resumed run, ``trainer.current_epoch`` is behind it until the fit
    loop starts. Checked against Lightning 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_advance_start``).
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def next_epoch(trainer: AnyTrainer, epoch: int) -> int | None:
    """Number of the epoch after ``epoch``; None if the fit has none, or makes its loaders again."""
    if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.reload_dataloaders_every_n_epochs:
        return None
    most = trainer.max_epochs
    return None if most is not None and 0 <= most <= epoch + 1 else epoch + 1


def ranks_that_share_samples(trainer: AnyTrainer) -> int:
    """Number of ranks among which Lightning divides the samples of a map-style dataset.

    Checked against Lightning 2.4.0 and 2.6.6 (``connectors/data_connector.py: _requires_distributed_sampler``).
    """
    connector = trainer._accelerator_connector
    return int(trainer.world_size) if connector.use_distributed_sampler and connector.is_distributed else 1


def live_fetcher(trainer: AnyTrainer) -> Any:
    """The fetcher of the loop that runs now, or None before it exists.

    Checked against Lightning 2.4.0, 2.5.6 and 2.6.6.
    """
    if trainer.training:  # checked first, as this runs in each step
        return trainer.fit_loop._data_fetcher
    known = trainer.sanity_checking or trainer.validating or trainer.testing or trainer.predicting
    return _loop_of(trainer, stage_now(trainer))._data_fetcher if known else None


def stage_now(trainer: AnyTrainer) -> Stage:
    """The stage of the running loop: ``"fit"``, ``"validate"`` (also within a fit), ``"test"`` or ``"predict"``."""
    if trainer.training:
        return "fit"
    if trainer.sanity_checking or trainer.validating:
        return "validate"
    return "test" if trainer.testing else "predict"


def _loop_of(trainer: AnyTrainer, stage: str) -> Any:
    """The loop of a stage, named as by :func:`stage_now`.

    Checked against Lightning 2.4.0, 2.5.6 and 2.6.6 (``trainer/trainer.py``).
    """
    if stage == "validate" and trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return getattr(trainer, f"{stage}_loop")


def loop_loaders(trainer: object, stage: str) -> list[Any]:
    """The loaders of a stage, flattened. Checked against Lightning 2.4.0 and 2.6.6 (``setup_data`` of each loop)."""
    combined = _loop_of(trainer, stage)._combined_loader
    return [] if combined is None else list(combined.flattened)


def train_loaders(trainer: object) -> list[Any]:
    """The training loaders, flattened."""
    return loop_loaders(trainer, "fit")


def loader_names(trainer: object, stage: str) -> list[str]:
    """The names of the loaders of a stage: keys of a dict, else as Lightning names them in metrics.

    Checked against Lightning 2.4.0 and 2.6.6 (``utilities/combined_loader.py``).
    """
    loaders = loop_loaders(trainer, stage)
    given = getattr(_loop_of(trainer, stage)._combined_loader, "iterables", None)
    if isinstance(given, dict) and [*map(id, given.values())] == [*map(id, loaders)]:
        return [str(key) for key in given]
    return [f"dataloader_idx_{index}" for index in range(len(loaders))]


def loop_iterators(trainer: object, stage: str) -> list[Any]:
    """The iterators that a stage's batches come from now; empty outside the stage.

    One for each loader, but only the current loader's in the mode ``sequential``, which goes on to the next loader
    within an epoch. ``max_size_cycle`` makes a new iterator at the end of a loader. The fetcher may have any class, and
    may be adopted by PrefetchCallback. Checked against Lightning 2.4.0 and 2.6.6 (``loops/fetchers.py: _DataFetcher``,
    ``utilities/combined_loader.py: _ModeIterator``).
    """
    combined = getattr(_loop_of(trainer, stage)._data_fetcher, "_combined_loader", None)
    return list(getattr(getattr(combined, "_iterator", None), "iterators", None) or ())


def batches_of(trainer: AnyTrainer, stage: str) -> int | None:
    """Number of batches in an epoch of a stage, over all loaders; None for an endless one.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/evaluation_loop.py: max_batches``).
    """
    every = trainer.num_training_batches if stage == "fit" else sum(_loop_of(trainer, stage).max_batches)
    return None if every == float("inf") else int(every)


def train_fetcher(trainer: AnyTrainer) -> Any:
    """The training loop's fetcher; None outside a fit. Checked against Lightning 2.4.0, 2.5.6 and 2.6.6."""
    return trainer.fit_loop._data_fetcher


def train_progress(trainer: AnyTrainer) -> Any:
    """The training loop's count of its batches.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/progress.py: _BatchProgress``).
    """
    return trainer.fit_loop.epoch_loop.batch_progress


def read_already(trainer: AnyTrainer) -> bool:
    """True if Lightning has drawn a batch that no step has received yet, as it does for loaders without a length."""
    return bool(trainer.fit_loop._data_fetcher.batches)


def train_batches_to_follow(trainer: AnyTrainer, *, at_most: int, step_pending: bool) -> int:
    """The number of batches that the training loop will certainly take directly after this one, up to ``at_most``.

    0 if the run ends here, or if validation comes first: validation must draw from the global random generators before
    the next training batch is loaded.

    Args:
        at_most: largest result.
        step_pending: True if the optimizer step of this batch has not run yet, so that the step count is one behind.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``).
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.should_stop or loop.batch_progress.is_last_batch:
        return 0
    if trainer.max_steps != -1:
        at_most = min(at_most, trainer.max_steps - trainer.global_step - step_pending)
    if at_most <= 0 or loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return 0
    every = trainer.val_check_batch
    if every not in (None, float("inf")) and loop._should_check_val_epoch():
        done = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
        at_most = min(at_most, int(every - (done + 1) % every))
    return at_most


def change_saved_arguments(loader: object, changed: dict[str, Any], *, always: tuple[str, ...]) -> None:
    """Change the arguments that Lightning recorded when a loader was made in a hook.

    Lightning uses them to rebuild the loader if it needs another sampler. Arguments in ``always`` are added even if
    they were not passed, if the constructor accepts them. Checked against Lightning 2.4.0 and 2.6.6
    (``fabric/utilities/data.py: _wrap_dataloader_init``).
    """
    kept = vars(loader)
    if "__pl_saved_kwargs" not in kept:
        return
    names = list(kept["__pl_saved_arg_names"])
    values = list(kept["__pl_saved_args"])
    saved = dict(kept["__pl_saved_kwargs"])
    constructor: Any = inspect.unwrap(type(loader).__init__)
    parameters = inspect.signature(constructor).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name, value in changed.items():
        if name in names:
            values[names.index(name)] = value
        elif name in saved or (name in always and (takes_all or name in parameters)):
            saved[name] = value
    kept["__pl_saved_args"], kept["__pl_saved_kwargs"] = tuple(values), saved


def train_loader_source(trainer: AnyTrainer) -> Any:
    """The module or data module whose ``train_dataloader`` returns the loaders; None if ``trainer.fit`` got them.

    Checked against Lightning 2.4.0 and 2.6.6 (``connectors/data_connector.py: _DataLoaderSource``).
    """
    source = trainer.fit_loop._data_source
    return source.instance if source.is_module() else None


def wrap_train_source(trainer: AnyTrainer, around: Callable[..., Any]) -> "Wrap":
    """Call ``around(original)`` in place of the function that makes a fit's training loaders, each time.

    Checked against Lightning 2.4.0 and 2.6.6 (``connectors/data_connector.py: _DataLoaderSource.dataloader``).
    """
    return Wrap(trainer.fit_loop._data_source, "dataloader", around)


def wrap_epoch_start(trainer: AnyTrainer, around: Callable[..., Any]) -> "Wrap":
    """Call ``around(original, fetcher)`` in place of the function that makes the iterators of an epoch after the first.

    It runs after all ``on_train_epoch_start``. Checked against Lightning 2.4.0 and 2.6.6
    (``loops/training_epoch_loop.py: _TrainingEpochLoop.on_run_start``).
    """
    return Wrap(trainer.fit_loop.epoch_loop, "on_run_start", around)


def wrap_validation_start(trainer: AnyTrainer, around: Callable[..., Any]) -> "Wrap":
    """Call ``around(original)`` in place of the function that makes the iterators of a validation within a fit.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/evaluation_loop.py: _EvaluationLoop.reset``).
    """
    return Wrap(trainer.fit_loop.epoch_loop.val_loop, "reset", around)


def replace_train_loader(trainer: AnyTrainer, loader: object) -> None:
    """Switch training to another loader, from the epoch that begins.

    Call from ``on_train_epoch_start``, except in a fit's first epoch, whose iterator already exists. Checked against
    Lightning 2.4.0 and 2.6.6 (``utilities/combined_loader.py``).
    """
    trainer.fit_loop._combined_loader.flattened = [loader]


def replace_train_iterator(trainer: AnyTrainer, iterator: object) -> None:
    """Take the rest of the present epoch's batches from another iterator. For a single training loader.

    Checked against Lightning 2.4.0 and 2.6.6 (``utilities/combined_loader.py: _ModeIterator``).
    """
    trainer.fit_loop._combined_loader._iterator.iterators[0] = iterator


def bar_refresh_rate(trainer: AnyTrainer) -> int | None:
    """Batches between two updates of the progress bar; None if there is no bar, or one of another kind."""
    rate = getattr(trainer.progress_bar_callback, "refresh_rate", None)
    return rate if type(rate) is int else None


def cli_config(trainer: AnyTrainer) -> dict[str, Any]:
    """The arguments of LightningCLI, by their dotted keys; empty without LightningCLI.

    Checked against Lightning 2.4.0 and 2.6.6 (``cli.py: SaveConfigCallback``, where keys lack the subcommand's name).
    """
    for callback in trainer.callbacks:
        if _is_a(callback, "SaveConfigCallback"):
            return {str(key): value for key, value in callback.config.items()}
    return {}


def go_on_past_the_end(trainer: AnyTrainer) -> None:
    """Let the training loop ignore ``max_epochs`` and ``max_steps`` from now on.

    Values that optimizers and schedulers have already read are unchanged. Checked against Lightning 2.4.0 and 2.6.6
    (``loops/fit_loop.py: done``, ``loops/training_epoch_loop.py: _is_training_done``).
    """
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.epoch_loop.max_steps = -1


def keep_plateaus(trainer: AnyTrainer) -> None:
    """Freeze learning rates that follow a metric: without validation the metric may be missing.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _update_learning_rates``).
    """
    for config in trainer.strategy.lr_scheduler_configs:
        if config.reduce_on_plateau:
            config.frequency = sys.maxsize


def needs_metrics_every(trainer: AnyTrainer) -> set[str]:
    """The intervals (``"epoch"``, ``"step"``) at which the fit fails if a learning-rate scheduler gets no metric.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _update_learning_rates``).
    """
    configs = trainer.strategy.lr_scheduler_configs
    return {config.interval for config in configs if config.reduce_on_plateau and config.strict}


def takes_iterator(pl_module: AnyModule) -> bool:
    """Check if ``training_step`` takes an iterator, and fetches its batches itself.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/utilities.py``).
    """
    return "dataloader_iter" in inspect.signature(pl_module.training_step).parameters


def epoch_cut_short(trainer: AnyTrainer) -> tuple[int, int] | None:
    """(batches that came, batches promised) if the training loader ended before its length; None if it did not.

    Lightning then runs no validation, and says nothing. Checked against Lightning 2.4.0 and 2.6.6
    (``loops/training_epoch_loop.py``).
    """
    promised = trainer.num_training_batches
    loop = trainer.fit_loop.epoch_loop
    came = loop.batch_progress.current.ready
    if promised == float("inf") or trainer.should_stop or trainer.global_step == loop.max_steps or came >= promised:
        return None
    return int(came), int(promised)


def is_training(trainer: AnyTrainer) -> bool:
    """Check if one of the Trainer's loops runs now.

    Checked against Lightning 2.4.0 and 2.6.6 (``trainer/states.py``).
    """
    return str(getattr(trainer.state.status, "value", trainer.state.status)) == "running"


def shards_the_model(trainer: AnyTrainer) -> bool:
    """Check if the strategy divides one model among devices.

    Checked against Lightning 2.4.0 and 2.6.6 (``strategies``).
    """
    return _is_a(trainer.strategy, "FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


def detects_anomalies(trainer: object) -> bool:
    """Check for ``Trainer(detect_anomaly=True)``.

    Checked against Lightning 2.4.0 and 2.6.6 (``trainer/trainer.py``).
    """
    return bool(getattr(trainer, "_detect_anomaly", False))


def steps_between_checkpoints(callback: object) -> int:
    """Steps between saves of a ModelCheckpoint; 0: by epochs.

    Checked against Lightning 2.4.0 and 2.6.6 (``callbacks/model_checkpoint.py``).
    """
    return int(getattr(callback, "_every_n_train_steps", 0) or 0)


# --- actions, logging and the progress bar ----------------------------------------------------------------------------


def actions(trainer: AnyTrainer, stage: str) -> dict[str, str]:
    """The profiler's names for the parts of a stage's loop: ``fetch``, ``to_device``, ``step``.

    For validations, tests and predictions also ``epoch_end``, which starts after their last step. For a fit also:

    - ``forward``, ``backward`` and ``optimizer``, but not with manual optimisation: it does not announce the backward
      pass, and its CUDA graphs must not contain our events.
    - ``validation``, which starts before the validation's loaders are iterated. Absent while gradients are accumulated.
    - ``validation_end``, which stops when the validation has only to print.
    - ``epoch``.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``, ``loops/evaluation_loop.py``,
    ``loops/fit_loop.py``, ``loops/prediction_loop.py``, ``loops/optimization``, ``trainer/call.py``).
    """
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    module = f"[LightningModule]{type(trainer.lightning_module).__name__}"
    names = {"to_device": f"{strategy}.batch_to_device"}
    if stage != "fit":
        loop = "_PredictionLoop" if stage == "predict" else "_EvaluationLoop"
        prefix, step = ("val", "validation_step") if stage == "validate" else (stage, f"{stage}_step")
        return names | {
            "fetch": f"[{loop}].{prefix}_next",
            "step": f"{strategy}.{step}",
            "epoch_end": f"{module}.on_{step.removesuffix('_step')}_epoch_end",
        }
    if trainer.lightning_module.automatic_optimization:
        names["forward"], names["backward"] = f"{strategy}.training_step", f"{strategy}.backward"
        names["optimizer"] = f"{module}.optimizer_step"
    return names | {
        "fetch": f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next",
        "step": "run_training_batch",
        "validation": f"{module}.on_validation_model_zero_grad",
        "validation_end": f"{strategy}.on_validation_end",
        "epoch": "run_training_epoch",
    }


class RunBegins:
    """Descriptor that detects the start of a run, when Lightning sets the callback's ``log``.

    It then calls the callback's method named ``tell``, before ``prepare_data`` and ``setup``. Checked against Lightning
    2.4.0 and 2.6.6 (``connectors/callback_connector.py: _attach_model_logging_functions``); a hook at the beginning of
    ``Trainer.fit`` would replace it.
    """

    def __init__(self, tell: str) -> None:
        self._tell = tell

    def __get__(self, callback: object, owner: object = None) -> Any:
        try:
            return vars(callback)["log"] if callback is not None else self
        except KeyError:
            raise AttributeError("log is set when a Trainer runs") from None

    def __set__(self, callback: object, log: object) -> None:
        vars(callback)["log"] = log
        getattr(callback, self._tell)()


def profiler_does_nothing(trainer: AnyTrainer) -> bool:
    """Check if the profiler is Lightning's empty one.

    Checked against Lightning 2.4.0 and 2.6.6 (``profilers/base.py``).
    """
    kind = type(trainer.profiler)
    return kind.__name__ == "PassThroughProfiler" and defined_by_lightning(kind)


def step_to_log(trainer: AnyTrainer, every: int) -> int | None:
    """The logged number of the last step, once in ``every`` steps; otherwise, or while accumulating, None.

    Checked against Lightning 2.4.0 and 2.6.6
    (``connectors/logger_connector: should_update_logs, update_train_step_metrics``).
    """
    loop = trainer.fit_loop.epoch_loop
    step: int = loop._batches_that_stepped
    return None if (step + 1) % every or loop._should_accumulate() else step


def steps_logged(trainer: AnyTrainer) -> int:
    """The step number under which loggers log the next step. Checked against Lightning 2.4.0 and 2.6.6, as above."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def bar_printer(trainer: AnyTrainer) -> Callable[[str], object] | None:
    """A function to print a line above a live progress bar; None if a plain ``print`` works.

    Lightning's TQDM bar drops the line if it is closed or disabled; other bars allow a plain ``print``. Checked against
    Lightning 2.4.0 and 2.6.6 (``callbacks/progress/tqdm_progress.py: print``).
    """
    bar = trainer.progress_bar_callback
    live = getattr(bar, "_train_progress_bar", None)
    return bar.print if live is not None and not live.disable else None


# --- wraps, and the user's code --------------------------------------------------------------------------------------


class Wrap:
    """Calls ``around(original, *args)`` in place of ``owner.name(*args)``, on this one instance, until :meth:`undo`.

    A wrap that another tool has wrapped cannot be removed; it then only passes calls through. It pickles and
    deep-copies as the plain method, so a module copied or saved during a fit stays usable.
    """

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        # Sets __wrapped__, which Lightning's is_overridden follows. If `original` is a Wrap, its attributes are copied,
        # too, so ours are set afterwards.
        functools.update_wrapper(self, original)
        self._owner = owner
        self._name = name
        self._original = original
        self._shadowed = vars(owner).get(name)
        self._around: Callable[..., Any] | None = around
        setattr(owner, name, self)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._around is None:
            return self._original(*args, **kwargs)
        return self._around(self._original, *args, **kwargs)

    def undo(self) -> None:
        """Remove the wrap, or make it pass calls through if another tool has wrapped it."""
        self._around = None
        if vars(self._owner).get(self._name) is not self:
            return
        if self._shadowed is not None:
            setattr(self._owner, self._name, self._shadowed)
            return
        delattr(self._owner, self._name)
        if not hasattr(self._owner, self._name):  # as of a unittest.mock.Mock, for which it is gone for good
            setattr(self._owner, self._name, self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def replace_in_class(owner: object, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(original, self, *args)`` in place of a method, for all objects of a class and its subclasses.

    Keeps the signature, from which LightningCLI makes arguments. Returns a function that restores the method.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def replaced(*args: object, **kwargs: object) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replaced)
    return functools.partial(setattr, owner, name, original)


def arguments_of(method: Callable[..., Any], owner: object, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of a method, by name.

    Raises:
        TypeError: the method does not accept these arguments.
    """
    return inspect.signature(method).bind(owner, *args, **kwargs).arguments


def wrap_transfer(trainer: AnyTrainer, convert_input: Callable[..., Any], batch_hook: Callable[..., Any]) -> list[Wrap]:
    """Replace the functions that every loop calls on a fetched batch.

    ``convert_input(original, batch)`` replaces the precision plugin's ``convert_input``, and
    ``batch_hook(original, name, batch, *args)`` the module's calls of ``on_before_batch_transfer``,
    ``transfer_batch_to_device`` and ``on_after_batch_transfer``. Checked against Lightning 2.4.0, 2.5.6 and 2.6.6
    (``core/module.py: _call_batch_hook``); a public hook that gives a callback the next batch would replace it.
    """
    return [
        Wrap(trainer.precision_plugin, "convert_input", convert_input),
        Wrap(trainer.lightning_module, "_call_batch_hook", batch_hook),
    ]


def transfer_early(trainer: AnyTrainer, stage: Callable[..., Any], batch: object, index: int) -> Any:
    """Call ``stage(batch, prepare=..., copy=...)`` with the loop's functions to prepare and transfer a batch.

    Checked against Lightning 2.4.0, 2.5.6 and 2.6.6 (``strategies/strategy.py: batch_to_device``,
    ``core/module.py: _call_batch_hook``).
    """
    module = trainer.lightning_module
    device = trainer.strategy.root_device
    hook_in_progress = module._current_fx_name
    try:
        return stage(
            batch,
            prepare=lambda host: module._on_before_batch_transfer(
                trainer.precision_plugin.convert_input(host), dataloader_idx=index
            ),
            copy=lambda host: module._call_batch_hook("transfer_batch_to_device", host, device, index),
        )
    finally:
        module._current_fx_name = hook_in_progress  # a hook that raises leaves its own name


def is_overridden(owner: object, hook: str) -> bool:
    """Check if the user's module or callback overrides Lightning's empty ``hook``."""
    method = getattr(owner, hook, None)
    return method is not None and not defined_by_lightning(getattr(method, "__wrapped__", method))


_BASES = ("Callback", "ModelHooks", "DataHooks", "LightningModule", "Strategy")


def is_empty_hook(trainer: AnyTrainer, action: str) -> bool:
    """True if an action of Lightning's profiler is a hook that does nothing, as nobody overrides it.

    Checked against Lightning 2.4.0 and 2.6.6 (``trainer/call.py``).
    """
    module = trainer.lightning_module
    strategy = trainer.strategy
    owners: dict[str, Any] = {f"[Callback]{one.state_key}": one for one in trainer.callbacks}
    owners |= {f"[LightningModule]{type(module).__name__}": module, f"[Strategy]{type(strategy).__name__}": strategy}
    owner, _, hook = action.rpartition(".")
    method = getattr(owners.get(owner), hook, None)
    return defined_by_lightning(method) and getattr(method, "__qualname__", "").partition(".")[0] in _BASES


def defined_by_lightning(thing: object) -> bool:
    """Check if a class, object or function comes from Lightning or from this package."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_feed")


def optimizes_by_the_book(trainer: AnyTrainer) -> bool:
    """True if none of the user's classes takes part in the backward pass and the optimizer step.

    Strategy and precision plugin come from Lightning, optimizers and schedulers from torch. Checked against Lightning
    2.4.0 and 2.6.6 (``strategies/strategy.py``).
    """
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    of_torch = all(type(one).__module__.startswith("torch.") for one in [*trainer.optimizers, *schedulers])
    return of_torch and all(defined_by_lightning(type(one)) for one in (trainer.strategy, trainer.precision_plugin))


def known_syncs(trainer: AnyTrainer) -> tuple[str, ...]:
    """Names of ``measure.measurements.SYNCS`` that apply to a running fit.

    - ``prog_bar``: a progress bar is on, and a metric on the device is logged with ``prog_bar=True``, which is seen
      only after the first log: call this after some steps. ``ModelCheckpoint`` or the bar converts each metric with
      ``Tensor.item`` in every step. Checked against Lightning 2.4.0 and 2.6.6 (``logger_connector/result.py: metrics``,
      ``utilities/metrics: convert_tensors_to_scalars``).
    - ``grad_scaler``: the precision plugin has a GradScaler. Checked against Lightning 2.4.0 and 2.6.6
      (``plugins/precision/amp.py``).
    - ``sigterm_broadcast``: several ranks, in a version whose loop broadcasts SIGTERM before each batch and reads the
      answer with ``Tensor.item``: 2.6.6 does, 2.4.0 does not (``loops/training_epoch_loop.py: advance``).
    - ``throughput_monitor``: the callback is present. It calls ``torch.cuda.synchronize``, on CUDA only. Checked
      against Lightning 2.4.0 and 2.6.6 (``callbacks/throughput_monitor.py: _update``).
    """
    loop = trainer.fit_loop.epoch_loop
    on_device = trainer.strategy.root_device.type != "cpu"
    bar_is_on = trainer.progress_bar_callback and getattr(trainer.progress_bar_callback, "is_enabled", True)
    applies = {
        "prog_bar": on_device and bar_is_on and any(map(_in_bar, getattr(loop, "_results", {}).values())),
        "grad_scaler": getattr(trainer.precision_plugin, "scaler", None) is not None,
        "sigterm_broadcast": trainer.world_size > 1 and hasattr(loop, "_broadcast_sigterm_tensor"),
        "throughput_monitor": trainer.strategy.root_device.type == "cuda"
        and any(_is_a(callback, "ThroughputMonitor") for callback in trainer.callbacks),
    }
    return tuple(name for name, does in applies.items() if does)


def _in_bar(metric: object) -> bool:
    meta = getattr(metric, "meta", None)
    value = getattr(metric, "value", None)
    device = getattr(value, "device", None)
    return bool(getattr(meta, "prog_bar", False)) and getattr(device, "type", "cpu") != "cpu"


def _is_a(thing: object, *names: str) -> bool:
    return any(kind.__name__ in names for kind in type(thing).__mro__)

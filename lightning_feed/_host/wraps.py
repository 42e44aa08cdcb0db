"""Temporary replacements for methods of Lightning and the user."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lightning_feed._host.types import AnyTrainer


class Wrap:
    """Calls ``around(original, *args)`` in place of ``owner.name(*args)``, on this one instance, until :meth:`undo`.

    A wrap that another tool has wrapped cannot be removed: :meth:`undo` then makes it pass calls through. Wraps pickle
    and deep-copy as the plain method, so a module copied or saved during a fit stays usable.
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
        if not hasattr(self._owner, self._name):  # a unittest.mock.Mock never has a deleted attribute again
            setattr(self._owner, self._name, self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


class RunBegins:
    """Descriptor that detects the start of a run, when Lightning sets the callback's ``log``.

    It then calls a method of the callback, before ``prepare_data`` and ``setup``. Checked against Lightning 2.4.0 and
    2.6.6 (``connectors/callback_connector.py: _attach_model_logging_functions``); a public hook at the beginning of
    ``Trainer.fit`` would replace this class.

    Args:
        method: name of the callback's method to call.
    """

    def __init__(self, method: str) -> None:
        self._method = method

    def __get__(self, callback: object, owner: object = None) -> Any:
        if callback is None:
            return self
        try:
            return vars(callback)["log"]
        except KeyError:
            raise AttributeError("log is set when a Trainer runs") from None

    def __set__(self, callback: object, log: object) -> None:
        vars(callback)["log"] = log
        getattr(callback, self._method)()


def replace_in_class(owner: object, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(original, self, *args)`` in place of a method, for all objects of a class and its subclasses.

    Keeps the signature, because LightningCLI makes its arguments from it. Returns a function that restores the method.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def replaced(*args: object, **kwargs: object) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replaced)
    return functools.partial(setattr, owner, name, original)


def arguments_of(method: Callable[..., Any], owner: object, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of one call of a method, by the names of its parameters.

    Raises:
        TypeError: the method does not accept these arguments.
    """
    return inspect.signature(method).bind(owner, *args, **kwargs).arguments


def wrap_train_source(trainer: AnyTrainer, around: Callable[..., Any]) -> Wrap:
    """Call ``around(original)`` in place of the function that makes a fit's training loaders, whenever it is called.

    Checked against Lightning 2.4.0 and 2.6.6 (``connectors/data_connector.py: _DataLoaderSource.dataloader``).
    """
    return Wrap(trainer.fit_loop._data_source, "dataloader", around)


def wrap_epoch_start(trainer: AnyTrainer, around: Callable[..., Any]) -> Wrap:
    """Call ``around(original, fetcher)`` in place of the function that makes an epoch's iterators.

    That function runs after all ``on_train_epoch_start`` hooks. In a fit's first epoch it makes no iterators. Checked
    against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _TrainingEpochLoop.on_run_start``).
    """
    return Wrap(trainer.fit_loop.epoch_loop, "on_run_start", around)


def wrap_train_set_up(trainer: AnyTrainer, around: Callable[..., Any]) -> Wrap:
    """Call ``around(original)`` in place of the function that makes a fit's loaders and their first iterators.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/fit_loop.py: _FitLoop.setup_data``).
    """
    return Wrap(trainer.fit_loop, "setup_data", around)


def iterates_again(trainer: AnyTrainer) -> bool:
    """Return True if Lightning drops the iterators that it makes next, and makes others when the epoch begins.

    It does so with loaders that are made after the first epoch (``loops/fit_loop.py: setup_data``, then
    ``loops/training_epoch_loop.py: on_run_start``). Checked against Lightning 2.4.0 and 2.6.6.
    """
    fit_loop = trainer.fit_loop
    resumes = fit_loop.epoch_loop.restarting or getattr(fit_loop, "is_resuming", False)
    return trainer.current_epoch > 0 and not resumes


def wrap_validation_start(trainer: AnyTrainer, around: Callable[..., Any]) -> Wrap:
    """Call ``around(original)`` in place of the function that makes the iterators of a validation within a fit.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/evaluation_loop.py: _EvaluationLoop.reset``).
    """
    return Wrap(trainer.fit_loop.epoch_loop.val_loop, "reset", around)


# --- the transfer of a batch --------------------------------------------------------------------------------------


def wrap_transfer(trainer: AnyTrainer, convert_input: Callable[..., Any], batch_hook: Callable[..., Any]) -> list[Wrap]:
    """Replace the functions that every loop calls on a fetched batch.

    ``convert_input(original, batch)`` replaces the precision plugin's ``convert_input``, and
    ``batch_hook(original, name, batch, *args)`` the module's calls of ``on_before_batch_transfer``,
    ``transfer_batch_to_device`` and ``on_after_batch_transfer``. Checked against Lightning 2.4.0, 2.5.6 and 2.6.6
    (``core/module.py: _call_batch_hook``); a public hook that gives a callback the next batch would replace these
    wraps.
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

    def prepare(host: Any) -> Any:
        return module._on_before_batch_transfer(trainer.precision_plugin.convert_input(host), dataloader_idx=index)

    def copy(host: Any) -> Any:
        return module._call_batch_hook("transfer_batch_to_device", host, device, index)

    try:
        return stage(batch, prepare=prepare, copy=copy)
    finally:
        module._current_fx_name = hook_in_progress  # a hook that raises leaves its own name there

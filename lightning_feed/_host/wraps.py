"""Wraps methods of live objects, and tells the user's code from Lightning's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


class Wrap:
    """``around(original, *args)`` in the place of ``owner.name(*args)``, on this one instance, until :meth:`undo`.

    A wrap that another tool has wrapped in its turn cannot be taken out; it then goes dead and passes calls through.
    It pickles and deep-copies as the plain method, so a module copied or saved in the middle of a fit stays usable.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        # Lightning's is_overridden looks through __wrapped__. First of all: it copies attributes, those of a wrap too.
        functools.update_wrapper(self, original)
        self._owner, self._name = owner, name
        self._original = original
        self._shadowed = vars(owner).get(name)
        self._around: Callable[..., Any] | None = around
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._around is None:
            return self._original(*args, **kwargs)
        return self._around(self._original, *args, **kwargs)

    def undo(self) -> None:
        """Take the wrap out, or make it dead where something else holds on to it."""
        self._around = None
        if vars(self._owner).get(self._name) is not self:
            return
        if self._shadowed is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._shadowed)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def replace_in_class(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """``around(original, self, *args)`` in the place of a method, for all objects of a class and its heirs.

    Keeps the signature: LightningCLI makes arguments of it. Returns what puts the method back.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replaced)
    return functools.partial(setattr, owner, name, original)


def arguments_of(method: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a method is called with, by name.

    Raises:
        TypeError: when it does not take that, as the call itself would.
    """
    return inspect.signature(method).bind(owner, *args, **kwargs).arguments


def wrap_transfer(trainer: Any, convert_input: Callable[..., Any], batch_hook: Callable[..., Any]) -> list[Wrap]:
    """Put ``around`` functions before the three things that every loop does to a fetched batch.

    ``convert_input(original, batch)`` stands in for the precision plugin's, and
    ``batch_hook(original, name, batch, *args)`` for the module's dispatch of ``on_before_batch_transfer``,
    ``transfer_batch_to_device`` and ``on_after_batch_transfer``. Read in 2.4.0, 2.5.6 and 2.6.6
    (``core/module.py: _call_batch_hook``); a public hook that gives a callback the next batch would replace it.
    """
    return [
        Wrap(trainer.precision_plugin, "convert_input", convert_input),
        Wrap(trainer.lightning_module, "_call_batch_hook", batch_hook),
    ]


def is_overridden(owner: Any, hook: str) -> bool:
    """Whether the user's module or callback has a ``hook`` of its own, not Lightning's empty one."""
    method = getattr(owner, hook, None)
    return method is not None and not defined_by_lightning(getattr(method, "__wrapped__", method))


def defined_by_lightning(thing: Any) -> bool:
    """Whether a class, object or function comes from Lightning or from this package."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_feed")


def optimizes_by_the_book(trainer: Any) -> bool:
    """Whether no class of the user's has a part in the backward pass and the optimizer step.

    Strategy and precision plugin come from Lightning, optimizers and schedulers from torch. Read in 2.4.0 and 2.6.6
    (``strategies/strategy.py``).
    """
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    of_torch = all(type(one).__module__.startswith("torch.") for one in [*trainer.optimizers, *schedulers])
    return of_torch and all(defined_by_lightning(type(one)) for one in (trainer.strategy, trainer.precision_plugin))


def known_syncs(trainer: Any) -> tuple[str, ...]:
    """Names of ``watch.verdict.diagnosis.SYNCS`` that apply to a running fit.

    - ``prog_bar``: a progress bar is on, and a metric on the device is logged with ``prog_bar=True``, which only shows
      once it was logged: ask after some steps. Each is converted by ``Tensor.item`` in every step, by
      ``ModelCheckpoint`` or the bar. Read in 2.4.0 and 2.6.6 (``logger_connector/result.py: metrics``,
      ``utilities/metrics: convert_tensors_to_scalars``).
    - ``grad_scaler``: the precision plugin has a GradScaler. Read in 2.4.0 and 2.6.6 (``plugins/precision/amp.py``).
    - ``sigterm_broadcast``: several ranks, in a version whose loop broadcasts SIGTERM before each batch and reads the
      answer by ``Tensor.item``: 2.6.6 does, 2.4.0 does not (``loops/training_epoch_loop.py: advance``).
    - ``throughput_monitor``: the callback is there. It calls ``torch.cuda.synchronize``, on CUDA only. Read in 2.4.0
      and 2.6.6 (``callbacks/throughput_monitor.py: _update``).
    """
    loop, on_device = trainer.fit_loop.epoch_loop, trainer.strategy.root_device.type != "cpu"
    applies = {
        "prog_bar": on_device and _bar_is_on(trainer) and any(map(_in_bar, _logged(loop))),
        "grad_scaler": getattr(trainer.precision_plugin, "scaler", None) is not None,
        "sigterm_broadcast": trainer.world_size > 1 and hasattr(loop, "_broadcast_sigterm_tensor"),
        "throughput_monitor": trainer.strategy.root_device.type == "cuda"
        and any(_is_a(callback, "ThroughputMonitor") for callback in trainer.callbacks),
    }
    return tuple(name for name, does in applies.items() if does)


def _logged(loop: Any) -> list[Any]:
    """What was logged in training steps. Read in 2.4.0 and 2.6.6 (``_ResultCollection``, a dict of metrics)."""
    return list(getattr(loop, "_results", {}).values())


def _in_bar(metric: Any) -> bool:
    meta, value = getattr(metric, "meta", None), getattr(metric, "value", None)
    device = getattr(value, "device", None)
    return bool(getattr(meta, "prog_bar", False)) and getattr(device, "type", "cpu") != "cpu"


def _bar_is_on(trainer: Any) -> bool:
    bar = trainer.progress_bar_callback
    return bar is not None and bool(getattr(bar, "is_enabled", True))


def _is_a(callback: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)

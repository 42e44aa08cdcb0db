"""Signals that end a diagnosis, and the state of a module that it restores."""

import copy
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from lightning_feed import _host

# --- signals ------------------------------------------------------------------------------------------------------


class StopSignals:
    """Context manager that raises KeyboardInterrupt on Ctrl-C and SIGTERM, and remembers the signal.

    Python drops a KeyboardInterrupt raised in a ``__del__`` or in a weak reference's callback ("Exception ignored in"),
    and torch's loaders and ``logging`` have both. So :meth:`check` raises it again.

    SIGTERM is handled if it would end the process, Ctrl-C if it is not ignored. The user's own handler is called first,
    and decides if the signal interrupts. Outside the main thread no signal is handled.

    Attributes:
        number: number of the first signal received; None: none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._held = False
        self._pid = os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            if callable(signal.getsignal(signal.SIGINT)):  # neither ignored nor set by C code
                self._before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._before[signal.SIGTERM] = signal.SIG_DFL
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def hold_back(self) -> None:
        """From now on, note signals without raising: the code that follows must not be interrupted."""
        self._held = True

    def note(self, number: int) -> None:
        """Note a signal. Only the first counts."""
        self.number = self.number or number

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self.number is not None:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if os.getpid() != self._pid and before is signal.SIG_DFL:  # a newly forked worker
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        elif self._held:
            self.note(number)
        else:
            handler = signal.default_int_handler
            if callable(before):
                handler = before
            try:
                handler(number, frame)
            except KeyboardInterrupt:
                self.note(number)
                raise


# --- the state of a module ----------------------------------------------------------------------------------------


class ModelState:
    """Saved state of a module, of the optimizers and schedulers in its attributes, and of callbacks.

    Holds the ``state_dict`` of each of them, the mode (``train()`` or ``eval()``) of each submodule, and
    ``requires_grad`` of each parameter. Tensors are kept in host memory.

    Args:
        model: the module, or None.
        callbacks: the user's callbacks.
    """

    def __init__(self, model: nn.Module | None, callbacks: Sequence[Any] = ()) -> None:
        self._model = nn.Module()
        if model is not None:
            self._model = model
        modules = list(self._model.modules())
        self._modes = [(module, module.training) for module in modules]
        self._learning = [
            (parameter, parameter.requires_grad) for parameter in self._model.parameters() if not is_lazy(parameter)
        ]
        attributes = [value for module in modules for value in vars(module).values()]
        owners = [value for value in attributes if isinstance(value, (Optimizer, LRScheduler))]
        self._states = [
            (owner, tree_map(_on_host, copy.deepcopy(owner.state_dict()))) for owner in [*owners, *callbacks]
        ]
        # The base class's state_dict: the user's may leave parameters out.
        self._values = {
            name: _on_host(value)
            for name, value in nn.Module.state_dict(self._model).items()
            if not (is_lazy(value) or getattr(value, "is_meta", False))
        }

    def restore(self) -> None:
        """Restore the state, and drop gradients. May be called more than once."""
        for module, mode in self._modes:
            module.training = mode
        for parameter, learns in self._learning:
            parameter.requires_grad_(learns)
            parameter.grad = None
        nn.Module.load_state_dict(self._model, self._values, strict=False)
        for owner, state in self._states:
            owner.load_state_dict(copy.deepcopy(state))


def _on_host(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.to("cpu", copy=True)
    return value


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, and Lightning's messages about our short fits, as a context manager."""
    names = (*_host.PACKAGES, *_host.PACKAGES.values(), "lightning.fabric", "lightning_fabric", "lightning_feed")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in levels:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)

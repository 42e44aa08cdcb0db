"""The state of a module, kept and put back, and the signals that come meanwhile."""

import copy
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map


class ModelState:
    """What torch can name of a module: parameters and buffers, their gradients, ``requires_grad``, ``train()`` and
    ``eval()``, the layers that it has, and the ``state_dict`` of the optimizers and schedulers that it holds.

    Plain attributes of the modules are kept too, and the lists and dicts that they hold themselves. Lazy layers are
    lazy again. Tensors are kept in host memory.

    Args:
        model: the module; None: nothing is kept.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._kinds = [(one, type(one)) for one in modules]
        held = [each for one in modules for each in (vars(one), *vars(one).values()) if isinstance(each, (dict, list))]
        self._containers = [(one, dict(one) if isinstance(one, dict) else list(one)) for one in held]
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        self._tensors = [_KeptTensor(one) for one in tensors]
        values = [value for one in held for value in (one.values() if isinstance(one, dict) else one)]
        optimizers = {id(one): one for one in values if isinstance(one, (Optimizer, LRScheduler))}
        self._states = [(one, tree_map(_on_host, one.state_dict())) for one in optimizers.values()]

    def restore(self) -> None:
        """Put everything back. May be called more than once."""
        for module, kind in self._kinds:
            if type(module) is not kind:  # it was lazy
                module.__class__ = kind
        for container, before in self._containers:
            container.clear()
            if isinstance(container, dict):
                container.update(before)
            else:
                container.extend(before)
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.restore()
        for one, state in self._states:
            one.load_state_dict(copy.deepcopy(state))


class _KeptTensor:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._kind, self._requires_grad = tensor, type(tensor), tensor.requires_grad
        self._memory = tensor.data  # is kept when the tensor is moved to another device
        self._values = None if is_lazy(tensor) or tensor.is_meta else self._memory.to("cpu", copy=True)
        self._grad = _on_host(tensor.grad)

    def restore(self) -> None:
        tensor, memory = self._tensor, self._memory
        if type(tensor) is not self._kind:  # it was lazy
            tensor.data = memory
            tensor.__class__ = self._kind
        if self._values is None:
            return
        tensor.grad = None  # torch refuses new data while an unlike gradient is there
        strided = memory.layout is torch.strided
        if tensor.device != memory.device or (strided and tensor.data_ptr() != memory.data_ptr()):
            tensor.data = memory
        # What was expanded cannot be written to, and has not been; sparse tensors cannot be compared.
        if not strided or not torch.equal(memory.cpu(), self._values):
            with torch.inference_mode(memory.is_inference()):
                memory.copy_(self._values)
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        tensor.grad = None if self._grad is None else self._grad.to(tensor.device, copy=True)


def _on_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


class StopSignals:
    """A context in which Ctrl-C and SIGTERM are noted, besides raising KeyboardInterrupt where they come.

    A KeyboardInterrupt that comes up in a ``__del__`` or in the callback of a weak reference is dropped by Python
    ("Exception ignored in"), and torch's loaders and ``logging`` have both. So :meth:`look` asks again.

    SIGTERM is heard where it would end the process, Ctrl-C where it is not ignored; a handler of the user's own is
    called first, and decides whether it interrupts. In other threads than the main one nothing is heard.

    Attributes:
        number: of the first signal that came; None: none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._held, self._pid = False, os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            ctrl_c, terminate = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            if callable(ctrl_c):  # neither ignored nor set by C code
                self._before[signal.SIGINT] = ctrl_c
            if terminate is signal.SIG_DFL:
                self._before[signal.SIGTERM] = terminate
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def hold_back(self) -> None:
        """From now on a signal is noted and raises nothing: what runs now must come to its end."""
        self._held = True

    def note(self, number: int) -> None:
        """A signal has come. Only the first counts."""
        if self.number is None:
            self.number = number

    def look(self) -> None:
        """End here if a signal has come.

        Raises:
            KeyboardInterrupt: when one has.
        """
        if self.number is not None:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if self._held:
            self.note(number)
        elif callable(before):
            try:
                before(number, frame)
            except KeyboardInterrupt:
                self.note(number)
                raise
        elif os.getpid() != self._pid:  # a worker that was forked just now, and that its loader ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            self.note(number)
            raise KeyboardInterrupt

"""Saving and restoring the state of a module around a diagnosis, and silencing warnings meanwhile."""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from lightning_feed import _host


class ModelState:
    """Saved state of a module, and of the optimizers and schedulers in its attributes.

    Holds the ``state_dict`` of all these objects, the mode (``train()`` or ``eval()``) of each submodule, and
    ``requires_grad`` of each parameter. Tensors are kept in host memory.

    Args:
        model: the module; None if only loaders are measured.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = nn.Module()
        if model is not None:
            self._model = model
        modules = list(self._model.modules())
        self._modes = [(module, module.training) for module in modules]
        self._learning = [
            (parameter, parameter.requires_grad) for parameter in self._model.parameters() if not is_lazy(parameter)
        ]
        attributes = [value for module in modules for value in vars(module).values()]
        self._states = [
            (value, tree_map(_on_host, copy.deepcopy(value.state_dict())))
            for value in attributes
            if isinstance(value, (Optimizer, LRScheduler))
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

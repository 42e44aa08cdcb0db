"""What a fit changes in the process around it, kept to be put back: random states, flags, environment, handlers."""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
LIGHTNING_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
QUIET_LOGGERS = (*LIGHTNING_LOGGERS, "lightning_feed")
"""What speaks up in a fit: Lightning's files, and our own callbacks."""


class ProcessState:
    """The process as it is now; :meth:`restore` puts it back.

    Holds: the global generators of torch (of CUDA after :meth:`keep_cuda`), numpy and random; environment variables;
    warning filters; signal handlers (in the main thread); flags of determinism, cuDNN, gradients, default dtype, number
    of threads; levels of Lightning's loggers; ``sys.stdin``, which an interrupted fit closes in Lightning 2.4.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._keep_random()
        self._keep_flags()
        environment = dict(os.environ)
        self._undo.append(lambda: _refill_environment(environment))
        filters, show = list(warnings.filters), warnings.showwarning
        self._undo.append(lambda: _refill_warnings(filters, show))
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if handler is not None:  # None: set by C code, which Python cannot set again
                    self._undo.append(lambda number=number, handler=handler: signal.signal(number, handler))  # type: ignore[misc]  # defaults bind the loop's values
        for name in QUIET_LOGGERS:
            level = logging.getLogger(name).level
            self._undo.append(lambda name=name, level=level: logging.getLogger(name).setLevel(level))  # type: ignore[misc]  # as above
        stdin = sys.stdin
        self._undo.append(lambda: setattr(sys, "stdin", stdin))

    def restore(self) -> None:
        """Put everything back, the random states last."""
        for undo in reversed(self._undo):
            undo()

    def keep_cuda(self) -> None:
        """Keep the generators of the CUDA devices too. Starts CUDA: for those who are about to use it."""
        states = torch.cuda.get_rng_state_all()
        self._undo.append(lambda: torch.cuda.set_rng_state_all(states))

    def _keep_random(self) -> None:
        host, legacy, python = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._undo += [
            lambda: torch.set_rng_state(host),
            lambda: np.random.set_state(legacy),
            lambda: random.setstate(python),
        ]
        if torch.backends.mps.is_available():
            metal = torch.mps.get_rng_state()
            self._undo.append(lambda: torch.mps.set_rng_state(metal))

    def _keep_flags(self) -> None:
        cudnn: Any = torch.backends.cudnn
        benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
        algorithms, warn_only = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        gradients, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
        precision, anomaly = torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()
        self._undo += [
            lambda: setattr(cudnn, "benchmark", benchmark),
            lambda: setattr(cudnn, "deterministic", deterministic),
            lambda: torch.use_deterministic_algorithms(algorithms, warn_only=warn_only),
            lambda: torch.set_grad_enabled(gradients),
            lambda: torch.set_default_dtype(dtype),
            partial(_set_unless, torch.get_num_threads, threads, torch.set_num_threads),
            partial(_set_unless, torch.get_float32_matmul_precision, precision, torch.set_float32_matmul_precision),
            lambda: torch.autograd.set_detect_anomaly(anomaly),
        ]


def _set_unless(now: Callable[[], Any], before: Any, change: Callable[[Any], object]) -> None:
    if now() != before:
        change(before)


def _refill_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _refill_warnings(filters: list[Any], show: Any) -> None:
    if list(warnings.filters) != filters:
        warnings.filters[:] = filters  # type: ignore[index]  # a list, whatever the stubs say
        invalidate: Any = getattr(warnings, "_filters_mutated", None)  # absent: Python forgets by itself
        if invalidate is not None:
            invalidate()
    warnings.showwarning = show

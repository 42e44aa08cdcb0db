"""Random numbers of worker threads: torch's, drawn from a stream of its own for each sample.

Torch has one CPU generator for the whole process. Threads that shared it would take its numbers from each other in an
order left to chance, and from the training. So worker threads put a generator of their own into every call that names
none, below Python, in torch's dispatcher: a key that no tensor has is switched on for the thread alone, and only the
operations that draw have a kernel for it. Other operations cost nothing more, other threads do not see it, and draws
inside torch's C++ and TorchScript are covered too. A ``TorchFunctionMode`` would do it by public means, but is called
for every function: measured, 2 us for each of the 30 to 50 calls of a crop and a flip, all of them under the GIL.

Python's ``random`` and ``numpy.random`` cannot be treated so: their module functions are methods, bound in C, of one
hidden object, and whoever imported them holds them already. Samples that draw from them are found out, and said.
"""

import logging
import random
import sys
import threading
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch

from lightning_feed.errors import LoaderError
from lightning_feed.load.epoch_order import mix_seed

logger = logging.getLogger(__name__)

_KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key that torch keeps free for modes, and that no tensor has (read in torch 2.6 and 2.15)."""
_DRAWING = (
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal",
    "normal_",
    "poisson",
    "random_",
    "randperm",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "uniform_",
)
"""The operations that draw. ``rand``, ``randint``, ``dropout`` and the others are made of these."""

_registered: list[Any] = []  # torch forgets the kernels of a Library that is garbage
_registering = threading.Lock()
_thread = threading.local()


class SampleRandom:
    """The random numbers of one worker thread, which enters it for as long as it lives. :func:`prepare` comes first."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._next: tuple[int, int, int] | None = (0, 0, 0)
        self._guard: Any = None

    def begin(self, seed: int, batch: int, place: int) -> None:
        """Go to the stream of one sample: of the pass with this seed, at this place of the batch of this number.

        Costs nothing until something is drawn.
        """
        self._next = (seed, batch, place)

    def generator(self) -> torch.Generator:
        """The generator to draw the next numbers of the sample from."""
        if self._next is not None:
            seed, batch, place = self._next
            self._next = None
            self._generator.manual_seed(mix_seed(seed, batch, place, "sample"))
        return self._generator

    def __enter__(self) -> "SampleRandom":
        self._guard = torch._C._IncludeDispatchKeyGuard(_key())
        self._guard.__enter__()
        _thread.random = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.random = None
        self._guard.__exit__(kind, error, trace)


class SampleDraws:
    """For code that names a generator in each draw: within it, in a worker thread, the generator is that of the sample,
    and draws go the direct way; elsewhere it is None, torch's default.

    Example:
        >>> with SampleDraws() as generator:
        ...     flipped = torch.rand(1, generator=generator) < 0.5
    """

    def __enter__(self) -> torch.Generator | None:
        self._guard: Any = None
        own: SampleRandom | None = getattr(_thread, "random", None)
        if own is None:
            return None
        self._guard = torch._C._ExcludeDispatchKeyGuard(_key_set())
        self._guard.__enter__()
        return own.generator()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard is not None:
            self._guard.__exit__(kind, error, trace)


def prepare() -> None:
    """Give the drawing operations their kernel, once in a process.

    Raises:
        LoaderError: when the installed torch has no way to do this.
    """
    with _registering:
        if _registered:
            return
        try:
            _registered.extend(_register())
        except (AttributeError, RuntimeError) as error:
            raise LoaderError(
                f"workers='thread' cannot give threads random numbers of their own with torch {torch.__version__}: "
                f"{error}. Use workers='process'."
            ) from error


def _register() -> list[Any]:
    torch._C._IncludeDispatchKeyGuard  # noqa: B018  # missed here, where it is told, rather than in a thread
    all_operations = torch.library.Library("_", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    all_operations.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    drawing = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    for name in _DRAWING:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            operation = getattr(packet, overload)
            arguments = [argument.name for argument in operation._schema.arguments]
            if "generator" in arguments:
                kernel = _kernel(operation, arguments.index("generator"))
                drawing.impl(operation, kernel)  # type: ignore[no-untyped-call]
    return [all_operations, drawing]


def _key() -> torch._C.DispatchKey:
    key = torch._C._parse_dispatch_key(_KEY)
    if key is None:
        raise AttributeError(f"there is no dispatch key {_KEY}")
    return key


@lru_cache(maxsize=1)
def _key_set() -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet(_key())


def _kernel(operation: Any, place: int) -> Any:
    """``operation`` with the thread's generator where none was given; ``place`` is that of its generator argument."""
    key = _key_set()

    def draw(*args: Any, **options: Any) -> Any:
        own = getattr(_thread, "random", None)
        given = args[place] if len(args) > place else options.get("generator")
        if own is not None and given is None and _on_cpu(args, options):
            if len(args) > place:
                args = (*args[:place], own.generator(), *args[place + 1 :])
            else:
                options["generator"] = own.generator()
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*args, **options)

    return draw


def _on_cpu(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    for value in (*args, options.get("out"), options.get("device")):
        if isinstance(value, (torch.Tensor, torch.device)):
            device = value.device if isinstance(value, torch.Tensor) else value
            return device.type == "cpu"
    return True


# --- what cannot be given to threads --------------------------------------------------------------------------------


class SharedRandom:
    """The states of the generators that the whole process shares, to tell which of them a sample drew from."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> list[str]:
        """Put back what has changed since, and name it."""
        changed = []
        if not torch.equal(torch.get_rng_state(), self._torch):
            torch.set_rng_state(self._torch)
            changed.append("torch's default generator, named or seeded outright")
        if random.getstate() != self._python:
            random.setstate(self._python)
            changed.append("Python's random module")
        if self._numpy is not None:
            numpy_random = sys.modules["numpy"].random
            now = numpy_random.get_state()
            if now[2:] != self._numpy[2:] or bool((now[1] != self._numpy[1]).any()):
                numpy_random.set_state(self._numpy)
                changed.append("numpy.random's functions")
        return changed


def warn_of_shared(changed: list[str], dataset: Any) -> None:
    """Say that the samples draw from what is shared, and what to do."""
    logger.warning(
        "A sample of %s draws from %s. Worker threads share that with each other and with the training process, so "
        "the samples will not be reproducible, and training that draws from it is changed. Draw from torch without a "
        "generator (torch.rand, torch.randint), which has a stream for each sample here; seed others from it, as in "
        "numpy.random.default_rng(torch.randint(2**62, ()).item()). Or set workers='process'.",
        type(dataset).__name__,
        " and ".join(changed),
    )

"""Named stages in a trace of ``torch.profiler``, at next to no cost where no profiler runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

from torch.autograd import profiler

Traced = Literal[
    "read",
    "decode",
    "augment",
    "thread_sample",
    "thread_collate",
    "background_load",
    "loader_next",
    "background_wait",
    "thread_wait",
    "gather",
    "look_ahead",
    "transfer",
    "device_copy",
    "device_transform",
    "hand_over",
]
"""Every stage, in the order of the input pipeline; docs/reference/profiler.md says what lies in each."""
PREFIX = "lightning_feed."
"""Prefix of their names in a trace."""

_LABELS: dict[Traced, str] = {name: PREFIX + name for name in get_args(Traced)}
_NOTHING: AbstractContextManager[Any] = nullcontext()


def traced(name: Traced) -> AbstractContextManager[Any]:
    """A context whose work appears as ``lightning_feed.<name>`` in the trace of an active profiler.

    Torch says whether one is active in ``_is_profiler_enabled`` (torch 2.6 to 2.15; absent: nothing is named). Unlike
    ``torch.autograd._profiler_enabled()`` it holds for all threads of the process, and not only for the one that
    started the profiler, so that a profiler with ``profile_all_threads`` sees ours. Entered and left without a
    profiler, a stage costs about 0.3 us.

    Example:
        >>> with traced("decode"):
        ...     pass
    """
    return profiler.record_function(_LABELS[name]) if getattr(profiler, "_is_profiler_enabled", False) else _NOTHING

"""DALI's pipelines in a process that was forked: they must neither run there nor be freed."""

import os
import weakref
from typing import Any

_alive: "weakref.WeakSet[Any]" = weakref.WeakSet()
_inherited: list[Any] = []


def outlive_forks(pipeline: Any) -> None:
    """Keep ``pipeline`` from being freed in children of this process that are forked, as workers of a DataLoader are.

    Its threads are not there, and freeing it waits for them for ever (DALI 2.4: ``~Executor2`` destroys a condition
    variable that has waiters). Garbage that the parent had not collected yet is collected in the child.
    """
    _alive.add(pipeline)


def is_inherited(pipeline: Any) -> bool:
    """Whether the pipeline belongs to the process that this one was forked from."""
    return any(pipeline is one for one in _inherited)


def _keep_all() -> None:
    _inherited.extend(_alive)
    _alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)

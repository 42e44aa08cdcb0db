"""The errors of lightning_feed. Every message says what was given, why it is wrong, and what to do."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from lightning_feed.wording import printable_lines

Arguments = ParamSpec("Arguments")
Options = TypeVar("Options")


class FeedError(Exception):
    """Base class of every error that lightning_feed raises on purpose.

    The text of an error is printable, even if it quotes names of files or classes with special characters.
    """

    exit_code = 1
    """The exit code of a command that ends with this error."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class SettingsError(FeedError, ValueError):
    """A setting that is impossible, or that would have no effect."""

    exit_code = 2


class DatasetError(FeedError, ValueError):
    """``make_dataset`` returned an unusable dataset, or a sample cannot be read."""


class LoaderError(FeedError, RuntimeError):
    """A loader could not start, failed or hangs."""


class ResumeError(FeedError, RuntimeError):
    """A checkpoint's loader state does not fit the loaders of this run."""


class MissingExtraError(FeedError, ImportError):
    """An optional dependency is needed but not installed. The message contains the pip line to paste."""


class DecodeError(DatasetError):
    """Bytes that are not an image, are cut short, or have a format that the decoder does not support."""


class ArchiveError(FeedError, OSError):
    """A pack or a staged copy could not be written, read or trusted."""


class ReportError(FeedError, ValueError):
    """A report that cannot be written, read or understood, or a run that waits for data more than the given limit."""


def no_argument(name: str, owner: str, arguments: Iterable[str]) -> SettingsError:
    """Return an error that says that ``owner`` has no such argument, and which one may be meant."""
    alike = difflib.get_close_matches(name, arguments, n=1)
    hint = f" Did you mean {alike[0]}?" if alike else ""
    return SettingsError(f"{owner} has no argument {name}.{hint}")


def refuses_unknown_arguments(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate an ``__init__`` so that an unknown argument raises :func:`no_argument`'s error."""
    arguments = [*inspect.signature(init).parameters][1:]
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        for name in options:
            if name not in arguments:
                raise no_argument(name, owner, arguments)
        init(*args, **options)

    return checked


def refuses_unknown_fields(kind: type[Options]) -> type[Options]:
    """Decorate a dataclass so that an unknown argument raises :func:`no_argument`'s error."""
    kind.__init__ = refuses_unknown_arguments(kind.__init__)  # type: ignore[method-assign]
    return kind

"""The errors that lightning_feed raises. Every message says what was given, why it is wrong, and what to do."""


class FeedError(Exception):
    """Root of every error that lightning_feed raises on purpose."""


class SettingsError(FeedError, ValueError):
    """A setting that is impossible, or that would have no effect."""


class DatasetError(FeedError, ValueError):
    """``make_dataset`` gave something that no loader can be built from, or a sample that cannot be read."""


class LoaderError(FeedError, RuntimeError):
    """A loader could not start, or ended without saying why."""


class ResumeError(FeedError, RuntimeError):
    """A checkpoint's loader state does not fit the loaders of this run."""


class MissingExtraError(FeedError, ImportError):
    """An optional dependency is needed and not installed. The message holds the pip line to paste."""


class DecodeError(DatasetError):
    """Bytes that are no image, that are cut short, or that the decoder cannot do."""


class ArchiveError(FeedError, OSError):
    """A pack, a staged copy or a cache could not be written, read or trusted."""


class ReportError(FeedError, ValueError):
    """A report that cannot be written, read or understood, or a run that is starved beyond the given limit."""

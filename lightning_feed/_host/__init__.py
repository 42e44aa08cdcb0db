"""All that touches Lightning's private parts.

Each function says in which versions it was read, and what public thing would replace it. Objects of both packages
(``lightning`` and ``pytorch_lightning``) pass through here, so nothing is imported from either: they are told apart by
what they have, not by what they are. The files are used through this package's own names: ``_host.adopt_fetcher``.
"""

from lightning_feed._host.checkpoint import (
    checkpoint_loader_states,
    count_the_batch_in_hand,
    resumes_in_a_new_epoch,
    shift_batches,
    write_loader_states,
)
from lightning_feed._host.fetcher import (
    Fetched,
    FetcherTap,
    adopt_fetcher,
    more_to_draw,
)
from lightning_feed._host.hooks import (
    Wrap,
    arguments_of,
    defined_by_lightning,
    is_overridden,
    optimizes_by_the_book,
    replace_in_class,
    wrap_transfer,
)
from lightning_feed._host.loops import (
    batches_of,
    change_saved_arguments,
    epochs_processed,
    live_fetcher,
    loader_names,
    loop_iterators,
    loop_loaders,
    ranks_that_share_samples,
    read_already,
    stage_now,
    train_batches_to_follow,
    train_fetcher,
    train_loaders,
    train_progress,
)
from lightning_feed._host.replay import (
    detects_anomalies,
    go_on_past_the_end,
    is_training,
    keep_plateaus,
    needs_metrics_every,
    shards_the_model,
    steps_between_checkpoints,
    stop_schedulers,
    takes_iterator,
)
from lightning_feed._host.reporting import (
    RunBegins,
    bar_printer,
    profiler_does_nothing,
    run_actions,
    step_actions,
    step_to_log,
    steps_logged,
)
from lightning_feed._host.syncs import known_syncs

__all__ = [
    "Fetched",
    "FetcherTap",
    "RunBegins",
    "Wrap",
    "adopt_fetcher",
    "arguments_of",
    "bar_printer",
    "batches_of",
    "change_saved_arguments",
    "checkpoint_loader_states",
    "count_the_batch_in_hand",
    "defined_by_lightning",
    "detects_anomalies",
    "epochs_processed",
    "go_on_past_the_end",
    "is_overridden",
    "is_training",
    "keep_plateaus",
    "known_syncs",
    "live_fetcher",
    "loader_names",
    "loop_iterators",
    "loop_loaders",
    "more_to_draw",
    "needs_metrics_every",
    "optimizes_by_the_book",
    "profiler_does_nothing",
    "ranks_that_share_samples",
    "read_already",
    "replace_in_class",
    "resumes_in_a_new_epoch",
    "run_actions",
    "shards_the_model",
    "shift_batches",
    "stage_now",
    "step_actions",
    "step_to_log",
    "steps_between_checkpoints",
    "steps_logged",
    "stop_schedulers",
    "takes_iterator",
    "train_batches_to_follow",
    "train_fetcher",
    "train_loaders",
    "train_progress",
    "wrap_transfer",
    "write_loader_states",
]

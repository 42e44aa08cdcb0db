"""All code that uses Lightning's private parts.

Each function names the versions against which its private parts were checked, and, if known, a public interface that
would replace them. The functions take objects of both packages (``lightning`` and ``pytorch_lightning``). Nothing is
imported from either: their classes are recognized by name.
"""

# ruff: noqa: I001  # one import for each file

from lightning_feed._host.arguments import (
    bar_printer as bar_printer,
    bar_refresh_rate as bar_refresh_rate,
    callbacks_of as callbacks_of,
    cli_config as cli_config,
    datamodule_of as datamodule_of,
    detects_anomalies as detects_anomalies,
    has_grad_scaler as has_grad_scaler,
    is_fast_dev_run as is_fast_dev_run,
    keep_plateaus as keep_plateaus,
    known_syncs as known_syncs,
    log_interval as log_interval,
    needs_metrics_every as needs_metrics_every,
    optimizer_step_is_known as optimizer_step_is_known,
    overfits as overfits,
    profiler_of as profiler_of,
    reload_interval as reload_interval,
    shards_the_model as shards_the_model,
    steps_between_checkpoints as steps_between_checkpoints,
    takes_iterator as takes_iterator,
)
from lightning_feed._host.fetcher import (
    Fetched as Fetched,
    FetcherTap as FetcherTap,
    adopt_fetcher as adopt_fetcher,
    batches_to_skip as batches_to_skip,
    begin_epoch as begin_epoch,
    checkpoint_loader_states as checkpoint_loader_states,
    count_the_batch_in_hand as count_the_batch_in_hand,
    end_epoch as end_epoch,
    epoch_is_trained as epoch_is_trained,
    forget_states as forget_states,
    is_stateful as is_stateful,
    load_states_once as load_states_once,
    more_to_draw as more_to_draw,
    reopen_epoch as reopen_epoch,
    tap_of as tap_of,
    write_loader_states as write_loader_states,
)
from lightning_feed._host.loaders import (
    change_saved_arguments as change_saved_arguments,
    loader_names as loader_names,
    loop_iterators as loop_iterators,
    loop_loaders as loop_loaders,
    ranks_that_share_samples as ranks_that_share_samples,
    replace_train_iterator as replace_train_iterator,
    replace_train_loader as replace_train_loader,
    train_loader_source as train_loader_source,
    train_loaders as train_loaders,
)
from lightning_feed._host.loops import (
    batches_of as batches_of,
    epoch_cut_short as epoch_cut_short,
    epochs_processed as epochs_processed,
    go_on_past_the_end as go_on_past_the_end,
    is_running as is_running,
    live_fetcher as live_fetcher,
    next_epoch as next_epoch,
    read_already as read_already,
    seconds_left as seconds_left,
    stage_now as stage_now,
    step_to_log as step_to_log,
    steps_left as steps_left,
    steps_logged as steps_logged,
    train_batches_to_follow as train_batches_to_follow,
    train_fetcher as train_fetcher,
    train_progress as train_progress,
)
from lightning_feed._host.origin import (
    PACKAGES as PACKAGES,
    defined_by_lightning as defined_by_lightning,
    has_class as has_class,
    is_overridden as is_overridden,
    package_of as package_of,
)
from lightning_feed._host.profiler import (
    actions as actions,
    is_empty_hook as is_empty_hook,
    profiler_does_nothing as profiler_does_nothing,
)
from lightning_feed._host.types import (
    AnyDataModule as AnyDataModule,
    AnyModule as AnyModule,
    AnyTrainer as AnyTrainer,
    Original as Original,
    RunStage as RunStage,
)
from lightning_feed._host.wraps import (
    RunBegins as RunBegins,
    Wrap as Wrap,
    arguments_of as arguments_of,
    iterates_again as iterates_again,
    replace_in_class as replace_in_class,
    transfer_early as transfer_early,
    wrap_epoch_start as wrap_epoch_start,
    wrap_train_set_up as wrap_train_set_up,
    wrap_train_source as wrap_train_source,
    wrap_transfer as wrap_transfer,
    wrap_validation_start as wrap_validation_start,
)

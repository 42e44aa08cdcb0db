"""The loaders and iterators of Lightning's loops: finding them, their source, and replacing them."""

import inspect
from typing import Any

from lightning_feed._host.loops import loop_of
from lightning_feed._host.types import AnyTrainer, RunStage


def loop_loaders(trainer: AnyTrainer, stage: RunStage) -> list[Any]:
    """Return the loaders of a stage, flattened. Checked against Lightning 2.4.0 and 2.6.6 (``setup_data`` of each
    loop)."""
    combined = loop_of(trainer, stage)._combined_loader
    return [] if combined is None else list(combined.flattened)


def train_loaders(trainer: AnyTrainer) -> list[Any]:
    """Return the training loaders, flattened."""
    return loop_loaders(trainer, "fit")


def loader_names(trainer: AnyTrainer, stage: RunStage) -> list[str]:
    """Return the names of a stage's loaders: their keys if they are in a dict, else Lightning's names in metrics.

    Lightning's names are ``dataloader_idx_0``, ``dataloader_idx_1`` and so on.
    Checked against Lightning 2.4.0 and 2.6.6 (``utilities/combined_loader.py``).
    """
    loaders = loop_loaders(trainer, stage)
    iterables = getattr(loop_of(trainer, stage)._combined_loader, "iterables", None)
    if isinstance(iterables, dict) and [*map(id, iterables.values())] == [*map(id, loaders)]:
        return [str(key) for key in iterables]
    return [f"dataloader_idx_{index}" for index in range(len(loaders))]


def loop_iterators(trainer: AnyTrainer, stage: RunStage) -> list[Any]:
    """Return the iterators that a stage's batches come from at this moment; empty outside the stage.

    There is one iterator for each loader. But if CombinedLoader is in ``sequential`` mode, which takes the loaders one
    after the other within an epoch, there is only the current loader's. In ``max_size_cycle`` mode, a loader that ends
    early gets a new iterator. The fetcher may have any class, and PrefetchCallback may have adopted it. Checked against
    Lightning 2.4.0 and 2.6.6 (``loops/fetchers.py: _DataFetcher``, ``utilities/combined_loader.py: _ModeIterator``).
    """
    fetcher = loop_of(trainer, stage)._data_fetcher
    if fetcher is None or fetcher._combined_loader is None or fetcher._combined_loader._iterator is None:
        return []
    return list(fetcher._combined_loader._iterator.iterators)


def ranks_that_share_samples(trainer: AnyTrainer) -> int:
    """Return the number of ranks among which Lightning divides the samples of a map-style dataset.

    Checked against Lightning 2.4.0 and 2.6.6 (``connectors/data_connector.py: _requires_distributed_sampler``).
    """
    connector = trainer._accelerator_connector
    return trainer.world_size if connector.use_distributed_sampler and connector.is_distributed else 1


def train_loader_source(trainer: AnyTrainer) -> Any:
    """Return the module or data module whose ``train_dataloader`` makes the loaders; None if they were passed to
    ``fit``.

    Checked against Lightning 2.4.0 and 2.6.6 (``connectors/data_connector.py: _DataLoaderSource``).
    """
    source = trainer.fit_loop._data_source
    return source.instance if source.is_module() else None


def replace_train_loader(trainer: AnyTrainer, loader: object) -> None:
    """Replace the training loader. The change takes effect when Lightning makes the next iterator.

    Lightning makes an epoch's iterator after ``on_train_epoch_start``, except in a fit's first epoch, whose iterator
    already exists then. Checked against Lightning 2.4.0 and 2.6.6 (``utilities/combined_loader.py``).
    """
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    combined.flattened = [loader]


def replace_train_iterator(trainer: AnyTrainer, iterator: Any) -> None:
    """Take the rest of the current epoch's batches from another iterator. Works with a single training loader only.

    Checked against Lightning 2.4.0 and 2.6.6 (``utilities/combined_loader.py: _ModeIterator``).
    """
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    assert combined._iterator is not None
    combined._iterator.iterators[0] = iterator


def change_saved_arguments(loader: object, changed: dict[str, Any], *, always: tuple[str, ...]) -> None:
    """Change the arguments that Lightning recorded when a loader was made in a hook.

    Lightning uses these arguments to rebuild the loader with another sampler. Arguments that were not passed to the
    constructor are added only if ``always`` contains their names and the constructor accepts them. Checked against
    Lightning 2.4.0 and 2.6.6 (``fabric/utilities/data.py: _wrap_dataloader_init``).
    """
    attributes = vars(loader)
    if "__pl_saved_kwargs" not in attributes:
        return
    names = list(attributes["__pl_saved_arg_names"])
    positional = list(attributes["__pl_saved_args"])
    by_name = dict(attributes["__pl_saved_kwargs"])
    constructor: Any = inspect.unwrap(type(loader).__init__)
    parameters = inspect.signature(constructor).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in changed.items():
        if name in names:
            positional[names.index(name)] = value
        elif name in by_name or (name in always and (takes_all or name in parameters)):
            by_name[name] = value
    attributes["__pl_saved_args"] = tuple(positional)
    attributes["__pl_saved_kwargs"] = by_name

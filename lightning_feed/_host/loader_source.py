"""Where the training loaders of a Trainer come from, and how its progress bar is set."""

from typing import Any


def train_loader_source(trainer: Any) -> Any:
    """The module or data module whose ``train_dataloader`` gives the loaders; None where ``trainer.fit`` got them.

    Read in 2.4.0 and 2.6.6 (``connectors/data_connector.py: _DataLoaderSource``).
    """
    source = trainer.fit_loop._data_source
    return source.instance if source.is_module() else None


def bar_refresh_rate(trainer: Any) -> int | None:
    """Batches between two drawings of the progress bar; None: there is none, or it is of another kind."""
    rate = getattr(trainer.progress_bar_callback, "refresh_rate", None)
    return rate if type(rate) is int else None


def cli_config(trainer: Any) -> dict[str, Any]:
    """The arguments that LightningCLI was called with, by their dotted keys; empty without one.

    Read in 2.4.0 and 2.6.6 (``cli.py: SaveConfigCallback``), which has them without the name of the subcommand.
    """
    for callback in trainer.callbacks:
        if any(kind.__name__ == "SaveConfigCallback" for kind in type(callback).__mro__):
            return {str(key): value for key, value in callback.config.items()}
    return {}

"""The loader settings of a run as hyperparameters, beside the user's own, so that runs can be compared by them."""

import inspect
from collections.abc import Mapping
from typing import Any

RUN = "feed"
"""The folder in a TensorBoard run's folder, where TensorBoard finds them."""


def tuned_hparams(datamodule: Any) -> dict[str, Any]:
    """The settings of the training loader as hyperparameters, so that runs can be compared by them.

    Args:
        datamodule: a FastDataModule or a wrapped data module whose training loader was made.

    Returns:
        ``feed/num_workers`` and so on; of several training loaders with their names. Empty for other data modules, and
        before the loader is made.
    """
    found = getattr(datamodule, "recommendations", None)
    if not isinstance(found, Mapping):
        return {}
    chosen = {name: one for name, one in found.items() if name == "train" or str(name).startswith("train[")}
    params: dict[str, Any] = {}
    for name, one in chosen.items():
        prefix = "feed/" if len(chosen) == 1 else f"feed/{name}/"
        for value in ("num_workers", "workers", "prefetch_factor", "pin_memory", "persistent_workers"):
            params[prefix + value] = getattr(one, value) if getattr(one, value) is not None else 0
    return params


def log_hparams(logger: Any, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Give a logger of Lightning's hyperparameters with what they led to. Once, at the end of a fit, on rank 0.

    TensorBoard takes the first hyperparameters of a run and no others, and those are the user's: so these go, with the
    user's, into a run of their own in the folder ``feed`` of that run. Other loggers get them as further
    hyperparameters, and the metrics as metrics.

    Args:
        logger: one of ``trainer.loggers``.
        params: of :func:`tuned_hparams`.
        metrics: what runs are to be compared by, such as ``feed_final/starved_pct``.
    """
    if not params:
        return
    add = getattr(logger.experiment, "add_hparams", None)
    if add is None:
        logger.log_hyperparams(dict(params))
        logger.log_metrics(dict(metrics))
        return
    users = _flat(getattr(logger, "hparams", None) or {})
    # torch's SummaryWriter and tensorboardX's differ in the name of that argument.
    name = "run_name" if "run_name" in inspect.signature(add).parameters else "name"
    add({**users, **params}, dict(metrics), **{name: RUN})


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters with their places as names, and as text what TensorBoard does not take as it is."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat

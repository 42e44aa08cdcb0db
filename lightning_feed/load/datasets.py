"""What a user gave as the data of a split: checked, and with a name for each dataset in it."""

from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_feed.errors import DatasetError

_SAMPLES = (tuple, list, dict, str, bytes, torch.Tensor)
"""Types that have ``__getitem__`` and ``__len__`` and are no dataset, but what a dataset may give."""


def name_datasets(made: Any, split: str) -> list[tuple[str, Any]]:
    """The datasets in ``made``, each with the name that reports and errors call it by.

    Args:
        made: a dataset, or a dict or list of datasets.
        split: its name, ``"train"`` for example. Datasets in a dict or list are ``train['key']`` or ``train[0]``.

    Raises:
        DatasetError: when there is none, or one of them is empty or not a dataset.

    Example:
        >>> name_datasets({"real": range(3), "made up": range(5)}, "train")
        [("train['real']", range(0, 3)), ("train['made up']", range(0, 5))]
    """
    if isinstance(made, dict):
        named = [(f"{split}[{key!r}]", dataset) for key, dataset in made.items()]
    elif isinstance(made, list):
        named = [(f"{split}[{index}]", dataset) for index, dataset in enumerate(made)]
    else:
        named = [(split, made)]
    if not named:
        raise DatasetError(
            f"make_dataset({split!r}) gave an empty {type(made).__name__}. Put a dataset into it, or return None where "
            "there is no such split."
        )
    for name, dataset in named:
        _check(name, dataset, split)
    return named


def like(made: Any, values: list[Any]) -> Any:
    """One value for each dataset, in the form that the datasets were given in."""
    if isinstance(made, dict):
        return dict(zip(made, values, strict=True))
    return values if isinstance(made, list) else values[0]


def size_of(dataset: Any) -> int | None:
    """Samples in the dataset; None for one that does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own wrappers have __len__ and raise TypeError in it
        return None


def _check(name: str, dataset: Any, split: str) -> None:
    stream = isinstance(dataset, IterableDataset)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}".removeprefix("builtins.")
    if isinstance(dataset, _SAMPLES):
        raise DatasetError(
            f"make_dataset({split!r}) gave a {kind} for {name}, which is how a sample looks, not a dataset. Give a "
            "torch.utils.data.Dataset or IterableDataset, or a dict or list of them; TensorDataset is one of tensors."
        )
    if not stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        missing = " and ".join(part for part in ("__getitem__", "__len__") if not hasattr(dataset, part))
        raise DatasetError(
            f"make_dataset({split!r}) gave a {kind} for {name}, which has no {missing}. Write them, or, for a stream, "
            "derive it from torch.utils.data.IterableDataset."
        )
    if size_of(dataset) == 0:
        raise DatasetError(
            f"The dataset of {name} ({kind}) is empty. Check the path and the filter that it is made with, or return "
            f"None from make_dataset({split!r}) if there is no such split."
        )

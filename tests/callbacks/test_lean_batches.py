"""PrefetchCallback(drop_keys=, host_keys=): what reaches the step, prefetched or not."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from recording import NullStreamPrefetch, Recording, fit
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback
from lightning_feed.errors import SettingsError


class Parts(Dataset[Any]):
    """Dicts of a small tensor, a larger one, and a text."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((4,), float(index)), "large": torch.full((20_000,), index), "meta": f"{index}"}


def parts(validation: bool = False) -> dict[str, Any]:
    loaders = {"train_dataloaders": DataLoader(Parts(), batch_size=2)}
    return {**loaders, "val_dataloaders": DataLoader(Parts(4), batch_size=2)} if validation else loaders


class Sees(Recording):
    """Keeps the keys that the hooks and the step are given."""

    def __init__(self) -> None:
        super().__init__()
        self.before: set[Any] = set()
        self.after: set[Any] = set()
        self.validated: set[Any] = set()

    transfer_batch_to_device = LightningModule.transfer_batch_to_device
    on_after_batch_transfer = LightningModule.on_after_batch_transfer

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.before.add(tuple(batch))
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.after.add(tuple(batch))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.add(tuple(batch))


WHOLE = tuple(Parts()[0])


def without(*keys: str) -> tuple[str, ...]:
    return tuple(key for key in WHOLE if key not in keys)


# --- drop_keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PrefetchCallback, NullStreamPrefetch], ids=["standing aside", "prefetching"])
def test_dropped_keys_reach_on_before_batch_transfer_but_not_the_step(kind: Any) -> None:
    model, _, error = fit([kind(drop_keys=("meta", "large"))], parts, Sees, max_epochs=1)
    assert error is None
    assert model.before == {WHOLE}
    assert model.after == {without("meta", "large")}


@pytest.mark.parametrize("kind", [PrefetchCallback, NullStreamPrefetch])
def test_keys_are_dropped_in_training_and_validation(kind: Any) -> None:
    model, _, error = fit([kind(drop_keys=("meta",))], lambda: parts(validation=True), Sees, max_epochs=1)
    assert error is None
    assert model.after == {without("meta")}
    assert model.validated == {without("meta")}


@pytest.mark.parametrize("kind", [PrefetchCallback, NullStreamPrefetch])
def test_an_unknown_drop_key_warns_once_and_lists_the_real_ones(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_feed"):
        _, _, error = fit([kind(drop_keys=("mta",))], parts, Sees, max_epochs=2)
    assert error is None
    said = [record.getMessage() for record in caplog.records if "drop_keys" in record.getMessage()]
    assert len(said) == 1
    assert "'mta'" in said[0]
    assert "'meta'" in said[0]


def test_a_drop_key_missing_only_in_validation_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    def loaders() -> dict[str, Any]:
        return {**parts(), "val_dataloaders": DataLoader([{"x": torch.ones(4)}] * 4, batch_size=2)}  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING, logger="lightning_feed"):
        model, _, error = fit([NullStreamPrefetch(drop_keys=("meta",))], loaders, Sees, max_epochs=1)
    assert error is None
    assert model.validated == {("x",)}
    assert "drop_keys" not in caplog.text


def test_host_keys_skip_the_transfer_even_where_nothing_is_prefetched() -> None:
    held = []

    class Looks(Sees):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            held.append(not isinstance(batch["meta"], (list, str)))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    model, _, error = fit([PrefetchCallback(host_keys=("meta",))], parts, Looks, max_epochs=1)
    assert error is None
    assert held == [True] * 20
    assert model.after == {WHOLE}


@pytest.mark.parametrize(
    ("options", "says"),
    [({"drop_keys": "meta"}, "list of letters")],
)
def test_drop_keys_given_as_a_string_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        PrefetchCallback(**options)

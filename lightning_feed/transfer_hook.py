"""The hook in which our data modules change a batch once it is on the device."""

from typing import Any

import torch

from lightning_feed import _host
from lightning_feed.errors import LoaderError
from lightning_feed.load.trace import traced
from lightning_feed.transfer.tree import release

TRANSFER = "transfer_batch_to_device"


def moved(datamodule: Any, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
    """The batch on the device, by the transfer as it would be without us: the module's where it has one.

    Raises:
        LoaderError: without a Trainer.
    """
    trainer, own = datamodule.trainer, getattr(type(datamodule), TRANSFER)
    if trainer is None:
        raise LoaderError(f"{TRANSFER} needs to know the split, which a Trainer tells. Call device_transform.")
    with traced("device_copy"):
        if _host.defined_by_lightning(own) and _host.is_overridden(trainer.lightning_module, TRANSFER):
            there = getattr(trainer.lightning_module, TRANSFER)(batch, device, dataloader_idx)
        else:
            there = own(datamodule, batch, device, dataloader_idx)
    # Values that PrefetchCallback(host_keys=...) kept from the transfer are the user's again from here on.
    return release(there)

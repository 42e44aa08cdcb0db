"""A small training with all the state that a diagnosis could disturb, and how to compare it before and after."""

import importlib
import os
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_feed.diagnosing import diagnose

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OF_LIGHTNING = ("_device", "_current_fx_name")
"""Attributes that each fit sets again."""
SHORT = {"budget_s": 600.0, "quick": True, "only": "model"}  # as many steps as conftest.py says, however slow


class Numbers(Dataset[Any]):
    """Samples that also depend on all three global generators, and are counted."""

    def __init__(self, length: int = 24, fail_at: int | None = None, error: type[BaseException] = ValueError) -> None:
        self.length, self.fail_at, self.error = length, fail_at, error
        self.served: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.served.append(index)
        if len(self.served) == self.fail_at:
            raise self.error("sample is broken")
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return noise + index, torch.tensor(index % 2)


def make_parts(package: str = "lightning.pytorch", dataset: Any = None) -> tuple[type[Any], type[Any]]:
    """The classes of a module and a data module of ``package``."""
    root = importlib.import_module(package)

    class Module(root.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2))
            self.net[0].bias.requires_grad_(False)
            self.net[1].eval()
            self.losses: list[float] = []
            self.register_buffer("seen", torch.zeros(1))
            self.during: Callable[[int], None] | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if self.during is not None:
                self.during(batch_idx)
            self.seen += 1
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.losses.append(float(loss.detach()))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam([one for one in self.parameters() if one.requires_grad], lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    class Data(root.LightningDataModule):  # type: ignore[name-defined,misc]
        def __init__(self, dataset: Any = dataset) -> None:
            super().__init__()
            self.given = dataset
            self.stages: list[str] = []
            self.prepared = 0

        def prepare_data(self) -> None:
            self.prepared += 1

        def setup(self, stage: str) -> None:
            self.stages.append(stage)
            if not hasattr(self, "dataset"):
                self.dataset = self.given or Numbers()

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(5)
            return DataLoader(self.dataset, batch_size=4, shuffle=True, generator=generator)

    return Module, Data


def make_trainer(package: str = "lightning.pytorch", **options: Any) -> Any:
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return importlib.import_module(package).Trainer(**(quiet | options))


def seed_everything(seed: int = 11) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def state_of_process() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "random": random.getstate(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "flags": (torch.is_grad_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def state_of_module(model: Any) -> dict[str, Any]:
    """Values, modes and attributes of a module, with the identity of its tensors and their memory."""
    tensors = {
        name: (id(one), one.data_ptr(), one.requires_grad, one.detach().numpy().tobytes())
        for name, one in [*model.named_parameters(), *model.named_buffers()]
    }
    return {
        "tensors": tensors,
        "training": [module.training for module in model.modules()],
        "attributes": {name: id(value) for name, value in vars(model).items() if name not in OF_LIGHTNING},
        "trainer": id(model._trainer),
        "hparams": dict(model.hparams),
    }


def state_of_data(data: Any) -> dict[str, Any]:
    return {"attributes": {name: id(value) for name, value in vars(data).items()}, "prepared": data.prepared}


def state_of_trainer(trainer: Any) -> dict[str, Any]:
    flat: list[Any] = []
    for optimizer in trainer.optimizers:
        for state in optimizer.state_dict()["state"].values():
            flat += [value.tolist() if isinstance(value, Tensor) else value for value in state.values()]
        flat += [group["lr"] for group in optimizer.param_groups]
    return {
        "optimizers": flat,
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
        "callbacks": [id(one) for one in trainer.callbacks],
        "steps": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "state": str(trainer.state),
    }


def short_diagnosis(trainer: Any, model: Any, data: Any = None, **options: Any) -> Any:
    return diagnose(trainer, model, data, **(SHORT | options))

"""What torch can name is put back: modules, data, random numbers, the process; after errors and Ctrl-C too."""

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from diagnosing.small_runs import (
    PACKAGES,
    Numbers,
    make_parts,
    make_trainer,
    seed_everything,
    short_diagnosis,
    state_of_module,
    state_of_process,
    state_of_trainer,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_feed.diagnosing.failures import DiagnosisInterrupted
from lightning_feed.diagnosing.restoring import ModelState
from lightning_feed.diagnosing.session import open_session
from lightning_feed.errors import FeedError

# --- the module ---------------------------------------------------------------------------------------------------


def test_restore_resets_weights_gradients_and_modes_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    model[0].bias.requires_grad_(False)
    weight, values = model[0].weight, {name: one.clone() for name, one in model.state_dict().items()}
    state = ModelState(model)
    for _ in range(2):  # it can be used again
        model.train()
        model.requires_grad_(True)
        model(torch.ones(3, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        state.restore()
        assert model[0].weight is weight
        assert weight.grad is None
        assert all(torch.equal(one, values[name]) for name, one in model.state_dict().items())
        assert (model.training, model[1].training) == (True, False)
        assert (weight.requires_grad, model[0].bias.requires_grad) == (True, False)


def test_restore_resets_optimizers_and_schedulers_held_by_the_module() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model.first, model.second = optimizer, scheduler  # type: ignore[assignment]

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        scheduler.step()

    step()
    state = ModelState(model)
    step()
    expected = [one.detach().clone() for one in model.parameters()]
    for _ in range(2):
        state.restore()
        assert optimizer.param_groups[0]["lr"] == 0.05
        step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_restore_works_with_lazy_and_meta_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    ModelState(model).restore()
    assert isinstance(model[0].weight, nn.UninitializedParameter)


def test_session_restores_all_random_number_generators() -> None:
    seed_everything()
    data = Numbers()
    with open_session(None, None, loaders=DataLoader(data)).restoring():
        drawn = data[0], torch.rand(1), np.random.rand(), random.random()
        seed_everything(3)
    again = data[0], torch.rand(1), np.random.rand(), random.random()
    assert torch.equal(drawn[0][0], again[0][0])
    assert drawn[1:] == again[1:]


# --- a whole diagnosis --------------------------------------------------------------------------------------------


def all_of_it(trainer: Any, model: Any, data: Any) -> dict[str, Any]:
    return {
        "process": state_of_process(),
        "module": state_of_module(model),
        "data": {"trainer": data.trainer},
        "trainer": state_of_trainer(trainer),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    for part in before:
        for name, value in before[part].items():
            assert after[part][name] == value, f"{part}.{name} differs"


@pytest.mark.parametrize("package", PACKAGES)
def test_diagnosis_before_training_leaves_everything_unchanged(package: str) -> None:
    seed_everything()
    Module, Data = make_parts(package)
    trainer, model, data = make_trainer(package), Module(), Data()
    before = all_of_it(trainer, model, data)
    found = short_diagnosis(trainer, model, data, only=["model"])
    compare(before, all_of_it(trainer, model, data))
    assert found.stats.steps >= 10
    experiments = found.measurements.experiments
    assert experiments.model_per_s > 0


def train_twice(*, diagnosed: bool) -> Any:
    seed_everything()
    Module, Data = make_parts()
    trainer, model, data = make_trainer(), Module(), Data()
    trainer.fit(model, datamodule=data)
    before, losses = all_of_it(trainer, model, data), list(model.losses)
    if diagnosed:
        short_diagnosis(trainer, model, data)
    compare(before, all_of_it(trainer, model, data))
    assert model.trainer is trainer
    model.losses = losses  # an attribute of the user's is left as it is
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=data)
    return model


def test_training_after_a_diagnosis_continues_as_without_one() -> None:
    plain, diagnosed = train_twice(diagnosed=False), train_twice(diagnosed=True)
    assert diagnosed.losses == plain.losses
    assert len(plain.losses) == 18
    for name, value in plain.state_dict().items():
        assert torch.equal(value, diagnosed.state_dict()[name]), name


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("dataset", ValueError),
        ("dataset", KeyboardInterrupt),
        ("first step", KeyboardInterrupt),
        ("later step", ValueError),
        ("replay", ValueError),
        ("replay", KeyboardInterrupt),
    ],
)
def test_everything_is_restored_after_an_error_or_ctrl_c(where: str, error: type[BaseException]) -> None:
    seed_everything()
    Module, Data = make_parts(dataset=Numbers(fail_at=11 if where == "dataset" else None, error=error))
    trainer, model, data = make_trainer(), Module(), Data()
    count = {"first step": 1, "later step": 15, "replay": 45}.get(where, 0)
    calls = [0]

    def fail(_: int) -> None:
        calls[0] += 1
        if calls[0] >= count > 0:
            raise error("this step is broken")

    model.during = fail
    before = all_of_it(trainer, model, data)
    if error is KeyboardInterrupt:
        with pytest.raises(DiagnosisInterrupted) as stop:
            short_diagnosis(trainer, model, data)
        assert (stop.value.diagnosis.stats.steps > 10) == (where == "replay")
        assert stop.value.diagnosis.measurements.experiments.model_per_s is None
    elif where == "replay":
        found = short_diagnosis(trainer, model, data)
        assert "this step is broken" in dict(found.measurements.experiments.left_out)["model"]
    else:
        with pytest.raises(FeedError, match="broken") as raised:
            short_diagnosis(trainer, model, data)
        assert isinstance(raised.value.__cause__, error)
    compare(before, all_of_it(trainer, model, data))


def test_the_users_own_loader_keeps_its_workers_and_generator() -> None:
    seed_everything()
    Module, _ = make_parts()
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True, shuffle=True)
    loader.generator = torch.Generator().manual_seed(1)
    iterator = iter(loader)
    next(iterator)
    state = loader.generator.get_state()
    attributes = dict(vars(loader))
    found = short_diagnosis(make_trainer(), Module(), train_dataloaders=loader)
    assert found.measurements.facts.loader.num_workers == 1
    assert vars(loader) == attributes
    assert loader._iterator is iterator
    assert torch.equal(loader.generator.get_state(), state)
    assert len(list(iterator)) == 5
    del iterator
    loader._iterator = None


def test_module_with_configure_model_and_own_optimizer_is_restored() -> None:
    Module, Data = make_parts()

    class Late(Module):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def configure_model(self) -> None:
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return self.kept

    model = Late()
    found = short_diagnosis(make_trainer(), model, Data())
    assert found.stats.steps >= 10
    assert not model.kept.state


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_stdin_stays_open_after_ctrl_c() -> None:
    Module, Data = make_parts()
    model, stdin = Module(), sys.stdin

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    model.during = interrupt
    with pytest.raises(DiagnosisInterrupted):
        short_diagnosis(make_trainer(), model, Data())
    assert sys.stdin is stdin

"""A diagnosis leaves no trace: modules, data, random numbers, the process; after errors and Ctrl-C too."""

from typing import Any

import pytest
import torch
from diagnosing.small_runs import (
    PACKAGES,
    Numbers,
    make_parts,
    make_trainer,
    seed_everything,
    short_diagnosis,
    state_of_data,
    state_of_module,
    state_of_process,
    state_of_trainer,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_feed.diagnosing.outcomes import DiagnosisInterrupted
from lightning_feed.errors import FeedError

pytestmark = [
    # The fits around the diagnosis are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),  # the module keeps one so, to see it kept
]


def all_of_it(trainer: Any, model: Any, data: Any) -> dict[str, Any]:
    return {
        "process": state_of_process(),
        "module": state_of_module(model),
        "data": state_of_data(data),
        "trainer": state_of_trainer(trainer),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    for part in before:
        for name, value in before[part].items():
            assert after[part][name] == value, f"{part}.{name} differs"


@pytest.mark.parametrize("package", PACKAGES)
def test_before_any_training(package: str) -> None:
    seed_everything()
    Module, Data = make_parts(package)
    trainer, model, data = make_trainer(package), Module(), Data()
    before = all_of_it(trainer, model, data)
    found = short_diagnosis(trainer, model, data)
    compare(before, all_of_it(trainer, model, data))
    assert found.stats.steps >= 10
    experiments = found.measurements.experiments
    assert experiments.model_per_s > 0
    assert experiments.host_batch_per_s > 0
    assert not hasattr(data, "dataset")


@pytest.mark.parametrize("package", PACKAGES)
def test_after_a_training(package: str) -> None:
    seed_everything()
    Module, Data = make_parts(package)
    trainer, model, data = make_trainer(package), Module(), Data()
    trainer.fit(model, datamodule=data)
    before = all_of_it(trainer, model, data)
    short_diagnosis(trainer, model, data)
    compare(before, all_of_it(trainer, model, data))
    assert model.trainer is trainer
    assert data.trainer is trainer


def train_twice(*, diagnosed: bool) -> Any:
    seed_everything()
    Module, Data = make_parts()
    trainer, model, data = make_trainer(), Module(), Data()
    trainer.fit(model, datamodule=data)
    if diagnosed:
        short_diagnosis(trainer, model, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=data)
    return model


def test_training_goes_on_as_if_nothing_had_been() -> None:
    plain, diagnosed = train_twice(diagnosed=False), train_twice(diagnosed=True)
    assert diagnosed.losses == plain.losses
    assert len(plain.losses) == 18
    for name, value in plain.state_dict().items():
        assert torch.equal(value, diagnosed.state_dict()[name]), name


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["dataset", "first step", "later step", "replay"])
def test_after_an_error_and_after_ctrl_c(where: str, error: type[BaseException]) -> None:
    seed_everything()
    Module, Data = make_parts(dataset=Numbers(fail_at=11 if where == "dataset" else None, error=error))
    trainer, model, data = make_trainer(), Module(), Data()
    trainer.fit_loop.max_epochs = 1
    count = {"first step": 1, "later step": 15, "replay": 105}.get(where, 0)
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
        assert (stop.value.diagnosis.stats.steps > 50) == (where == "replay")
        assert stop.value.diagnosis.measurements.experiments.model_per_s is None
    elif where == "replay":
        found = short_diagnosis(trainer, model, data)
        left_out = dict(found.measurements.experiments.left_out)
        assert "this step is broken" in left_out["X1"]
        assert "this step is broken" in left_out["X2"]
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
    found = short_diagnosis(make_trainer(), Module(), train_dataloaders=loader, only="X1")
    assert found.measurements.facts.num_workers == 1
    assert vars(loader) == attributes
    assert loader._iterator is iterator
    assert torch.equal(loader.generator.get_state(), state)
    assert len(list(iterator)) == 5
    del iterator
    loader._iterator = None


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_lazy_layers_are_lazy_again() -> None:
    Module, Data = make_parts()
    model = Module()
    model.net = Lazy()
    short_diagnosis(make_trainer(), model, Data())
    assert isinstance(model.net.layer, nn.LazyLinear)
    assert isinstance(model.net.layer.weight, nn.UninitializedParameter)


def test_a_module_that_builds_itself_in_configure_model() -> None:
    Module, Data = make_parts()

    class Late(Module):  # type: ignore[misc,valid-type]
        def configure_model(self) -> None:
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(2, 2)

    model = Late()
    found = short_diagnosis(make_trainer(), model, Data())
    assert found.stats.steps >= 10
    assert not hasattr(model, "extra")


def test_an_optimizer_that_the_module_keeps() -> None:
    Module, Data = make_parts()

    class Keeps(Module):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> Any:
            if not hasattr(self, "kept"):
                self.kept = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            return self.kept

    model, trainer = Keeps(), make_trainer()
    trainer.fit(model, datamodule=Data())
    momentum = [state["momentum_buffer"] for state in model.kept.state.values()]
    before = [one.clone() for one in momentum]
    short_diagnosis(trainer, model, Data())
    after = [state["momentum_buffer"] for state in model.kept.state.values()]
    assert all(a is b for a, b in zip(after, momentum, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

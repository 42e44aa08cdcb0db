"""What trials have chosen is trained with before it is advised, and withdrawn if training gains nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diagnosing.small_runs import Numbers, make_parts
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_feed.diagnosing import diagnose, proof, rates
from lightning_feed.diagnosing.proof import Proof, proven
from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import Trial
from lightning_feed.trials.tune_loader import Tuned
from lightning_feed.tuning import run as tuning
from lightning_feed.tuning.run import tune

OWN = Setting(num_workers=0)
CHOSEN = Setting(num_workers=1, prefetch_factor=2, persistent_workers=True)
TUNED = Tuned(setting=CHOSEN, own=OWN, reason="the fastest of 2 tried", trials=())

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]


@pytest.mark.parametrize(("chosen_ms", "holds"), [(5.0, True), (9.8, False), (10.0, False), (20.0, False)])
def test_chosen_setting_is_kept_only_if_training_steps_get_clearly_shorter(chosen_ms: float, holds: bool) -> None:
    found = proven(TUNED, Proof(own_ms=10.0, chosen_ms=chosen_ms))
    assert found.setting == (CHOSEN if holds else OWN)
    assert f"training itself took 10 ms a step with num_workers=0, {chosen_ms:.3g} with num_workers=1" in found.reason


def chooses_one_worker(loader: DataLoader[Any], *arguments: Any, **named: Any) -> Tuned:
    """In the place of ``tune_loader``."""
    own = Setting.of(loader)
    chosen = replace(CHOSEN, persistent_workers=False)
    trials = (Trial(setting=own, steps_s=(0.2,)), Trial(setting=chosen, steps_s=(0.1,)))
    return Tuned(setting=CHOSEN, own=own, reason="the fastest of 2 tried", trials=trials)


Parts = tuple[Trainer, Any, Any]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(rates, "tune_loader", chooses_one_worker)
    monkeypatch.setattr(tuning, "tune_loader", chooses_one_worker)
    monkeypatch.setattr(proof, "PROOF_STEPS", 5)
    module, data = make_parts()
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    return trainer, module(), data()


def _taking(monkeypatch: pytest.MonkeyPatch, ms: Callable[[int], float]) -> list[int]:
    """Let fits take a time by their number of workers, after they have run. Returns those numbers."""
    usual = proof.time_fit
    seen: list[int] = []

    def time_fit(session: Any, limits: Any, loader: Any) -> float | None:
        usual(session, limits, loader)
        seen.append(loader.num_workers)
        return ms(loader.num_workers)

    monkeypatch.setattr(proof, "time_fit", time_fit)
    return seen


@pytest.mark.parametrize("gains", [True, False])
def test_diagnosis_trains_with_the_chosen_setting_and_restores_weights(
    gains: bool, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, module, data = parts
    seen = _taking(monkeypatch, lambda workers: 10.0 if bool(workers) == gains else 20.0)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    found = diagnose(trainer, module, data, quick=True, only=["loader"], budget_s=6.0)
    assert seen == [1, 0]
    results = found.measurements.experiments
    assert (results.chosen_fit_ms, results.own_fit_ms) == ((10.0, 20.0) if gains else (20.0, 10.0))
    chosen = results.tried_as("chosen")
    assert chosen is not None
    assert chosen.num_workers == int(gains)
    assert not any(remedy.changes.startswith("num_workers") for remedy in found.remedies) or gains
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("gains", [True, False])
def test_tune_trains_with_the_chosen_setting_before_advising_it(
    gains: bool, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, module, data = parts
    _taking(monkeypatch, lambda workers: 10.0 if bool(workers) == gains else 20.0)
    tuned = tune(data, model=module, trainer=trainer)
    assert tuned.setting.num_workers == int(gains)
    assert "training itself took" in tuned.reason


def test_failing_proof_fit_keeps_the_other_results(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module, _ = parts

    def fails(*_: Any) -> None:
        raise ValueError("only with workers")

    monkeypatch.setattr(proof, "time_fit", fails)
    loader = DataLoader(Numbers(), batch_size=4)
    found = diagnose(trainer, module, train_dataloaders=loader, quick=True, only=["loader"], budget_s=6.0)
    left_out = dict(found.measurements.experiments.left_out)
    assert "ValueError: only with workers" in left_out["training with other workers"]
    assert found.measurements.experiments.tried_as("chosen") is not None

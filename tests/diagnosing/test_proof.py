"""What trials have chosen is trained with before it is advised, and withdrawn if training gains nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cells import in_gate
from diagnosing.small_runs import Numbers, make_parts
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_feed.diagnosing import diagnose, proof, rates, run
from lightning_feed.diagnosing import tune as tuning
from lightning_feed.diagnosing.proof import Proof, prove, proven
from lightning_feed.diagnosing.session import open_session
from lightning_feed.diagnosing.tune import tune
from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import Trial
from lightning_feed.trials.tune_loader import Tuned

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
    found = proven(TUNED, Proof(setting=CHOSEN, own_ms=10.0, chosen_ms=chosen_ms))
    assert found.setting == (CHOSEN if holds else OWN)
    assert f"training itself took 10 ms a step with num_workers=0, {chosen_ms:.3g} with num_workers=1" in found.reason


def chooses_one_worker(loader: DataLoader[Any], *arguments: Any, **named: Any) -> Tuned:
    """In the place of ``tune_loader``."""
    own = Setting.of(loader)
    chosen = replace(CHOSEN, persistent_workers=False)
    trials = (Trial(setting=own, steps_s=(0.2,)), Trial(setting=chosen, steps_s=(0.1,)))
    return Tuned(setting=CHOSEN, own=own, reason="the fastest of 2 tried", trials=trials)


def keeps_the_users(loader: DataLoader[Any], *arguments: Any, **named: Any) -> Tuned:
    """In the place of ``tune_loader``."""
    own = Setting.of(loader)
    return Tuned(setting=own, own=own, reason="none gained", trials=(Trial(setting=own, steps_s=(0.2,)),))


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


@pytest.mark.parametrize("gains", in_gate([True, False], [True]))
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
    assert not any(remedy.sets("num_workers") for remedy in found.remedies) or gains
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


def test_training_itself_compares_no_workers_where_only_it_can_tell(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers take the CPUs on which the model computes."""
    own = Setting(num_workers=2, prefetch_factor=2)
    alone = Setting(num_workers=0)
    tuned = Tuned(setting=own, own=own, without_workers=alone, reason="none of 3 gained", trials=())
    seen = _taking(monkeypatch, lambda workers: 20.0 if workers else 10.0)
    _, module, data = parts
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", max_epochs=1)
    session = open_session(trainer, module, data, None)
    with session.restoring():
        session.set_up()
        session.train_loaders = data.train_dataloader()
        proof = prove(session, tuned, seconds=1.0)
    assert proof == Proof(setting=alone, own_ms=20.0, chosen_ms=10.0)
    assert seen == [0, 2]
    assert proven(tuned, proof).setting == alone


@pytest.mark.parametrize("workers", in_gate([0, 1], [1]))
def test_diagnosis_trains_with_the_threads_that_workers_leave_cpus_for(
    workers: int, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, module, data = parts
    usual = proof.time_fit
    threads: list[int] = []

    def time_fit(session: Any, limits: Any, loader: Any) -> float | None:
        threads.append(torch.get_num_threads())
        usual(session, limits, loader)
        return 10.0 * threads[-1]

    monkeypatch.setattr(proof, "time_fit", time_fit)
    opened = run.open_session

    def on_two_cpus(*given: Any) -> Any:
        session = opened(*given)
        session.machine = replace(session.machine, usable_cpus=2)
        return session

    monkeypatch.setattr(run, "open_session", on_two_cpus)
    monkeypatch.setattr(rates, "tune_loader", keeps_the_users)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        data.setup("fit")
        loader = DataLoader(data.train_dataloader().dataset, batch_size=4, num_workers=workers)
        found = diagnose(trainer, module, train_dataloaders=loader, quick=True, only=["loader"], budget_s=6.0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == ([1, 2] if workers else [])
    advised = [remedy for remedy in found.remedies if remedy.sets("torch_threads")]
    assert [(remedy.code, remedy.tried_ms, remedy.effects) for remedy in advised] == (
        [("torch.set_num_threads(1)", (20.0, 10.0), ("sums",))] if workers else []
    )


@pytest.mark.parametrize("gains", in_gate([True, False], [False]))
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

"""AutotuneCallback on the simulated device, where the times of steps are known some steps later."""

from typing import Any

import pytest
import torch
from simulated.device import SimulatedDevice
from simulated.training import Model, fit
from torch.utils.data import DataLoader, Dataset

from lightning_feed import AutotuneCallback, GPUStarvationCallback, PrefetchCallback
from lightning_feed.callbacks import fit_tuning
from lightning_feed.load.rehearsal import Rehearsal

STEP_MS = 300.0
STEPS = 300

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


@pytest.mark.parametrize("synchronise", [True, False], ids=["host waits in each step", "host is ahead"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside others"])
def test_trials_begin_once_the_times_of_steps_are_known(
    synchronise: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    goals: list[Any] = []
    monkeypatch.setattr(fit_tuning, "rehearsal_of", lambda *_: Rehearsal())
    monkeypatch.setattr(fit_tuning, "tune_for_fit", lambda loader, trainer, goal, rehearsal: goals.append(goal))
    device = SimulatedDevice()
    model = Model(device, STEP_MS, synchronise=synchronise)
    others: list[Any] = [] if alone else [PrefetchCallback(), GPUStarvationCallback(report=False)]
    fit(device, model, DataLoader(Rows(), batch_size=2), AutotuneCallback(), *others, max_epochs=1)
    [goal] = goals
    assert goal.own_step_s == pytest.approx(STEP_MS / 1e3, rel=0.1)
    assert 0.7 < goal.time_left.seconds / (STEPS * STEP_MS / 1e3) < 1  # without the steps before the trials

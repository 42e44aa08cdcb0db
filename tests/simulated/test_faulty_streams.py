"""The streams with a fault, by which tests on a GPU are controlled, have it; the others have none. Simulated device."""

from typing import Any

import on_cuda
import pytest
import torch
from on_cuda import PrefetchOver, SlowCopies, Unordered, Unrecorded
from simulated.device import SimulatedDevice
from simulated.training import Model, SimulatedLoader, fit

from lightning_feed.transfer.prefetcher import DeviceStream


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (DeviceStream, None),
        (SlowCopies, None),
        (Unrecorded, "handed out again without waiting for compute"),
        (Unordered, "training_step on compute"),
    ],
)
def test_races_are_found_only_in_the_streams_with_a_fault(
    stream: type[DeviceStream], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()
    monkeypatch.setattr(on_cuda, "spin", device.launch)
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    callback = PrefetchOver(stream)
    fit(device, Model(device, 5.0), SimulatedLoader(device, 12, make=batch), callback)
    assert callback.active
    if said is None:
        assert device.races == []
    else:
        assert any(said in race for race in device.races)


def batch(index: int) -> Any:
    return {"x": torch.full((4, 8), float(index))}

"""What the tests of real fits share."""

import pytest

from lightning_feed import GPUStarvationCallback


@pytest.fixture
def quiet() -> GPUStarvationCallback:
    return GPUStarvationCallback(every_n_steps=5, nvml=False, report=False)

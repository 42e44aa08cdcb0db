"""On a CUDA device: the module keeps its values and random states, and every rate is there."""

from typing import Any

import pytest
import torch
from diagnosing.small_runs import make_parts, make_trainer, short_diagnosis

pytestmark = [
    # The fits are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),
]


@pytest.mark.gpu(twin="diagnosing/test_restore.py::test_diagnosis_before_training_leaves_everything_unchanged")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_diagnosis_on_cuda_keeps_weights_and_random_states(device: str) -> None:
    Module, Data = make_parts()

    class OnDevice(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(3, device=self.device)
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    model = OnDevice().to(device)
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().cpu().clone() for tensor in tensors]
    states = torch.cuda.get_rng_state_all()
    found = short_diagnosis(make_trainer(accelerator="cuda"), model, Data(), only=["model"])
    for tensor, values in zip(tensors, before, strict=True):  # Lightning leaves the module on the CPU after any fit
        assert torch.equal(tensor.detach().cpu(), values)
    assert all(torch.equal(a, b) for a, b in zip(torch.cuda.get_rng_state_all(), states, strict=True))
    results = found.measurements.experiments
    assert found.device_type == "cuda"
    assert results.model_per_s > 0

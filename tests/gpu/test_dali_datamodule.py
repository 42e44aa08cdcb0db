"""DaliDataModule on a CUDA device: batches arrive there, and the memory of evaluation is given back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recording import quiet_trainer

from lightning_feed import PrefetchCallback

pytest.importorskip("nvidia.dali")

from dali_numbers import DaliNumbers, Defined, decoded
from lightning.pytorch import LightningModule
from resuming import assert_resumes_exactly
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]


class Seen(LightningModule):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.batches: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        assert images.is_cuda
        assert labels.is_cuda
        self.batches.append((images.cpu(), labels.cpu()))
        return self.layer(images.float().mean((1, 2))).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert batch[0].is_cuda

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(module: Any, *callbacks: Any, **options: Any) -> Seen:
    model = Seen()
    quiet_trainer(list(callbacks), accelerator="cuda", **options).fit(model, datamodule=module)
    return model


@pytest.mark.parametrize("device", ["auto", "gpu", "cpu"])
def test_batches_arrive_on_the_device(device: Any, class_folders: Path) -> None:
    module = Defined(lambda module: decoded(module, class_folders), 5, device=device)
    prefetch = PrefetchCallback()
    model = fit(module, prefetch)
    assert [len(images) for images, _ in model.batches] == [5, 5, 2] * 2
    assert torch.cat([labels for _, labels in model.batches[:3]]).flatten().tolist() == [0] * 6 + [1] * 6
    assert prefetch.active == (device == "cpu")


def test_the_device_sees_what_the_host_does(class_folders: Path) -> None:
    """nvJPEG and libjpeg-turbo may round apart, and DALI's resizing on the GPU too."""
    on = {
        device: fit(Defined(lambda module: decoded(module, class_folders), 4, device=device), max_epochs=1).batches
        for device in ("gpu", "cpu")
    }
    for (ours, labels), (theirs, same) in zip(on["gpu"], on["cpu"], strict=True):
        assert torch.equal(labels, same)
        assert (ours.float() - theirs.float()).abs().mean() < 2


def test_device_transform_runs_on_the_device(class_folders: Path) -> None:
    class Halved(Defined):
        def device_transform(self, batch: Any, split: str) -> Any:
            assert batch[0].is_cuda
            return batch[0] // 2, batch[1]

    plain = fit(Defined(lambda module: decoded(module, class_folders), 4), max_epochs=1).batches
    halved = fit(Halved(lambda module: decoded(module, class_folders), 4), PrefetchCallback(), max_epochs=1).batches
    for (whole, _), (half, _) in zip(plain, halved, strict=True):
        assert torch.equal(whole // 2, half)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_rebuilding_gives_the_memory_back(class_folders: Path) -> None:
    module = Defined(lambda module: decoded(module, class_folders), 4, device="gpu")
    validated = module.val_dataloader()

    def validate(times: int) -> int:
        for _ in range(times):
            assert len(list(validated)) == 3
            assert not validated.built
        torch.cuda.synchronize()
        return used_bytes()

    settled = validate(10)
    assert validate(50) - settled < 32 << 20


def test_evaluation_is_not_on_the_device_while_training(class_folders: Path) -> None:
    module = Defined(lambda module: decoded(module, class_folders), 4)

    class Watches(Seen):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            assert not module._dali.loaders["val"].built

    model = Watches()
    quiet_trainer([], accelerator="cuda", limit_val_batches=1).fit(model, datamodule=module)
    assert len(model.batches) == 6
    assert module._dali.loaders == {}


def test_resume(tmp_path: Path) -> None:
    def data() -> dict[str, Any]:
        return {"datamodule": DaliNumbers(tmp_path / "files", noise=True)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("resuming.quiet_trainer", lambda callbacks, **options: quiet_trainer(callbacks, **_cuda(options)))
        assert_resumes_exactly(data, lambda: [PrefetchCallback()], tmp_path / "run.ckpt", count=3)


def _cuda(options: dict[str, Any]) -> dict[str, Any]:
    return {"accelerator": "cuda", **options}

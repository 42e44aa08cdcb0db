"""Weights to the bit, with PrefetchCallback and without: two of the checks of gpu_checks.py."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_claims import Claim, Report, if_active
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback, PrefetchCallback

if TYPE_CHECKING:
    from gpu_checks import CudaDevice  # which imports this file


class Random(LightningModule):
    """Draws random numbers on the device: dropout in the step, noise in a batch hook, or in the transfer."""

    def __init__(self, *, manual: bool, in_transfer: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 8))
        self.automatic_optimization = not manual
        self.in_transfer = in_transfer

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return _noisy(moved) if self.in_transfer else moved

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self.in_transfer else _noisy(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return None

    def loss(self, batch: Any) -> Tensor:
        values, labels = batch
        return nn.functional.cross_entropy(self.net(values), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _noisy(batch: Any) -> Any:
    values, labels = batch
    return [values + 0.1 * torch.randn_like(values), labels]


class Labelled(Dataset[tuple[Tensor, Tensor]]):
    """640 samples, the same ones in every run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(640, 64, generator=generator)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index], torch.tensor(index % 8)


def _weights(
    device: "CudaDevice", make: Callable[[], LightningModule], *callbacks: Callback, **options: Any
) -> list[Tensor]:
    seed = options.pop("seed", 1)
    seed_everything(seed, verbose=False)
    model = make()
    device.fit(model, DataLoader(Labelled(), batch_size=16, pin_memory=True), *callbacks, max_epochs=2, **options)
    return [weight.detach().cpu() for weight in model.parameters()]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _same_claim(what: str, first: list[Tensor], second: list[Tensor], *, expected: bool = True) -> Claim:
    found, words = _equal(first, second), {True: "the same", False: "different"}
    return Claim(claim=what, measured=words[found], goal=words[expected], passed=found is expected)


def same(report: Report, device: "CudaDevice") -> None:
    """Weights to the bit, with and without. Noise in the transfer is drawn in the same order at depth 1 only."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    first = partial(Random, manual=False, in_transfer=False)
    plain = _weights(device, first)
    report.add(
        _same_claim("control: weights of the same run twice", plain, _weights(device, first)),
        _same_claim("control: weights with another seed", plain, _weights(device, first, seed=2), expected=False),
    )
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        for manual in (False, True):
            for in_transfer, depth in ((False, 1), (False, 3), (True, 1)):
                make = partial(Random, manual=manual, in_transfer=in_transfer)
                plain = _weights(device, make, precision=precision)
                callback = PrefetchCallback(depth=depth)
                ours = _weights(device, make, callback, precision=precision)
                optimisation = "manual" if manual else "automatic"
                hook = "transfer_batch_to_device" if in_transfer else "on_after_batch_transfer"
                what = f"weights, {precision}, {optimisation} optimisation, depth {depth}, noise in {hook}"
                report.add(if_active(_same_claim(what, plain, ours), active=callback.active))


class Plain(LightningModule):
    """A step without random numbers, whose network runs as CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, labels = batch
        return nn.functional.cross_entropy(self.net(values), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Compiled(Plain):
    """torch.compile records the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile(mode="reduce-overhead")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return super().training_step(batch, batch_idx)


class Captured(Plain):
    """Forward and backward are captured by hand."""

    def on_train_start(self) -> None:
        torch.cuda.make_graphed_callables(self.net, (torch.randn(16, 64, device=self.device),))


def graphs(report: Report, device: "CudaDevice") -> None:
    """Weights to the bit where the step is a CUDA graph, so that the host runs ahead."""
    plain = _weights(device, Plain)
    for name, make in (("captured graph", Captured), ("torch.compile, reduce-overhead", Compiled)):
        what = f"weights, {name}"
        try:
            graphed = _weights(device, make)
        except Exception as error:  # noqa: BLE001  # without us: no C compiler, for example. Said, not swallowed
            report.add(Claim(claim=what, detail=f"plain Lightning fails: {type(error).__name__}: {_first_line(error)}"))
            continue
        again = _equal(graphed, _weights(device, make))
        callback = PrefetchCallback()
        ours = _weights(device, make, callback, GPUStarvationCallback(nvml=False, report=False))
        claim = if_active(_same_claim(what, graphed, ours), active=callback.active)
        near = all(torch.allclose(one, other, rtol=1e-2, atol=1e-3) for one, other in zip(plain, ours, strict=True))
        report.add(
            claim if again else Claim(claim=what, measured=claim.measured, detail="plain differs from itself"),
            Claim(claim=f"{what}: near those without graphs", measured=str(near), goal="True", passed=near),
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]

"""With PrefetchCallback every draw and every cast comes where it came before, whatever hooks the user has."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from recording import Numbers, Recording, assert_same_run
from torch import Tensor
from torch.utils.data import DataLoader

pytestmark = [
    # Steps that a gradient scaler skips.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`"),
]

OF_BOTH = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
OF_BOTH += ("on_before_zero_grad", "on_train_batch_end")
OF_MODULES = ("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")


class Casts(Recording):
    """Its transfer draws random numbers and multiplies: under autocast the product has another dtype."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        product = batch @ torch.eye(4, dtype=batch.dtype)
        self.note("autocast", torch.is_autocast_enabled("cpu"), str(product.dtype))
        self.note("draw", torch.rand(1).item())
        return super().transfer_batch_to_device(product.to(batch.dtype) + torch.rand(4), device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.note("draw in step", torch.rand(1).item())  # with manual optimisation, after a backward pass
        return loss


def draws_in(kind: type[Any], hooks: frozenset[str]) -> type[Any]:
    """A subclass that draws a random number before and after each of some hooks, and notes it."""

    def hook(name: str) -> Any:
        def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
            module = self if isinstance(self, Recording) else args[1]
            module.note(f"{name} of {kind.__name__}", torch.rand(1).item())
            result = getattr(kind, name)(self, *args, **kwargs)
            module.note(f"after {name} of {kind.__name__}", torch.rand(1).item())
            return result

        return drawing

    return type(kind.__name__, (kind,), {name: hook(name) for name in hooks})


class Before(Callback):
    pass


class After(Callback):
    pass


def precision(name: str) -> dict[str, Any]:
    if name == "16-scaled":
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))]}
    return {"precision": name}


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    manual=st.booleans(),
    optimizers=st.integers(1, 2),
    kind=st.sampled_from(["32-true", "bf16-mixed", "16-scaled"]),
    accumulate=st.integers(1, 3),
    clip=st.sampled_from([None, 0.5]),
    of_module=st.frozensets(st.sampled_from([*OF_BOTH, *OF_MODULES]), max_size=3),
    of_before=st.frozensets(st.sampled_from(OF_BOTH), max_size=2),
    of_after=st.frozensets(st.sampled_from(OF_BOTH), max_size=2),
    validate_every=st.sampled_from([None, 2]),
)
@example(True, 1, "16-scaled", 1, None, frozenset(), frozenset(), frozenset(), None)
@example(False, 1, "16-scaled", 1, None, frozenset({"on_after_backward"}), frozenset(), frozenset(), None)
@example(False, 1, "16-scaled", 1, None, frozenset(), frozenset(), frozenset({"on_before_backward"}), None)
@example(False, 1, "16-scaled", 2, 0.5, frozenset(), frozenset({"on_before_optimizer_step"}), frozenset(), 2)
def test_weights_casts_and_random_draws_match_a_fit_without_prefetching(
    manual: bool,
    optimizers: int,
    kind: str,
    accumulate: int,
    clip: float | None,
    of_module: frozenset[str],
    of_before: frozenset[str],
    of_after: frozenset[str],
    validate_every: int | None,
) -> None:
    options: dict[str, Any] = {"max_epochs": 1, **precision(kind)}
    if not manual:
        options |= {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    if validate_every is not None:
        options["val_check_interval"] = validate_every

    def loaders() -> dict[str, Any]:
        made = {"train_dataloaders": DataLoader(Numbers(12, noise=True), batch_size=2)}
        if validate_every is not None:
            made["val_dataloaders"] = DataLoader(Numbers(4, noise=True, first=1000), batch_size=2)
        return made

    module = draws_in(Casts, of_module)
    callback = assert_same_run(
        loaders,
        lambda: module(optimizers if manual else 1, manual=manual),
        beside=lambda: ([draws_in(Before, of_before)()], [draws_in(After, of_after)()]),
        **options,
    )
    assert callback.active


# --- classes of the user's own in the optimizer step ------------------------------------------------------------------


class DrawingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.01 * torch.rand(parameter.shape)
        return super().step(closure)


class DrawingScheduler(torch.optim.lr_scheduler.LambdaLR):
    def step(self, epoch: int | None = None) -> None:
        torch.rand(1)
        super().step(epoch)


class DrawingPrecision(MixedPrecision):
    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        torch.rand(1)
        return super().post_backward(tensor, module)


class OwnOptimizer(Casts):
    def configure_optimizers(self) -> Any:
        return DrawingOptimizer(self.parameters(), lr=0.1)


class OwnScheduler(Casts):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = DrawingScheduler(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OwnClipping(Casts):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        torch.rand(1)
        super().clip_gradients(*args, **kwargs)


@pytest.mark.parametrize("module", [OwnOptimizer, OwnScheduler, OwnClipping, Casts])
def test_random_draws_of_user_classes_keep_their_place_with_a_grad_scaler(module: type[Casts]) -> None:
    plugin = DrawingPrecision if module is Casts else MixedPrecision
    callback = assert_same_run(
        lambda: {"train_dataloaders": DataLoader(Numbers(12, noise=True), batch_size=2)},
        module,
        plugins=[plugin("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))],
        max_epochs=1,
    )
    assert callback.active

"""Lines at which the host waits for the device: found in a few steps, and nothing of the user's is changed."""

import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from simulated.device import DEVICE, SimulatedDevice, simulated
from simulated.training import Model, SimulatedLoader, evaluate, fit
from torch import Tensor

from lightning_feed import GPUStarvationCallback, watch_loader
from lightning_feed.measure import device_waits
from lightning_feed.measure.measurements import DeviceWait

STEPS = 50
SAMPLED = 8


@pytest.fixture(autouse=True)
def few_steps_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short fit samples all of them."""
    monkeypatch.setattr(device_waits, "SAMPLED_STEPS", SAMPLED)


class Reads(Model):
    """Reads its loss in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept = loss.item()
        return loss


class Synchronises(Model):
    """Waits for the whole device in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.sim.synchronize()
        return loss


class ReadsInAFunction(Model):
    """The line that waits is in a function that the step calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        read(loss)
        return loss


def read(loss: Tensor) -> float:
    return loss.item()


class ReadsRarely(Model):
    """Reads its loss in every 40th step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 40 == 0:
            loss.item()
        return loss


class ReadsBetweenSteps(Model):
    """Reads a tensor of the device after each step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].cpu()


class ReadsInValidation(Model):
    """Waits in each batch of a validation, and in no step."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.net.weight.sum().item()


def line_of(owner: Any, text: str) -> int:
    """Number of the line with ``text`` in this file, in the source of ``owner``."""
    lines, first = inspect.getsourcelines(owner)
    return next(first + number for number, line in enumerate(lines) if text in line)


def waits_of(kind: type[Model], *, steps: int = STEPS, **options: Any) -> tuple[DeviceWait, ...]:
    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    fit(device, kind(device), SimulatedLoader(device, steps), starvation, **options)
    assert device.get_sync_debug_mode() == 0
    waits = starvation.report().measurements.facts.waits
    assert waits is not None
    return waits


@pytest.mark.parametrize(
    ("kind", "owner", "code"),
    [
        (Reads, Reads, "self.kept = loss.item()"),
        (Synchronises, Synchronises, "self.sim.synchronize()"),
        (ReadsInAFunction, read, "return loss.item()"),
        (ReadsBetweenSteps, ReadsBetweenSteps, 'outputs["loss"].cpu()'),
    ],
)
def test_the_line_that_waits_in_each_step_is_found(kind: type[Model], owner: Any, code: str) -> None:
    [wait] = waits_of(kind)
    assert wait == DeviceWait(
        file=__file__,
        line=line_of(owner, code),
        code=code,
        is_users=True,
        steps=SAMPLED,
        sampled_steps=SAMPLED,
    )
    assert wait.in_most_steps


def test_a_step_that_does_not_wait_has_no_lines() -> None:
    assert waits_of(Model) == ()


def test_a_line_that_waits_now_and_then_is_not_taken_for_one_of_each_step() -> None:
    assert not any(wait.in_most_steps for wait in waits_of(ReadsRarely))


def test_a_metric_in_the_progress_bar_waits_in_lightning_and_not_at_the_line_that_began_the_fit() -> None:
    class Shows(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True)
            return loss

    waits = waits_of(Shows)
    assert [wait.is_users for wait in waits if wait.in_most_steps] == [False]
    assert "/lightning/" in waits[0].file


def test_no_step_is_sampled_during_the_warm_up() -> None:
    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    fit(device, Reads(device), SimulatedLoader(device, 12), starvation)
    assert starvation.report().measurements.facts.waits is None


@pytest.mark.filterwarnings("ignore:predict returned None")
def test_waits_of_a_validation_are_found() -> None:
    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    evaluate(device, "validate", ReadsInValidation(device), SimulatedLoader(device, STEPS), starvation)
    [wait] = starvation.report("validate").measurements.facts.waits or ()
    assert wait.code == "self.net.weight.sum().item()"


@pytest.mark.filterwarnings("ignore:predict returned None")
def test_a_training_step_is_not_charged_with_the_waits_of_the_validation_that_follows_it() -> None:
    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    val = SimulatedLoader(device, 2)
    fit(device, ReadsInValidation(device), SimulatedLoader(device, 60), starvation, val=val, val_check_interval=3)
    assert starvation.report().measurements.facts.waits == ()


def test_waits_of_other_threads_are_not_those_of_training() -> None:
    class ReadsElsewhere(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            thread = threading.Thread(target=self.sim.synchronize)
            thread.start()
            thread.join()
            return loss

    assert waits_of(ReadsElsewhere) == ()


def test_the_waiting_line_of_a_loop_without_a_trainer_is_found() -> None:
    device = SimulatedDevice()
    with simulated(device):
        loader: Any = watch_loader(SimulatedLoader(device, STEPS), device=DEVICE, report=False)
        loss = torch.ones(4, device=DEVICE)
        for _ in loader:
            loss.sum().item()
        measured = loader.report().measurements
        loader.close()
    [wait] = measured.facts.waits or ()
    assert (wait.file, wait.code, wait.steps) == (__file__, "loss.sum().item()", SAMPLED)
    assert device.get_sync_debug_mode() == 0


# --- nothing of the user's changes ------------------------------------------------------------------------------------


class Warns(Reads):
    """Warns in each step, at one line."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        warnings.warn("of the user", UserWarning, stacklevel=1)
        return super().training_step(batch, batch_idx)


def shown_warnings(*callbacks: Any) -> list[str]:
    """The warnings that a fit shows if each line may warn once, as Python's usual filters have it."""
    shown: list[str] = []
    device = SimulatedDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message="of the user|called a synchronizing|Synchronization debug mode")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        globals().pop("__warningregistry__", None)
        fit(device, Warns(device), SimulatedLoader(device, STEPS), *callbacks)
    return shown


def test_warnings_are_shown_as_without_measuring() -> None:
    assert shown_warnings() == ["of the user"]
    assert shown_warnings(GPUStarvationCallback(report=False)) == ["of the user"]


def test_the_warning_filters_are_the_same_object_with_the_same_entries_afterwards() -> None:
    before = warnings.filters
    entries = list(before)
    waits_of(Reads)
    assert warnings.filters is before
    assert list(warnings.filters) == entries


@pytest.mark.parametrize("action", ["error", "always"])
def test_a_filter_of_the_user_within_a_step_does_not_meet_the_warnings_of_torch(action: Any) -> None:
    shown: list[Any] = []

    class Filters(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            with warnings.catch_warnings(record=action == "always") as caught:
                warnings.simplefilter(action)
                loss.item()
            shown.extend(caught or ())
            return loss

    [wait] = waits_of(Filters)
    assert (wait.code, wait.steps) == ("loss.item()", SAMPLED)
    assert shown == []


class Quiet(Callback):
    """Is within a ``catch_warnings`` from the start of each step to its end."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.context = warnings.catch_warnings()
        self.context.__enter__()
        warnings.filterwarnings("ignore", message="of the user")

    def on_train_batch_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)


class QuietBetween(Callback):
    """Is within a ``catch_warnings`` from the end of each step to the start of the next."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.context = warnings.catch_warnings()
        self.context.__enter__()
        warnings.filterwarnings("ignore", message="of the user")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.context.__exit__(None, None, None)


@pytest.mark.parametrize("position", ["first", "last"])
def test_a_sample_within_a_context_that_ends_before_the_step_is_dropped(position: str) -> None:
    starvation = GPUStarvationCallback(report=False)
    callbacks = [QuietBetween(), starvation] if position == "first" else [starvation, QuietBetween()]
    assert shown_warnings(*callbacks) == shown_warnings(QuietBetween())
    assert starvation.report().measurements.facts.waits is None  # not known


def test_a_user_who_resets_the_filters_within_a_sampled_step_keeps_the_new_ones() -> None:
    class Resets(Reads):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.sim.get_sync_debug_mode() == 1:
                warnings.resetwarnings()
                warnings.simplefilter("ignore", ResourceWarning)
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        device = SimulatedDevice()
        fit(device, Resets(device), SimulatedLoader(device, STEPS), GPUStarvationCallback(report=False))
        assert [entry[2] for entry in warnings.filters] == [ResourceWarning]
        assert type(warnings.filters) is list


def test_a_validation_in_the_fit_leaves_no_sample_behind() -> None:
    class Validates(Model):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            modes.append(self.sim.get_sync_debug_mode())

    modes: list[int] = []
    device = SimulatedDevice()
    val = SimulatedLoader(device, 26)
    options: dict[str, Any] = {"val": val, "val_check_interval": 10}
    fit(device, Validates(device), SimulatedLoader(device, 60), GPUStarvationCallback(report=False), **options)
    assert sum(modes) <= SAMPLED < len(modes)


@pytest.mark.parametrize("position", ["first", "last"])
def test_a_context_that_a_callback_holds_over_each_step_hides_no_waits_and_shows_no_warnings(position: str) -> None:
    starvation = GPUStarvationCallback(report=False)
    callbacks = [Quiet(), starvation] if position == "first" else [starvation, Quiet()]
    entries = list(warnings.filters)
    assert shown_warnings(*callbacks) == []
    assert list(warnings.filters) == entries
    waits = starvation.report().measurements.facts.waits
    assert waits is not None
    assert [(wait.code, wait.steps) for wait in waits] == [("self.kept = loss.item()", SAMPLED)]


def test_a_sample_that_is_dropped_within_a_context_of_the_user_leaves_nothing_behind() -> None:
    backend = SimulatedDevice()
    with simulated(backend):
        before = warnings.filters
        entries = list(before)
        finder = device_waits.WaitFinder(DEVICE.type)
        finder.begin()
        assert list(warnings.filters) != entries
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            finder.drop()
            assert list(warnings.filters)[1:] == entries
        assert list(warnings.filters) == entries
        warnings.filterwarnings("ignore", message="added later")
        assert warnings.filters[0][1].pattern == "added later"
        warnings.filters.pop(0)  # type: ignore[attr-defined]
        warnings.filters = before


def test_a_filter_that_the_user_adds_within_a_sampled_step_stays() -> None:
    class Adds(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.sim.get_sync_debug_mode() == 1:
                warnings.filterwarnings("ignore", message="added in a step")
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        waits_of(Adds)
        added = [entry for entry in warnings.filters if "added in a step" in str(entry[1])]
        assert len(added) == 1
        assert type(warnings.filters) is list


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_debug_mode_of_the_user_is_left_alone(mode: str) -> None:
    modes = set()

    class Debugs(Model):
        def on_train_start(self) -> None:
            self.sim.set_sync_debug_mode(mode)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            modes.add(self.sim.get_sync_debug_mode())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net.weight.sum()

        def on_train_epoch_end(self) -> None:
            self.sim.set_sync_debug_mode("default")

    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        fit(device, Debugs(device), SimulatedLoader(device, STEPS), starvation)
    assert modes == {("default", "warn", "error").index(mode)}
    assert starvation.report().measurements.facts.waits is None


def test_a_debug_mode_that_the_user_sets_within_a_sampled_step_stays() -> None:
    modes = []

    class Sets(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.sim.get_sync_debug_mode() == 1:
                self.sim.set_sync_debug_mode("error")
            return self.net.weight.sum()

        def on_train_epoch_end(self) -> None:
            modes.append(self.sim.get_sync_debug_mode())
            self.sim.set_sync_debug_mode("default")

    device = SimulatedDevice()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        fit(device, Sets(device), SimulatedLoader(device, STEPS), GPUStarvationCallback(report=False))
    assert modes == [2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_sampled_step_leaves_nothing_behind(error: type[BaseException]) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.sim.get_sync_debug_mode() == 1:
                raise error
            return super().training_step(batch, batch_idx)

    device = SimulatedDevice()
    entries = list(warnings.filters)
    with pytest.raises((error, SystemExit)):
        fit(device, Fails(device), SimulatedLoader(device, STEPS), GPUStarvationCallback(report=False))
    assert device.get_sync_debug_mode() == 0
    assert list(warnings.filters) == entries
    assert "synchronize" not in vars(device) or device.synchronize.__func__ is SimulatedDevice.synchronize


def test_weights_are_the_same_with_sampled_steps() -> None:
    def values(*callbacks: Any) -> list[float]:
        device = SimulatedDevice()
        model = Reads(device)
        fit(device, model, SimulatedLoader(device, STEPS), *callbacks)
        return model.seen

    assert values() == values(GPUStarvationCallback(report=False))


def test_torch_warns_as_the_simulated_device_does() -> None:
    """The texts that the filter recognises are in the installed torch."""
    libraries = [path.read_bytes() for path in (Path(torch.__file__).parent / "lib").glob("libc10_cuda.so")]
    if not libraries:
        pytest.skip("this torch was built without CUDA")
    assert any(b"called a synchronizing CUDA operation" in library for library in libraries)

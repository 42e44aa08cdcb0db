"""PrefetchCallback's own promises: when it does nothing, what it leaves behind, odd batches, errors, processes."""

import copy
import logging
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from recording import (
    NullStreamPrefetch,
    Numbers,
    Recording,
    assert_same_run,
    by_hook,
    fit,
    quiet_trainer,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback
from lightning_feed.errors import SettingsError
from lightning_feed.transfer.prefetcher import SideStream


def plain(size: int = 12, **kwargs: Any) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Numbers(size), batch_size=2, **kwargs)}


def with_validation() -> dict[str, Any]:
    return {**plain(), "val_dataloaders": DataLoader(Numbers(4, first=1000), batch_size=2)}


class CountingStream(SideStream):
    """Counts the batches that were staged: all that are handed over, but for those that follow what was queued."""

    def __init__(self) -> None:
        self.staged = 0

    def hand_over(self, batch: Any, mark: Any) -> None:
        self.staged += 1

    def follow_compute(self, batch: Any = None) -> None:
        self.staged -= 1


class CountingPrefetch(PrefetchCallback):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream = CountingStream()

    def open_stream(self, device: torch.device) -> SideStream:
        return self.stream


# --- it works at all --------------------------------------------------------------------------------------------------


def test_all_batches_but_the_first_of_each_epoch_are_prefetched() -> None:
    callback = CountingPrefetch()
    fit([callback], plain, max_epochs=3)
    assert callback.stream.staged == 3 * (6 - 1)


def test_validation_batches_in_a_fit_are_prefetched() -> None:
    callback = CountingPrefetch()
    fit([callback], with_validation, max_epochs=1)
    assert callback.stream.staged == 5 + 1 + 1  # one batch each in the sanity check and in the validation


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
@pytest.mark.parametrize("loaders", [1, 2])
def test_prefetched_validate_test_and_predict_match_plain_ones(entry: str, loaders: int) -> None:
    def run(callbacks: list[Callback]) -> tuple[Any, Recording]:
        model = Recording()
        torch.nn.init.constant_(model.net[0].weight, 0.1)
        trainer = quiet_trainer(callbacks)
        made = [DataLoader(Numbers(7, first=100 * i), batch_size=2) for i in range(loaders)]
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.3)
        return getattr(trainer, entry)(model, dataloaders=made), model

    callback = CountingPrefetch()
    ours, our_model = run([callback])
    expected, plain_model = run([])
    assert callback.stream.staged == 4 * loaders - 1
    assert by_hook(our_model.events) == by_hook(plain_model.events)
    assert str(ours) == str(expected)


def test_the_next_batch_is_prepared_before_backward_with_a_grad_scaler() -> None:
    order: list[str] = []

    class Scaled(Recording):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            order.append("prepare")
            return super().on_before_batch_transfer(batch, dataloader_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss: Any = super().training_step(batch, batch_idx)
            loss.register_hook(lambda gradient: order.append("backward"))
            return loss

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    fit([NullStreamPrefetch()], plain, Scaled, plugins=[plugin], max_epochs=1)
    assert order == ["prepare", "prepare", "backward", *["prepare", "backward"] * 4, "backward"]


# --- standing aside ---------------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("lightning_feed")]


def test_prefetching_is_off_on_the_cpu_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = PrefetchCallback()
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        assert_same_run(with_validation, prefetch=lambda: callback)
    assert not callback.active
    assert said(caplog) == ["PrefetchCallback does nothing: batches cannot be copied ahead of time on cpu."]


class TakesIterator(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`")
def test_a_step_that_takes_dataloader_iter_turns_prefetching_off(caplog: pytest.LogCaptureFixture) -> None:
    callback = NullStreamPrefetch()
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        quiet_trainer([callback]).fit(TakesIterator(), **plain())
    assert not callback.active
    assert said(caplog) == ["PrefetchCallback does nothing: the step takes `dataloader_iter` and fetches for itself."]


class OnDevice:
    """As DALI: one buffer that every batch is written to. The meta device stands for any device but the host."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.drawn_in_step: list[int] = []

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Any:
        for index in range(self.batches):
            yield {"x": torch.full((2, 4), float(index)), "on_device": torch.empty(2, device="meta")}


def test_a_loader_that_yields_device_tensors_turns_prefetching_off(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(Recording):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["x"])

        def note(self, *event: Any) -> None: ...

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    callback = CountingPrefetch()
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        _, _, error = fit([callback], lambda: {"train_dataloaders": OnDevice(5)}, Keeps)
    assert error is None
    assert callback.stream.staged == 0
    assert not callback.active
    assert said(caplog) == ["PrefetchCallback does nothing: the loader yields tensors that are on the device already."]


def test_a_second_instance_stays_inactive_and_silent(caplog: pytest.LogCaptureFixture) -> None:
    first = CountingPrefetch()
    second = CountingPrefetch()
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        ours, _, error = fit([first, second], plain)
    expected, _, _ = fit([], plain)
    assert error is None
    assert by_hook(ours.events) == by_hook(expected.events)
    assert (first.active, second.active) == (True, False)
    assert second.stream.staged == 0
    assert said(caplog) == []  # LIGHTNING_FEED=1 adds one to programs that have one


# --- bad settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "leave the callback out"),
        ({"depth": -1}, "1 or more"),
        ({"depth": True}, "whole number"),
        ({"depth": 1.5}, "whole number"),
        ({"host_keys": "meta"}, "list of letters"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PrefetchCallback(**settings)


# --- batches of every kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_host_keys_never_reach_the_transfer(depth: int) -> None:
    moved: list[Any] = []

    class Watches(Recording):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            from lightning_feed.transfer.batch_tree import tensors

            moved.extend(tensor.dtype for tensor in tensors(batch))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch["meta"].dtype == torch.int64
            assert batch["inner"]["meta"] == ["a", "a"]
            return super().training_step(batch, batch_idx)

    class WithMeta(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.full((4,), float(index)), "meta": torch.tensor(index), "inner": {"meta": "a"}}

    callback = NullStreamPrefetch(depth=depth, host_keys=("meta",))
    _, _, error = fit([callback], lambda: {"train_dataloaders": DataLoader(WithMeta(), batch_size=2)}, Watches)
    assert error is None
    assert moved == [torch.float32] * 8


# --- errors -----------------------------------------------------------------------------------------------------------


class Faulty(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise OSError("photo 7 is truncated")
        return torch.full((4,), float(index))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_dataset_error_is_raised_at_the_same_step_as_without_prefetching(workers: int, depth: int) -> None:
    assert_same_run(
        lambda: {"train_dataloaders": DataLoader(Faulty(), batch_size=2, num_workers=workers)},
        prefetch=lambda: NullStreamPrefetch(depth=depth),
        error="photo 7 is truncated",
    )


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
def test_a_hook_error_is_raised_at_the_same_step_as_without_prefetching(hook: str) -> None:
    class Fails(Recording):
        pass

    def failing(self: Recording, batch: Any, *args: Any) -> Any:
        if batch[0, 0] == 6:
            raise ValueError("this batch cannot be used")
        return getattr(super(Fails, self), hook)(batch, *args)

    setattr(Fails, hook, failing)
    assert_same_run(plain, Fails, error="this batch cannot be used")


@pytest.fixture
def sigint_as_before() -> Iterator[None]:
    """Lightning switches SIGINT off for good when it ends a fit after Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_as_before")
def test_a_keyboard_interrupt_while_prefetching_is_raised_at_once() -> None:
    class Interrupted(Dataset[Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Tensor:
            if index == 6:
                raise KeyboardInterrupt
            return torch.ones(4)

    model = Recording()
    callback = NullStreamPrefetch()
    trainer = quiet_trainer([callback])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.fit(model, DataLoader(Interrupted(), batch_size=2))
    steps = [event for event in model.events if event[0] == "training_step"]
    assert len(steps) == 3
    assert "_call_batch_hook" not in vars(model)


def test_a_loader_shorter_than_its_length_ends_the_epoch_as_usual() -> None:
    class Short:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Any:
            return iter(torch.full((2, 4), float(index)) for index in range(4))

    assert_same_run(lambda: {"train_dataloaders": Short()})


# --- nothing is left behind -------------------------------------------------------------------------------------------


def test_another_tools_wrapper_around_ours_keeps_working() -> None:
    """Tools that time the transfer wrap the same methods: each must go on working when the other is taken off."""
    calls: list[str] = []

    class Outer(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            inner = pl_module._call_batch_hook
            device = trainer.strategy.batch_to_device

            def hook(name: str, *args: Any) -> Any:
                calls.append(name)
                return inner(name, *args)

            def batch_to_device(*args: Any, **kwargs: Any) -> Any:
                calls.append("batch_to_device")
                return device(*args, **kwargs)

            pl_module._call_batch_hook = hook  # type: ignore[method-assign]
            trainer.strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]

    callback = CountingPrefetch()
    model, trainer, error = fit([callback, Outer()], plain, max_epochs=1)
    assert error is None
    assert callback.stream.staged == 5
    assert calls.count("batch_to_device") == 6
    calls.clear()
    del trainer.strategy.batch_to_device
    trainer.fit_loop.max_epochs = 2
    trainer.callbacks.remove(callback)
    trainer.fit(model, **plain())  # our wrap is dead inside the other's and passes through
    assert calls.count("transfer_batch_to_device") >= 6


def test_a_module_copied_or_pickled_during_a_fit_is_unwrapped() -> None:
    copies: list[LightningModule] = []

    class Copies(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert "_call_batch_hook" in vars(pl_module)
            attached, pl_module.trainer = pl_module.trainer, None
            copies.extend([copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))])
            pl_module.trainer = attached

    _, _, error = fit([NullStreamPrefetch(), Copies()], plain, max_epochs=1, limit_train_batches=1)
    assert error is None
    for made in copies:
        assert made._call_batch_hook.__self__ is made


# --- one callback, several loops and Trainers -------------------------------------------------------------------------


def test_prefetching_is_active_in_training_and_validation() -> None:
    callback = NullStreamPrefetch()
    seen: dict[str, set[bool]] = {"fit": set(), "validate": set()}

    class Looks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen["fit"].add(callback.active)

        def on_validation_batch_start(self, *args: Any) -> None:
            seen["validate"].add(callback.active)

    fit([callback, Looks()], with_validation, max_epochs=2, val_check_interval=2)
    assert seen == {"fit": {True}, "validate": {True}}


@pytest.mark.parametrize("scaled", [True, False])
def test_a_users_on_train_batch_end_runs_before_the_next_batch_is_loaded(scaled: bool) -> None:
    seen: list[Any] = []

    class Grows(Recording):
        """Makes the samples larger from step to step, as a curriculum does."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            self.trainer.train_dataloader.dataset.first += 100

    scaler = torch.amp.GradScaler("cpu") if scaled else None
    fit(
        [NullStreamPrefetch()],
        plain,
        Grows,
        plugins=[MixedPrecision("16-mixed" if scaled else "bf16-mixed", "cpu", scaler=scaler)],
        max_epochs=1,
    )
    assert seen == [[100 * step + 2 * step, 100 * step + 2 * step + 1] for step in range(6)]

"""PrefetchCallback: fetches the next batch and copies it to the device while the current step computes."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed._host import (
    AnyTrainer,
    Fetched,
    FetcherTap,
    Original,
    RunStage,
    adopt_fetcher,
    more_to_draw,
    tap_of,
)
from lightning_feed.callbacks.exact_resume import ExactResume
from lightning_feed.errors import SettingsError, refuses_unknown_arguments
from lightning_feed.load.collate import check_drop_keys
from lightning_feed.load.stage import traced
from lightning_feed.measure.guard import Once, check_instance
from lightning_feed.transfer.batch_tree import LeanTransfer, off_host
from lightning_feed.transfer.prefetcher import CopiedBatch, Prefetcher, SideStream, open_stream

logger = logging.getLogger(__name__)

BATCH_ENDS: dict[RunStage, str] = {
    "fit": "on_train_batch_end",
    "validate": "on_validation_batch_end",
    "test": "on_test_batch_end",
    "predict": "on_predict_batch_end",
}
_AFTER_BACKWARD_BEGAN = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
    "lr_scheduler_step",
)
"""Methods that run between ``on_before_backward`` and the end of the batch, with automatic optimisation."""
LOOK_AHEAD = "[PrefetchCallback].look_ahead"
"""The profiler action around fetching the next batch and issuing its copy to the device."""
HAND_OUT = "[PrefetchCallback].hand_out"
"""The profiler action in which the loop takes a batch fetched ahead. The fetch was announced when it happened."""


class PrefetchCallback(ExactResume):
    """Copies the next batch to the device on a stream of its own while the current step computes.

    Training is not changed: the same batches arrive in the same order, and every hook runs once per batch.
    ``transfer_batch_to_device`` and ``FastDataModule.device_transform`` run on the prefetch stream,
    ``on_after_batch_transfer`` on the compute stream. The copy overlaps with computing only from pinned host memory
    (``pin_memory=True``). Checkpoints do not count batches that were only fetched.

    The device holds at most ``depth + 3`` batches, or more if they are small, up to 64 MiB: those that are ready, the
    one in use, and earlier ones that the device has not finished. If the host is further ahead, it waits before it
    copies the next batch.

    If you override ``transfer_batch_to_device``, it may read only the batch, and objects that nothing else uses: the
    step may be changing all other objects at that time (see docs/how-to/batches_in_place.md).

    Nothing is prefetched, and one INFO line says so, on devices other than CUDA and XPU, with loaders that yield device
    tensors, and in loops whose ``training_step`` takes ``dataloader_iter``.

    Args:
        depth: batches kept ready on the device, 1 or more. If the step itself waits for the device (``.item()``,
            manual optimisation with a gradient scaler), 2 are needed to hide the copy. With 2 or more, batches are
            loaded before earlier steps have run: with ``num_workers=0``, dataset and model then draw from the global
            random generators in another order.
        host_keys: keys of dict batches, at any depth of nesting, whose values stay on the host.
        drop_keys: keys that are left out before the transfer, since the step does not read them. Mappings lose the key;
            named tuples and dataclasses have None there. ``on_before_batch_transfer`` still sees the values.
            ``FastDataModule(drop_keys=...)`` drops them earlier, in the workers.

    Raises:
        SettingsError: if ``depth`` is not a positive integer, or ``host_keys`` or ``drop_keys`` is a plain string.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed import PrefetchCallback
        >>> trainer = Trainer(callbacks=[PrefetchCallback(host_keys=("meta",))], logger=False, accelerator="cpu")
    """

    @refuses_unknown_arguments
    def __init__(self, depth: int = 1, *, host_keys: tuple[str, ...] = (), drop_keys: tuple[str, ...] = ()) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise SettingsError(
                f"PrefetchCallback(depth={depth!r}): depth is the number of batches kept ready on the device, a whole "
                "number of 1 or more. To switch prefetching off, leave the callback out."
            )
        if isinstance(host_keys, str):
            raise SettingsError(
                f"PrefetchCallback(host_keys={host_keys!r}) would be read as a list of letters. Write ({host_keys!r},)."
            )
        super().__init__()
        self.depth = depth
        self.was_asked_for = True
        """False if LIGHTNING_FEED added this callback. Then no line says why it does nothing."""
        self.host_keys = tuple(host_keys)
        self.drop_keys = check_drop_keys(drop_keys, "PrefetchCallback")
        self._active = False
        self._was_active = False
        """Value of ``active`` in the training loop, restored after a validation within the fit."""
        self._device: torch.device | None = None
        self._stream: SideStream | None = None
        """The stream for copies to ``_device``. It outlives a run, and serves the next one on the same device."""
        self._run: _Run | None = None
        """The run in which this callback transfers the batches; None outside of one."""
        self._once = Once(logger)

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners, but a stream cannot be.
        return {**self.__dict__, "_device": None, "_stream": None, "_run": None}

    @property
    def active(self) -> bool:
        """True if the loop that runs now, or ran last, has its batches prefetched."""
        return self._active

    def open_stream(self, device: torch.device) -> SideStream | None:
        """Open the stream for copies. With None, the callback does nothing. Override for a device unknown to torch."""
        return open_stream(device)

    # --- begin and end ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to prefetch from the training loop's fetcher."""
        super().on_train_start(trainer, pl_module)
        self._begin(trainer, "fit")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prefetch from the new fetcher after loaders are reloaded. Runs resumed mid-epoch skip this hook."""
        super().on_train_epoch_start(trainer, pl_module)
        self._begin(trainer, "fit")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to prefetch from the fetcher of this validation, test or prediction."""
        self._begin(trainer, _host.stage_now(trainer))

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return to training after a validation inside a fit."""
        if trainer.state.fn == "fit":
            self._active = self._was_active

    def teardown(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Remove everything from the Trainer. Also runs as ``on_exception``, which no ``teardown`` follows."""
        check_instance(self, PrefetchCallback)
        if self._run is not None:
            self._run.end()
            self._run = None

    on_exception = teardown

    def _begin(self, trainer: Trainer, stage: RunStage) -> None:
        self._was_active = self._active
        self._active = False
        if self.drop_keys or self.host_keys:
            self._run_of(trainer)  # the step sees the same batches with and without prefetching
        device = trainer.strategy.root_device
        if self._stream is None or device != self._device:  # a callback may serve one Trainer after another
            self._stream = self.open_stream(device)
            self._device = device
        if self._stream is None:
            self._stand_aside(trainer, f"batches cannot be copied ahead of time on {device}")
            return
        tap = self._adopt_live(trainer)
        if tap is None:
            return
        tap.owner = self
        self._active = True
        self._run_of(trainer).begin_loop(stage, tap, self._stream)

    def _run_of(self, trainer: Trainer) -> "_Run":
        """Return the run that is under way. It begins with the first call."""
        if self._run is None:
            lean = LeanTransfer(
                drop_keys=frozenset(self.drop_keys),
                host_keys=frozenset(self.host_keys),
                warn=partial(self._once.say, trainer, logging.WARNING),
            )
            self._run = _Run(self, trainer, lean, refuse=partial(self._refuse, trainer))
        return self._run

    def _adopt_live(self, trainer: AnyTrainer) -> FetcherTap | None:
        """Prepare the running loop's fetcher for prefetching. Returns its tap; None if nothing can be prefetched."""
        tap = adopt_fetcher(_host.live_fetcher(trainer))
        if tap is None:
            keys = " (and drop_keys and host_keys do nothing there)" if self.drop_keys or self.host_keys else ""
            self._stand_aside(trainer, f"the step takes `dataloader_iter` and fetches for itself{keys}")
        elif tap.owner not in (None, self):
            logger.debug("Another PrefetchCallback of this Trainer is at work, so this one does nothing.")
        elif not tap.closed:  # else its loader yields device tensors, and an INFO line has said so
            return tap
        return None

    def _refuse(self, trainer: Trainer, tap: FetcherTap) -> None:
        """Stop prefetching from a loader that yields device tensors. The loop still gets the batches copied ahead."""
        tap.closed = True
        tap.owner = None
        self._active = False
        self._stand_aside(trainer, "the loader yields tensors that are on the device already")

    def _stand_aside(self, trainer: Trainer, why: str) -> None:
        if self.was_asked_for:
            self._once.say(trainer, logging.INFO, f"PrefetchCallback does nothing: {why}.")

    # --- the hooks in which it looks ahead ----------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Look ahead before a gradient scaler makes the host wait for the device in the optimizer step.

        Does nothing with manual optimisation: ``manual_backward`` calls this hook within ``training_step``, under
        autocast, and before the rest of the step has drawn its random numbers.
        """
        if pl_module.automatic_optimization:
            self._look_ahead_in("on_before_backward", step_pending=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Look ahead while the device still works on this step."""
        self._look_ahead_in("on_train_batch_end")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look ahead during validation, testing or prediction."""
        self._look_ahead_in(BATCH_ENDS[_host.stage_now(trainer)])

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _look_ahead_in(self, hook: str, *, step_pending: bool = False) -> None:
        if self._run is not None and self._run.looks_in.get(hook):
            self._run.look_ahead(step_pending=step_pending)


class _Run:
    """The transfer of all batches while a Trainer runs, from the first loop that needs it to the end of the run.

    A batch that is copied ahead comes here twice: from :meth:`look_ahead`, which prepares and copies it by Lightning's
    own functions, and from the loop, whose calls of these functions then only take the copy. Other batches come only
    from the loop. The copy that is taken is always that of the batch which the loop passes, because a loop takes the
    batches in the order in which they were drawn, and transfers each before it takes the next: ``_in_hand`` is set when
    the loop takes a batch, and is None again once ``transfer_batch_to_device`` has returned the copy.

    Args:
        callback: the callback, which owns the taps of the loops that are prefetched.
        trainer: the Trainer.
        lean: drops keys of each batch, and keeps others on the host.
        refuse: called with the tap of a loader from which nothing may be prefetched.
    """

    def __init__(
        self,
        callback: PrefetchCallback,
        trainer: AnyTrainer,
        lean: LeanTransfer,
        refuse: Callable[[FetcherTap], None],
    ) -> None:
        self._callback = callback
        self._trainer = trainer
        self._lean = lean
        self._refuse = refuse
        self._stream = SideStream()
        """The stream for copies; until a loop of the run is prefetched, one that does nothing."""
        self._prefetcher: Prefetcher | None = None
        """Copies batches; None until a loop is prefetched. From then on, all batches are copied on its stream."""
        self._is_staging = False
        """True while a batch is copied ahead of its step."""
        self._in_hand: CopiedBatch | None = None
        """The batch copied ahead that the loop has taken, but has not yet transferred."""
        self.looks_in: dict[str, bool] = {}
        """For each hook of the callback, True if the next batch is drawn in this hook."""
        self._wraps = _host.wrap_transfer(trainer, self._convert_input, self._batch_hook)

    def begin_loop(self, stage: RunStage, tap: FetcherTap, stream: SideStream) -> None:
        """Prefetch the batches of a stage's loop: choose the hook in which to look ahead.

        It is the earliest possible one, but after the user's code in the step. The callback's own hook is best, as it
        runs before the progress bar reads metrics off the device. But code of the user that runs later may change the
        next batch, or draw random numbers; then that code must run first.
        """
        tap.on_hand_out = self._take_over
        if self._prefetcher is None:
            self._stream = stream
            self._prefetcher = Prefetcher(stream)
        batch_end = BATCH_ENDS[stage]
        if batch_end in self.looks_in:
            return
        module = self._trainer.lightning_module
        callbacks = _host.callbacks_of(self._trainer)
        later = callbacks[callbacks.index(self._callback) + 1 :]
        is_noticed = _has_own_code([module, *later], [batch_end])
        self.looks_in[batch_end] = not is_noticed
        if stage == "fit":
            self.looks_in["on_before_backward"] = not is_noticed and self._may_look_before_backward(later)
        if is_noticed:
            self._wraps.append(_host.Wrap(module, batch_end, self._look_ahead_after))

    def _may_look_before_backward(self, later: list[Callback]) -> bool:
        """Return True if a gradient scaler makes the host wait in the step, and no code of the user runs until its
        end."""
        module = self._trainer.lightning_module
        others = [callback for callback in _host.callbacks_of(self._trainer) if callback is not self._callback]
        return (
            _host.has_grad_scaler(self._trainer)
            and not _has_own_code([module, *later], ["on_before_backward"])
            and not _has_own_code([module, *others], _AFTER_BACKWARD_BEGAN)
            and _host.optimizer_step_is_known(self._trainer)
        )

    def end(self) -> None:
        """Give Lightning its own functions back."""
        while self._wraps:
            self._wraps.pop().undo()
        self._in_hand = None

    # --- ahead of the step --------------------------------------------------------------------------------------------

    def _look_ahead_after(self, original: Original, *args: object, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.look_ahead()
        return result

    def look_ahead(self, *, step_pending: bool = False) -> None:
        """Draw the next batches from the running loop's fetcher, and copy them, until ``depth`` of them are ready."""
        fetcher = _host.live_fetcher(self._trainer)
        tap = tap_of(fetcher)
        depth = self._callback.depth
        if tap is None or tap.owner is not self._callback or len(tap.ahead) >= depth:
            return
        if self._trainer.training:
            depth = _host.train_batches_to_follow(self._trainer, at_most=depth, step_pending=step_pending)
        # After a step no graph is being captured: where code of the user ends a capture in a hook, we run after it.
        if not _has_room(fetcher, tap, depth) or (step_pending and self._stream.is_capturing()):
            return
        profiler = _host.profiler_of(self._trainer)
        profiler.start(LOOK_AHEAD)
        try:
            with traced("look_ahead"):
                while self._draw(tap) and _has_room(fetcher, tap, depth):
                    pass
        finally:
            profiler.stop(LOOK_AHEAD)

    def _draw(self, tap: FetcherTap) -> bool:
        """Draw one batch ahead and copy it to the device; False if no batch may be drawn before the loop takes one."""
        assert self._prefetcher is not None
        item = tap.look_ahead()
        if item.error is not None:
            return False
        batch, _, dataloader_idx = item.value
        self._check_first(tap, batch, dataloader_idx)
        if tap.closed:
            return False
        self._is_staging = True
        try:
            index = 0 if self._trainer.training else dataloader_idx
            item.staged = _host.transfer_early(self._trainer, self._prefetcher.stage, batch, index)
        finally:
            self._is_staging = False
        return True

    def _check_first(self, tap: FetcherTap | None, batch: object, dataloader_idx: int) -> None:
        """Do not prefetch from a loader that yields device tensors: it may overwrite a batch that is still in use.

        Examples are DALI and static buffers. Runs on each loader's first batch, before ``on_before_batch_transfer``,
        which may put tensors on the device.
        """
        if tap is None or tap.owner is not self._callback or dataloader_idx in tap.checked:
            return
        tap.checked.add(dataloader_idx)
        if off_host(batch):
            self._refuse(tap)

    # --- what Lightning calls on a batch ------------------------------------------------------------------------------

    def _take_over(self, item: Fetched) -> None:
        self._in_hand = item.staged
        if item.ahead:
            profiler = _host.profiler_of(self._trainer)
            profiler.start(HAND_OUT)
            profiler.stop(HAND_OUT)

    def _convert_input(self, original: Original, batch: object) -> Any:
        return original(batch) if self._in_hand is None else batch

    def _batch_hook(self, original: Original, name: str, batch: object, *args: Any) -> Any:
        """Replace Lightning's calls of transfer hooks. A batch in hand needs only ``on_after_batch_transfer``."""
        if name == "transfer_batch_to_device":
            return self._transfer(batch, lambda lean: original(name, lean, *args))
        if name == "on_before_batch_transfer":
            if self._in_hand is not None:
                return batch
            self._check_first(tap_of(_host.live_fetcher(self._trainer)), batch, args[0] if args else 0)
        return original(name, batch, *args)

    def _transfer(self, batch: object, copy: Callable[[object], object]) -> Any:
        copied = self._in_hand
        self._in_hand = None
        if copied is not None:
            assert self._prefetcher is not None
            return self._prefetcher.take(copied)
        if self._trainer.training or self._trainer.state.fn != "fit":
            self._lean.look(batch)  # validation inside a fit may have other keys than training
        send = partial(self._lean.send, copy=copy)
        if self._is_staging:
            return send(batch)
        tap = tap_of(_host.live_fetcher(self._trainer))
        if self._prefetcher is None or (tap is not None and tap.closed):
            with traced("transfer"):
                return send(batch)
        return self._prefetcher.pass_on(batch, send)  # on the side stream, like batches copied ahead


def _has_room(fetcher: object, tap: FetcherTap, depth: int) -> bool:
    """Return True if fewer than ``depth`` batches are ready, and the fetcher has another one."""
    return len(tap.ahead) < depth and more_to_draw(fetcher)


def _has_own_code(owners: Iterable[object], hooks: Iterable[str]) -> bool:
    """Return True if the user's code overrides any of the hooks, in the module or in a callback."""
    return any(_host.is_overridden(owner, hook) for owner in owners for hook in hooks)

"""What Lightning was set up to do that makes the host wait for the device in each step."""

from typing import Any


def known_syncs(trainer: Any) -> tuple[str, ...]:
    """Names of ``watch.verdict.diagnosis.SYNCS`` that apply to a running fit.

    - ``prog_bar``: a progress bar is on, and a metric on the device is logged with ``prog_bar=True``, which only shows
      once it was logged: ask after some steps. Each is converted by ``Tensor.item`` in every step, by
      ``ModelCheckpoint`` or the bar. Read in 2.4.0 and 2.6.6 (``logger_connector/result.py: metrics``,
      ``utilities/metrics: convert_tensors_to_scalars``).
    - ``grad_scaler``: the precision plugin has a GradScaler. Read in 2.4.0 and 2.6.6 (``plugins/precision/amp.py``).
    - ``sigterm_broadcast``: several ranks, in a version whose loop broadcasts SIGTERM before each batch and reads the
      answer by ``Tensor.item``: 2.6.6 does, 2.4.0 does not (``loops/training_epoch_loop.py: advance``).
    - ``throughput_monitor``: the callback is there. It calls ``torch.cuda.synchronize``, on CUDA only. Read in 2.4.0
      and 2.6.6 (``callbacks/throughput_monitor.py: _update``).
    """
    loop, on_device = trainer.fit_loop.epoch_loop, trainer.strategy.root_device.type != "cpu"
    applies = {
        "prog_bar": on_device and _bar_is_on(trainer) and any(map(_in_bar, _logged(loop))),
        "grad_scaler": getattr(trainer.precision_plugin, "scaler", None) is not None,
        "sigterm_broadcast": trainer.world_size > 1 and hasattr(loop, "_broadcast_sigterm_tensor"),
        "throughput_monitor": trainer.strategy.root_device.type == "cuda"
        and any(_is_a(callback, "ThroughputMonitor") for callback in trainer.callbacks),
    }
    return tuple(name for name, does in applies.items() if does)


def _logged(loop: Any) -> list[Any]:
    """What was logged in training steps. Read in 2.4.0 and 2.6.6 (``_ResultCollection``, a dict of metrics)."""
    return list(getattr(loop, "_results", {}).values())


def _in_bar(metric: Any) -> bool:
    meta, value = getattr(metric, "meta", None), getattr(metric, "value", None)
    device = getattr(value, "device", None)
    return bool(getattr(meta, "prog_bar", False)) and getattr(device, "type", "cpu") != "cpu"


def _bar_is_on(trainer: Any) -> bool:
    bar = trainer.progress_bar_callback
    return bar is not None and bool(getattr(bar, "is_enabled", True))


def _is_a(callback: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)

"""What to change between the steps, about the copy, and about a step that is fed."""

import re

from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.diagnosis import SYNCS, Cause, HookTime, Measurements, Remedy
from lightning_feed.watch.verdict.remedies_dali import dali_on_the_gpu
from lightning_feed.watch.verdict.remedies_data import loader_line, unused_keys
from lightning_feed.watch.verdict.remedies_images import nvjpeg_remedies
from lightning_feed.watch.verdict.remedies_uint8 import uint8_remedies
from lightning_feed.watch.verdict.shares import Shares

RARELY = 50
"""Steps between two runs of a hook, or of the logging, that is to cost less."""
FULL_SHARE = 0.8
"""Share of the queue that is full in the mean where workers could be given back."""
SPARE = 1.1
"""The loader is to be so much faster than the model, where workers are given back."""
NAMED_HOOKS = 2
PROFILE = 'trainer = Trainer(profiler="simple")'

Remedies = list[Remedy]


def framework_remedies(measured: Measurements, shares: Shares, cause: Cause) -> Remedies:
    """The dearest hooks less often; nothing that waits for the device in each step."""
    facts, hooks = measured.facts, measured.hooks
    remedies = [_rarer(measured, shares, hook) for hook in hooks[:NAMED_HOOKS]]
    if not hooks:
        remedies.append(
            Remedy(
                code=PROFILE,
                why="names the callback or hook that takes the time between the steps",
                predicted_step_ms=predict.without(shares, measured.stats.other_ms),
            )
        )
    waits = [way for way in map(_way_out, facts.syncs) if way is not None] if facts.device_type != "cpu" else []
    if cause == "synchronisation":
        return waits + remedies
    named = sum(hook.ms_per_step for hook in hooks)
    if hooks and named < (measured.stats.other_ms or 0.0) / 2:
        remedies.append(
            Remedy(
                code=f"trainer = Trainer(log_every_n_steps={RARELY})",
                why="most of the time between the steps is in no hook: loggers are called there",
                changes=f"log_every_n_steps={RARELY}",
            )
        )
    return remedies + waits


def copy_remedies(measured: Measurements, shares: Shares, cause: Cause) -> Remedies:
    """Pin, overlap, shrink; where it is decoding and not the copy, overlap or decode elsewhere."""
    facts, stats = measured.facts, measured.stats
    at_best = predict.without(shares, stats.h2d_ms)
    dali = facts.dali_device is not None
    if facts.device_type == "cpu":
        return (
            []
            if dali or facts.backend not in (None, "torch")  # encoded images: collate and the hook are our own there
            else [
                Remedy(
                    code="def collate(self, samples, split): ...",
                    why="nothing is copied on the CPU: do the work of the transfer hooks in the workers",
                    predicted_step_ms=at_best,
                    changes="collate",
                )
            ]
        )
    if cause == "decoding on the GPU":
        return _prefetch(measured, "decodes the next batch while this one computes", at_best) + nvjpeg_remedies(facts)
    remedies = dali_on_the_gpu(facts)
    if facts.pin_memory is False:
        remedies.append(
            Remedy(
                code=loader_line(facts, pin_memory=True),
                why="a copy from pageable memory makes the host wait and does not overlap",
                predicted_step_ms=predict.with_pinned(measured, shares),
                changes="pin_memory=True",
            )
        )
    if cause == "small tensors" and stats.prefetch_active:
        remedies.append(
            Remedy(
                code="PrefetchCallback(pack_small=True)",
                why="many small tensors are copied as one",
                predicted_step_ms=at_best,
                changes="pack_small=True",
            )
        )
    if facts.dali_device != "cuda":  # there it would stand aside
        remedies += _prefetch(measured, "copies the next batch while this one computes", at_best)
    remedies += uint8_remedies(facts, "uint8 travels in a quarter of the bytes")
    return remedies + ([] if dali else unused_keys(measured))


def _prefetch(measured: Measurements, why: str, predicted: float | None) -> Remedies:
    if measured.stats.prefetch_active:
        return []
    return [
        Remedy(
            code="trainer = Trainer(callbacks=[PrefetchCallback(), GPUStarvationCallback()])",
            why=why,
            predicted_step_ms=predicted,
            changes="prefetch_callback=True",
        )
    ]


def compute_remedies(measured: Measurements, shares: Shares, cause: Cause) -> Remedies:
    """A fed device: workers to give back, and fewer launches where those are the limit."""
    remedies = []
    if cause == "launch":
        remedies.append(
            Remedy(
                code='model.compile(mode="reduce-overhead")',
                why="one launch for many operations (CUDA graphs)",
                changes="compile",
            )
        )
    fewer = _workers_needed(measured)
    if fewer is not None:
        loaders, workers = measured.loaders, measured.facts.num_workers
        remedies.append(
            Remedy(
                code=loader_line(measured.facts, num_workers=fewer),
                why=f"{workers - fewer if workers else 0} of {workers} workers could be given back: "
                f"{loaders.queue_ready:.1f} of {loaders.queue_capacity:.0f} batches are ready in the mean",
                predicted_step_ms=shares.step_ms,
                changes=f"num_workers={fewer}",
            )
        )
    return remedies


def _workers_needed(measured: Measurements) -> int | None:
    """Fewer workers that would do: by the rates of loader and model, else half of them. None: none to give back."""
    loaders, found, workers = measured.loaders, measured.experiments, measured.facts.num_workers
    ready, capacity = loaders.queue_ready, loaders.queue_capacity
    if not workers or workers < 2 or ready is None or not capacity or ready < FULL_SHARE * capacity:
        return None
    fewer = (workers + 1) // 2
    if found is not None and found.model_per_s and found.loader_per_s:
        fewer = max(1, int(-(-workers * SPARE * found.model_per_s // found.loader_per_s)))
    return fewer if fewer < workers else None


def _rarer(measured: Measurements, shares: Shares, hook: HookTime) -> Remedy:
    saved = min(hook.ms_per_step, measured.stats.other_ms or 0.0) * (1 - 1 / RARELY)
    predicted = predict.without(shares, saved)
    name = re.sub(r"\{.*\}", "", hook.name)  # Lightning puts a callback's settings into its name
    code = f"if trainer.global_step % {RARELY}: return"
    changes = f"{name} every {RARELY} steps"
    if "]ModelCheckpoint." in name:
        code, changes = f"ModelCheckpoint(every_n_train_steps={RARELY})", f"every_n_train_steps={RARELY}"
    elif "ProgressBar." in name:
        code, changes = f"TQDMProgressBar(refresh_rate={RARELY})", f"refresh_rate={RARELY}"
    return Remedy(
        code=code,
        why=f"{name} takes {hook.ms_per_step:.2f} ms a step: do it less often",
        predicted_step_ms=predicted,
        changes=changes,
    )


def _way_out(sync: str) -> Remedy | None:
    ways = {
        "prog_bar": 'self.log("loss", loss, prog_bar=False)',
        "grad_scaler": 'trainer = Trainer(precision="bf16-mixed")',
        "sigterm_broadcast": "trainer = Trainer(devices=1)",
        "throughput_monitor": "trainer = Trainer(callbacks=[GPUStarvationCallback()])",
    }
    if sync not in ways:
        return None
    why = SYNCS[sync]
    if sync == "sigterm_broadcast":
        why = f"to compare: {why}, and has no switch for it"
    elif sync == "grad_scaler":
        why = f"{why}; bf16 needs no scaler"
    return Remedy(code=ways[sync], why=why, changes=f"{sync}=False")

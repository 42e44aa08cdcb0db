"""What a project trains on, written down by a callback that Lightning adds to every Trainer.

The folder of this file is on ``PYTHONPATH`` when a project runs: its entry points bring the callback into programs that
know nothing of it, in other ranks and in a notebook's kernel too. ``ZOO_OUT`` is the folder for the record of each
rank, ``ZOO_STEPS`` the number of batches after which training stops, ``ZOO_DIGESTS`` how many batches are looked at.
"""

import hashlib
import json
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOADER_SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "in_order")


def callbacks() -> list[Any]:
    from lightning.pytorch import Callback

    return _recorders(Callback)


def pl_callbacks() -> list[Any]:
    from pytorch_lightning import Callback

    return _recorders(Callback)


def _recorders(base: type) -> list[Any]:
    if "ZOO_OUT" not in os.environ:
        return []
    return [type("ZooRecorder", (_Records, base), {})()]


def leaves(batch: Any) -> Iterator[Any]:
    """Tensors, numbers and strings of any batch."""
    if isinstance(batch, Mapping):
        for key in batch:
            yield from leaves(batch[key])
    elif isinstance(batch, (list, tuple)):
        for one in batch:
            yield from leaves(one)
    elif hasattr(batch, "to_dict"):
        yield from leaves(batch.to_dict())
    else:
        yield batch if isinstance(batch, (Tensor, str, type(None))) else torch.as_tensor(batch)


def is_measured(leaf: Any) -> bool:
    """Whether a leaf holds what was measured: floats, or pixels. The rest says which samples they are."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or (leaf.dtype == torch.uint8 and leaf.dim() > 2))


def digest(several: Iterator[Any]) -> str:
    """Of the values, types and shapes of leaves."""
    sha = hashlib.sha1(usedforsecurity=False)
    for leaf in several:
        if isinstance(leaf, Tensor):
            sha.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            sha.update(leaf.detach().cpu().numpy().tobytes())
        else:
            sha.update(repr(leaf).encode())
    return sha.hexdigest()


def scale(several: Iterator[Any]) -> list[tuple[float, float]]:
    """Mean and standard deviation of each tensor that was measured."""
    floats = [leaf.detach().float() for leaf in several if is_measured(leaf) and leaf.numel() > 1]
    return [(float(leaf.mean()), float(leaf.std())) for leaf in floats]


def pipeline_of(loader: Any) -> list[Any]:
    """The loader, or what a WebLoader is made of: a loader, and what is done with its batches."""
    pipeline: list[Any] = getattr(loader, "pipeline", [loader])
    return pipeline


class _Records:
    """Mixed into the Callback of whichever Lightning trains."""

    def __init__(self) -> None:
        self.steps, self.digests = int(os.environ["ZOO_STEPS"]), int(os.environ.get("ZOO_DIGESTS", "1000"))
        self.began = time.perf_counter()
        self.ends: list[float] = []
        self.batches: list[dict[str, Any]] = []
        self.weights = self.error = ""
        self.hooks: list[Any] = []
        self.settings: dict[str, list[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"hooks": []}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, child in pl_module.named_children():
            self.hooks.append(child.register_forward_pre_hook(self._input_of(name), with_kwargs=True))

        loaders = [pipeline_of(loader)[0] for loader in trainer.fit_loop._combined_loader.flattened]
        self.settings = {name: [getattr(one, name, None) for one in loaders] for name in LOADER_SETTINGS}
        self.settings["log_every_n_steps"] = [trainer.log_every_n_steps]

    def _input_of(self, name: str) -> Any:
        """Notes what a part of the model is given first in each step."""

        def note(module: Any, args: Any, kwargs: Any) -> None:
            if module.training and self.batches and len(self.ends) < self.digests:
                self.batches[-1]["inputs"].setdefault(name, scale(leaves([args, kwargs])))

        return note

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if len(self.ends) >= self.digests:
            return
        flat = list(leaves(batch))
        self.batches.append(
            {
                "epoch": trainer.current_epoch,
                "whole": digest(iter(flat)),
                "samples": digest(leaf for leaf in flat if not is_measured(leaf)),
                "scale": scale(iter(flat)),
                "inputs": {},
            }
        )

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) >= self.steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.weights = digest(iter(pl_module.state_dict().values()))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.error = f"{type(exception).__name__}: {exception}"

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        out = Path(os.environ["ZOO_OUT"])
        record = {key: getattr(self, key) for key in ("batches", "weights", "error", "settings")}
        record["ends"] = [end - self.began for end in self.ends]
        record["report"] = None
        ours = [one for one in trainer.callbacks if type(one).__name__ == "GPUStarvationCallback"]
        if ours:
            found = ours[0].report()
            record["report"] = {
                "bottleneck": found.bottleneck,
                "cause": found.cause,
                "step_ms": found.stats.step_ms,
                "remedies": [asdict(one) for one in found.remedies],
            }
            (out / f"rank{trainer.global_rank}.pickle").write_bytes(pickle.dumps(found.measurements))
        written = out / f"{trainer.global_rank}.part"
        written.write_text(json.dumps(record))
        written.rename(out / f"rank{trainer.global_rank}.json")

"""Resuming from a checkpoint of any place, changed or not, beside the run that was never interrupted.

``benchmarks/faults.py`` tries many more of these cases.
"""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import in_gate
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from recording import NullStreamPrefetch, Numbers, end_workers
from resuming import run
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.callbacks.exact_resume import ExactResume
from lightning_feed.errors import ResumeError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Lightning, on odd combinations
]
EPOCHS = 3


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class ShuffledBatches(BatchSampler):
    """A batch sampler with a state of its own: it draws the order of each epoch from a generator that goes on."""

    def __init__(self, samples: int, batch_size: int, drop_last: bool) -> None:
        super().__init__(range(samples), batch_size, drop_last)
        self.own = seeded(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.sampler), generator=self.own).tolist()  # type: ignore[arg-type]
        yield from BatchSampler(order, self.batch_size, self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.set_state(state["own"])


@dataclass(frozen=True)
class Case:
    """One run, the place of its checkpoint, and what is different when it goes on."""

    sampler: str
    samples: int
    size: int
    drop_last: bool
    validated: bool
    loader: dict[str, Any]
    prefetched: bool
    accumulate: int
    place: str
    ranks: int = 1
    limits: dict[str, Any] = field(default_factory=dict)


class Data(FastDataModule):
    def __init__(self, case: Case) -> None:
        self.case = case
        super().__init__(case.size, loader=LoaderSettings(seed=4, drop_last=case.drop_last, **case.loader))

    def make_dataset(self, split: str) -> Any:
        if split == "train":
            return Numbers(self.case.samples)
        return Numbers(2, first=1000) if self.case.validated and split == "val" else None

    def sampler(self, dataset: Any, split: str) -> Any:
        if split != "train":
            return None
        weights = [1.0 + sample % 3 for sample in range(self.case.samples)]
        makers = {
            "sequential": lambda: SequentialSampler(dataset),
            "generator": lambda: RandomSampler(dataset, generator=seeded(6)),
            "weighted": lambda: WeightedRandomSampler(weights, len(weights)),
            "weighted, generator": lambda: WeightedRandomSampler(weights, len(weights), generator=seeded(6)),
        }
        return makers.get(self.case.sampler, lambda: None)()


def source(case: Case) -> dict[str, Any]:
    if case.sampler != "batches":
        return {"datamodule": Data(case)}
    loader = FeedLoader(
        Numbers(case.samples),
        batch_sampler=ShuffledBatches(case.samples, case.size, case.drop_last),
        order=EpochOrder(seed=4, epoch=lambda: 0),
        num_workers=case.loader["num_workers"],
    )
    validation = FeedLoader(Numbers(2, first=1000), batch_size=2) if case.validated else None
    return {"train_dataloaders": loader, "val_dataloaders": validation}


class SignalAt(Callback):
    """Sends this process a signal in the middle of a batch."""

    def __init__(self, batch: int, number: int = signal.SIGTERM) -> None:
        self.left, self.number = batch, number

    def on_train_batch_start(self, *args: Any) -> None:
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        self.left -= 1


def saving(case: Case, folder: Path) -> list[Callback]:
    """The callbacks that write the checkpoints of this place."""
    if case.place == "SIGTERM":
        return [OnExceptionCheckpoint(folder)]
    options: dict[str, Any] = {
        "every_n_train_steps": {"every_n_train_steps": 1, "filename": "{epoch}-{step}"},
        "on_validation_end": {"monitor": "val_loss", "save_on_train_epoch_end": False},
        "on_train_epoch_end": {"save_on_train_epoch_end": True},
        "save_last": {"save_last": True, "every_n_train_steps": 2},
    }[case.place]
    return [ModelCheckpoint(folder, save_top_k=0 if case.place == "save_last" else -1, **options)]


class Notes(Callback):
    """Writes down the epoch and the number of each batch, and its samples; a line a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = [trainer.current_epoch, batch_idx, [int(row[0]) for row in batch]]
        with (self.folder / f"rank{trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


Trained = list[tuple[int, int, list[int]]]
"""Epoch, number of the batch in it, samples of all ranks."""


def go(case: Case, extra: list[Callback], folder: Path, **options: Any) -> Trained:
    """Train, and tell what was trained."""
    folder.mkdir(parents=True)
    ours: list[Callback] = [NullStreamPrefetch()] if case.prefetched else []
    if case.sampler == "batches" and not ours:
        ours = [ExactResume()]
    fit: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": case.accumulate,
        "enable_checkpointing": bool(extra),
        "limit_val_batches": 1.0 if case.validated else 0.0,
        "num_sanity_val_steps": 0,
        **case.limits,
    }
    if case.ranks > 1:
        fit |= {"strategy": "ddp_fork", "devices": case.ranks}
    run(lambda: source(case), [*ours, Notes(folder), *extra], **fit, **options)
    return read(folder)


def read(folder: Path) -> Trained:
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank*"))]
    return [
        (ranks[0][0], ranks[0][1], [sample for rank in ranks for sample in rank[2]])
        for ranks in zip(*lines, strict=True)
    ]


def by_epoch(trained: Trained) -> dict[int, list[int]]:
    epochs: dict[int, list[int]] = {}
    for epoch, _, samples in trained:
        epochs.setdefault(epoch, []).extend(samples)
    return epochs


def draw_case(draw: random.Random, ranks: int, *, alone: bool) -> Case:
    samplers = ["default", "default", "generator", "weighted", "weighted, generator"]
    sampler = draw.choice([*samplers, "batches"] if alone else samplers)
    workers = draw.choice([0, 0, 0, 1, 2, 3])
    loader: dict[str, Any] = {"num_workers": workers}
    if sampler != "batches":
        if draw.random() >= 0.8 and sampler == "default":
            sampler = "sequential"
        if workers and draw.random() < 0.5:
            loader["workers"] = "thread"
        elif draw.random() < 0.2:
            loader["background"] = 2
    validated = draw.random() < 0.5
    places = ["every_n_train_steps", "on_train_epoch_end", "save_last"]
    places += ["on_validation_end"] * validated + ["SIGTERM"] * alone
    limits: list[dict[str, Any]] = [{"val_check_interval": 0.5}, {"max_epochs": -1, "max_steps": 11}]
    return Case(
        sampler=sampler,
        samples=draw.randint(12, 60) if alone else draw.randint(48, 80),
        size=draw.randint(1, 9),
        drop_last=alone and draw.random() < 0.3,
        validated=validated,
        loader=loader,
        prefetched=draw.random() < 0.5,
        accumulate=draw.choice([1, 1, 2, 3]),
        place=draw.choice(places),
        ranks=ranks,
        limits=draw.choice([{}, {}, *limits, {"limit_train_batches": 2}]),
    )


def change(case: Case, draw: random.Random, ranks: int) -> Case:
    """The configuration in which the run goes on, often the same."""
    case = replace(case, ranks=ranks)
    kind = draw.choice(["nothing", "nothing", "nothing", "size", "samples", "workers"])
    if kind == "size":
        return replace(case, size=draw.choice([size for size in range(1, 13) if size != case.size]))
    if kind == "samples":
        return replace(case, samples=draw.choice([case.samples * 3 // 4, case.samples + 7, case.samples * 2]))
    if kind == "workers":
        return replace(case, loader={**case.loader, "num_workers": draw.randint(0, 3), "workers": "process"})
    return case


def check(seed: int, tmp_path: Path, ranks: tuple[int, int] = (1, 1)) -> str:
    """Train, resume from one of the checkpoints, and compare; the outcome in a word."""
    draw = random.Random(seed)
    case = draw_case(draw, ranks[0], alone=ranks == (1, 1))
    changed = change(case, draw, ranks[1])
    saved = tmp_path / "saved"
    if case.place == "SIGTERM":
        whole = go(case, [], tmp_path / "whole")
        with suppress(SystemExit):
            go(case, [*saving(case, saved), SignalAt(draw.randrange(len(whole)))], tmp_path / "ended")
        end_workers()
    else:
        whole = go(case, saving(case, saved), tmp_path / "whole")
    found = sorted(saved.glob("*.ckpt"))
    if not found:
        return "no checkpoint"  # fewer steps than it saves after
    path = draw.choice(found)
    progress = torch.load(path, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    trained = progress["total"]["processed"]
    # Another program's signal handler, as Ray's, ends a batch in its middle, which is to be trained again then.
    current = progress["current"]
    over = progress["is_last_batch"] and current["ready"] == current["processed"]
    in_mid_epoch = current["processed"] > 0 and not over
    same = replace(changed, loader=case.loader) == case
    what = (seed, case, changed, path.name, trained)
    try:
        after = go(changed, [], tmp_path / "after", ckpt_path=path)
    except Exception as error:  # ranks raise what their launcher makes of it
        if not isinstance(error, ResumeError) and "errors.ResumeError" not in str(error):
            raise
        end_workers()
        assert in_mid_epoch, what
        assert not same, what
        return "refused"
    if same:
        assert after == whole[trained:], (*what, after, whole[trained:])
        return "same"
    assert not in_mid_epoch or not after, what
    check_changed(changed, whole[:trained], after, what)
    return "changed"


def check_changed(changed: Case, before: Trained, after: Trained, what: Any) -> None:
    """Check that each epoch after the checkpoint is a whole one, in an order of its own."""
    old, new = by_epoch(before), by_epoch(after)
    limited = "limit_train_batches" in changed.limits
    for epoch, samples in new.items():
        times = Counter(samples)
        assert set(times) <= set(range(changed.samples)), (*what, epoch, times)
        repeated = times.total() - len(times)
        if not changed.sampler.startswith("weighted"):
            assert repeated < changed.ranks, (*what, epoch, times)
        cut = limited or ("max_steps" in changed.limits and epoch == max(new))
        if not cut:
            dropped = changed.size * changed.ranks - 1 if changed.drop_last else 0
            assert 0 <= changed.samples + changed.ranks - 1 - times.total() < changed.ranks + dropped, (*what, epoch)
    orders = [tuple(samples) for epoch, samples in [*old.items(), *new.items()] if len(samples) > 8]
    if changed.sampler != "sequential":
        assert len(set(orders)) == len(orders), (*what, orders)


def draw_ranks(seed: int) -> tuple[int, int]:
    """The ranks of the first run, and of the resumed one."""
    return random.Random(-seed).choice([(2, 2), (2, 2), (3, 3), (1, 2), (2, 1)])


@pytest.mark.parametrize("seed", in_gate(range(6), range(3)))
def test_a_random_run_on_one_rank_resumes_correctly_or_is_refused(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.parametrize("seed", in_gate(range(2), [0]))
def test_a_random_run_on_several_ranks_resumes_correctly_or_is_refused(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, draw_ranks(seed))

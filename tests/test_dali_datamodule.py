"""DaliDataModule in a Trainer: passes that are broken off, orders, last batches and memory."""

import copy
import gc
import os
import pickle
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from recording import NullStreamPrefetch, Recording, assert_same_run, quiet_trainer

from lightning_feed import GPUStarvationCallback, diagnose

pytest.importorskip("nvidia.dali")

from dali_numbers import VAL, DaliNumbers, Defined, decoded, flat, numbers, write_files
from nvidia.dali import Pipeline, fn

from lightning_feed.data.dali import DaliDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]


def seen(model: Recording, hook: str = "training_step") -> list[list[int]]:
    return [[int(row[0]) for row in event[-1]] for event in model.events if event[0] == hook]


def joined(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def fit(module: DaliDataModule, model: Recording | None = None, callbacks: Any = (), **options: Any) -> Recording:
    model = model or Recording()
    quiet_trainer(list(callbacks), **options).fit(model, datamodule=module)
    return model


# --- the form of a batch ------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["image", "label"])


def test_a_tuple(class_folders: Path) -> None:
    images, labels = next(iter(Defined(lambda module: decoded(module, class_folders)).train_dataloader()))
    assert images.shape == (4, 8, 10, 3)
    assert images.dtype == torch.uint8
    assert images.device.type == labels.device.type == "cpu"
    assert labels.tolist() == [[0]] * 4


@pytest.mark.parametrize(
    "form",
    [
        lambda image, label: {"image": image, "target": {"label": label}},
        lambda image, label: Pair(image, label),
        lambda image, label: [image, (label, image)],
        lambda image, label: image,
    ],
)
def test_other_forms(form: Any, class_folders: Path) -> None:
    module = Defined(lambda module: form(*decoded(module, class_folders)))
    batch = next(iter(module.train_dataloader()))
    expected = form(torch.empty(4, 8, 10, 3), torch.empty(4, 1))
    shapes = torch.utils._pytree.tree_map(lambda value: value.shape, batch)
    assert shapes == torch.utils._pytree.tree_map(lambda value: value.shape, expected)
    assert type(batch) is type(expected)


# --- passes -------------------------------------------------------------------------------------------------------


def test_fit_validate_test_and_predict(tmp_path: Path) -> None:
    module, model = DaliNumbers(tmp_path, train=7, val=5), Recording()
    trainer = quiet_trainer([], max_epochs=2)
    trainer.fit(model, datamodule=module)
    for epoch in range(2):
        assert sorted(joined(seen(model)[4 * epoch : 4 * epoch + 4])) == list(range(7))
    for hook, run in (("validation_step", trainer.validate), ("test_step", trainer.test)):
        model.events.clear()
        run(model, datamodule=module, verbose=False)
        assert joined(seen(model, hook)) == list(range(VAL, VAL + 5))
    model.events.clear()
    trainer.predict(model, datamodule=module)
    assert joined(seen(model, "predict_step")) == list(range(VAL, VAL + 5))
    again = fit(module, max_epochs=1)
    assert sorted(joined(seen(again))) == list(range(7))


def test_epochs_that_are_broken_off_go_on(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, train=12)
    model = fit(module, max_epochs=6, limit_train_batches=2)
    halves = [joined(seen(model)[start : start + 6]) for start in (0, 6)]
    assert [sorted(half) for half in halves] == [list(range(12))] * 2
    assert halves[0] != halves[1]
    assert module.made.count("train") == 2  # once to see that there is the split, once to build it


def test_a_pass_that_is_broken_off_by_hand(tmp_path: Path) -> None:
    loader = DaliNumbers(tmp_path, train=11).train_dataloader()
    first = [next(iter(loader)) for _ in range(3)]
    batches = list(loader)
    assert len(batches) == 6
    assert sorted(flat(first + batches[:3])) == list(range(11))  # the rest, then the next epoch of the reader
    with pytest.raises(StopIteration):
        next(iter([]))
    old = iter(loader)
    iter(loader)
    with pytest.raises(RuntimeError, match="closed before its end"):
        next(old)


def test_max_steps_and_a_validation_in_mid_epoch(tmp_path: Path) -> None:
    model = fit(DaliNumbers(tmp_path, train=12, val=3), max_epochs=-1, max_steps=8, val_check_interval=2)
    assert sorted(joined(seen(model)[:6])) == list(range(12))
    assert len(seen(model)) == 8
    validated = joined(seen(model, "validation_step"))
    assert validated[:3] * (len(validated) // 3) == validated
    assert len(validated) == 5 * 3  # the sanity check, and four


def test_validations_that_are_broken_off_see_the_same_samples(tmp_path: Path) -> None:
    for keep in (False, True):
        module = DaliNumbers(tmp_path, train=4, val=10, keep=keep)
        model = fit(module, max_epochs=3, limit_val_batches=2, num_sanity_val_steps=1)
        assert seen(model, "validation_step") == [[VAL, VAL + 1], *[[VAL, VAL + 1], [VAL + 2, VAL + 3]] * 3]


def test_overfitting_sees_the_same_batches(tmp_path: Path) -> None:
    model = fit(DaliNumbers(tmp_path, train=12), max_epochs=3, overfit_batches=2)
    assert seen(model) == [[0, 1], [2, 3]] * 3


def test_loaders_that_are_reloaded(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, train=6)
    model = fit(module, max_epochs=4, reload_dataloaders_every_n_epochs=2)
    epochs = [joined(seen(model)[start : start + 3]) for start in (0, 3, 6, 9)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 4
    assert epochs[0] != epochs[2]


@pytest.mark.parametrize(("last", "sizes"), [("partial", [3, 3, 1]), ("drop", [3, 3]), ("fill", [3, 3, 3])])
def test_the_last_batch(last: Any, sizes: list[int], tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, 3, train=7, val=7, last_batch=last, eval_last_batch=last)
    for loader in (module.train_dataloader(), module.val_dataloader()):
        assert len(loader) == len(sizes)
        for _ in range(3):
            batches = numbers(loader)
            assert [len(batch) for batch in batches] == sizes
            assert len(set(joined(batches))) == min(7, sum(sizes))


def test_evaluation_has_a_batch_size_of_its_own(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, 3, train=7, val=7, eval_batch_size=5)
    assert len(module.train_dataloader()) == 3
    assert [len(batch) for batch in module.test_dataloader()] == [5, 2]


# --- orders -------------------------------------------------------------------------------------------------------


def order(folder: Path, **options: Any) -> list[list[float]]:
    model = fit(DaliNumbers(folder, noise=True, **options), max_epochs=3)
    return [event[-1] for event in model.events if event[0] == "training_step"]


def test_the_seed_decides_the_order_and_the_draws(tmp_path: Path) -> None:
    first, again, other = (order(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [int(value) for value in joined(joined(first))] != [int(value) for value in joined(joined(other))]
    draws = [{value % 1 for value in joined(joined(one))} for one in (first, other)]
    assert len(draws[0] & draws[1]) < len(draws[0]) / 2
    assert len({str(first[start : start + 7]) for start in (0, 7, 14)}) == 3


def test_seed_everything_is_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that it is taken back after the test
    runs = []
    for seed in (5, 5, 6):
        seed_everything(seed, verbose=False)
        runs.append(order(tmp_path))
    assert runs[0] == runs[1] != runs[2]


def test_an_order_of_ones_own(tmp_path: Path) -> None:
    files = write_files(tmp_path, 5)
    module = Defined(lambda module: fn.readers.file(files=files, **module.reader(shuffle=False)), 2)
    for _ in range(2):
        assert joined([labels.flatten().tolist() for _, labels in module.train_dataloader()]) == list(range(5))


def test_the_whole_set_shuffled_after_each_epoch(tmp_path: Path) -> None:
    """A way of readers.file that excludes DALI's own shuffling."""
    files = write_files(tmp_path, 9)
    module = Defined(
        lambda module: fn.readers.file(files=files, shuffle_after_epoch=True, **module.reader(shuffle=False)), 2
    )
    loader = module.train_dataloader()
    epochs = [joined([labels.flatten().tolist() for _, labels in loader]) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(9))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_two_readers_go_in_step(tmp_path: Path) -> None:
    files = write_files(tmp_path, 9)

    def define(module: Any) -> Any:
        _, first = fn.readers.file(files=files, **module.reader("images"))
        _, second = fn.readers.file(files=files, labels=list(range(100, 109)), **module.reader("masks"))
        return first, second

    loader = Defined(define, 2).train_dataloader()
    for _ in range(2):
        for first, second in loader:
            assert torch.equal(first + 100, second)


# --- memory -------------------------------------------------------------------------------------------------------


class Watches(Recording):
    """Notes whether there is a pipeline of a split."""

    def __init__(self, module: DaliNumbers) -> None:
        super().__init__()
        self.module = module
        self.built: list[tuple[str, bool, bool]] = []

    def look(self, where: str) -> None:
        loaders = self.module._dali.loaders
        self.built.append((where, loaders["train"].built, loaders["val"].built))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look("train")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.look("val")


@pytest.mark.parametrize(
    ("keep", "limit", "callbacks"),
    [(False, 2, list), (False, 1.0, lambda: [NullStreamPrefetch()]), (True, 1.0, list)],
)
def test_evaluation_pipelines_live_while_they_run(keep: bool, limit: Any, callbacks: Any, tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, train=4, val=10, keep=keep)
    model = fit(module, Watches(module), callbacks(), max_epochs=2, limit_val_batches=limit)
    assert {built for built in model.built if built[0] == "train"} == {("train", True, keep)}
    while_validating = [built for built in model.built if built[0] == "val"]
    assert ("val", True, True) in while_validating
    if keep:
        assert set(while_validating) == {("val", True, True)}
    assert module._dali.loaders == {}  # all were freed with the fit


def test_training_lives_and_evaluation_is_rebuilt(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, train=4, val=4)
    fit(module, max_epochs=3)
    # Asked for once each; then one training pipeline, and for validation one to learn the length and one a pass.
    assert module.made.count("train") == 2
    assert module.made.count("val") == 2 + 4


def test_an_evaluation_ends_with_its_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning asks for as many batches as the loader is long, and for no end. None is made beyond the last."""
    loader = DaliNumbers(tmp_path, val=9).val_dataloader()
    assert len(loader) == 5
    runs, run = [], Pipeline._run_once
    monkeypatch.setattr(Pipeline, "_run_once", lambda pipeline: (runs.append(1), run(pipeline)))
    batches = iter(loader)
    seen_built = [(next(batches), loader.built)[1] for _ in range(5)]
    assert seen_built == [True] * 4 + [False]
    assert len(runs) == 5 - 2  # two were begun with the first


def test_rebuilding_does_not_grow(class_folders: Path) -> None:
    def define(module: DaliDataModule) -> Any:
        return decoded(module, class_folders)

    module = Defined(define)
    trained, validated = module.train_dataloader(), module.val_dataloader()
    next(iter(trained))
    _validate(validated, 10)  # fills allocators and caches
    resident, threads = _resident_kb(), _threads()
    _validate(validated, 50)
    assert _resident_kb() - resident < 4096
    assert _threads() == threads


def _validate(loader: Any, times: int) -> None:
    for _ in range(times):
        assert len(list(loader)) == 3
        assert not loader.built


def _resident_kb() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def _threads() -> int:
    """Of the process, with those that Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_pipeline_in_a_forked_process(tmp_path: Path) -> None:
    """Its threads are not there: freeing it, or waiting for a batch, would never end."""
    kept, dropped = (DaliNumbers(tmp_path, train=5).train_dataloader() for _ in range(2))
    for loader in (kept, dropped):
        next(iter(loader))
    del loader, dropped
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        gc.collect()
        os._exit(0 if len(list(kept)) == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(kept)) == 3


# --- other callbacks ----------------------------------------------------------------------------------------------


class Doubles(DaliNumbers):
    def device_transform(self, batch: Any, split: str) -> Any:
        return batch * (2 if split == "train" else 3)


def test_device_transform(tmp_path: Path) -> None:
    for callbacks in ([], [NullStreamPrefetch()]):
        model = fit(Doubles(tmp_path, train=3, val=2), None, callbacks, max_epochs=1)
        assert sorted(joined(seen(model))) == [0, 2, 4]
        assert joined(seen(model, "validation_step")) == [3 * VAL, 3 * (VAL + 1)] * 2


def test_prefetching_changes_nothing(tmp_path: Path) -> None:
    assert_same_run(lambda: {"datamodule": DaliNumbers(tmp_path, train=9, val=3, noise=True)})
    assert_same_run(lambda: {"datamodule": Doubles(tmp_path, train=9)}, limit_train_batches=3, max_epochs=3)


def test_starvation_and_diagnosis(tmp_path: Path) -> None:
    callback = GPUStarvationCallback(every_n_steps=2, report=False)
    module = DaliNumbers(tmp_path, train=40)
    fit(module, None, [callback], max_epochs=1)
    assert callback.summary() is not None
    found = callback.report()
    assert found is not None
    facts = found.measurements.facts
    assert (facts.dali_device, facts.dali_threads, facts.dali_prefetch, facts.batch_size) == ("cpu", 1, 2, 2)


def test_diagnose(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, train=40, val=4, prefetch=3)
    found = diagnose(quiet_trainer([]), Recording(), module, quick=True, budget_s=3)
    assert found.measurements.facts.dali_prefetch == 3


def test_the_report(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path)
    assert module.loader_report() == "No loader has been made yet."
    module.train_dataloader()
    assert module.loader_report() == (
        "train: DALI on the CPU, threads=1, prefetch=2, batch_size=2, share 1 of 1, last_batch='partial'"
    )


def test_copies_have_pipelines_of_their_own(tmp_path: Path) -> None:
    module = DaliNumbers(tmp_path, seed=1)
    first = numbers(module.train_dataloader())
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert numbers(copied.train_dataloader()) == first

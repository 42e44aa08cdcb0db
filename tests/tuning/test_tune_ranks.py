"""One rank of a node tunes: what the others get, also when it fails or is slow. With a fake clock; with real ranks."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import Dataset

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.tuning.values import Setting, Trial, Tuned
from lightning_feed.tuning import fit as tuning_fit
from lightning_feed.tuning import ranks as tuning_ranks
from lightning_feed.tuning.ranks import Place, tune_once_per_node

pytestmark = [
    # The ranks of these tests are forked, as with strategy="ddp_fork".
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
FOUND = Tuned(
    setting=Setting(num_workers=1, prefetch_factor=3),
    reason="the fastest",
    trials=(Trial(setting=Setting(num_workers=1, prefetch_factor=3)),),
    batches_per_s=12.5,
)


class Clock:
    """Passes only while somebody sleeps; ``then`` is called once, when it has reached ``at``."""

    def __init__(self, at: float = 1e9, then: Any = None) -> None:
        self.now, self.at, self.then = 0.0, at, then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.at and self.then is not None:
            self.then, then = None, self.then
            then()


@pytest.fixture
def store() -> Any:
    return torch.distributed.HashStore()


@pytest.fixture(autouse=True)
def _first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same(Iterator[int]):
        def __next__(self) -> int:
            return 0

    monkeypatch.setattr(tuning_ranks, "_sessions", Same())


def nobody() -> Tuned:
    raise AssertionError("only local rank 0 tunes")


def tune(store: Any, rank: int, work: Any = nobody, clock: Clock | None = None, node: int = 0) -> Tuned | None:
    place = Place(local_rank=rank, local_ranks=3, node=node, world_size=6, store=store)
    clock = clock or Clock()
    return tune_once_per_node(work, place, patience_s=10, sleep=clock.sleep, clock=clock)


def test_the_others_get_what_was_found(store: Any) -> None:
    clock = Clock(5, lambda: tune(store, 0, lambda: FOUND))
    found = tune(store, 1, clock=clock)
    assert found is not None
    assert (found.setting, found.reason, found.batches_per_s, found.trials) == (FOUND.setting, "the fastest", 12.5, ())
    assert clock.now < 6  # it does not wait out its patience


def test_each_node_has_its_own(store: Any) -> None:
    tune(store, 0, lambda: FOUND, node=1)
    assert tune(store, 1, node=0) is None
    assert tune(store, 1, node=1) is not None


def test_an_error_reaches_all(store: Any) -> None:
    def fail() -> Tuned:
        raise DatasetError("sample 3 is broken.")

    with pytest.raises(DatasetError, match="sample 3"):
        tune(store, 0, fail)
    with pytest.raises(LoaderError, match=r"DatasetError: sample 3 is broken\."):
        tune(store, 1)


def test_a_rank_that_failed_waits_for_the_others_to_hear_of_it_but_not_for_ever(store: Any) -> None:
    def fail() -> Tuned:
        raise DatasetError("sample 3 is broken.")

    def others() -> None:
        for rank in (1, 2):
            with pytest.raises(LoaderError):
                tune(store, rank)

    heard, unheard = Clock(1, others), Clock()
    with pytest.raises(DatasetError):
        tune(store, 0, fail, heard)
    assert 1 <= heard.now < 1.2
    with pytest.raises(DatasetError):
        tune(torch.distributed.HashStore(), 0, fail, unheard)
    assert 5 <= unheard.now < 5.2


def test_a_store_that_is_gone_is_an_error_for_the_others_and_hides_none(caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def fail(self, *_: Any) -> Any:
            raise RuntimeError("Connection reset by peer")

        check = compare_set = add = fail

    with pytest.raises(LoaderError, match="is gone"):
        tune(Gone(), 1)

    def fail() -> Tuned:
        raise DatasetError("sample 3 is broken.")

    with pytest.raises(DatasetError, match="sample 3"):
        tune(Gone(), 0, fail)


def test_ctrl_c_reaches_all(store: Any) -> None:
    def stop() -> Tuned:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(store, 0, stop)
    with pytest.raises(LoaderError, match="KeyboardInterrupt"):
        tune(store, 1)


def test_when_one_has_given_up_nobody_takes_what_is_found_later(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    assert tune(store, 1, clock=clock) is None
    assert 10 <= clock.now < 10.1
    assert tune(store, 0, lambda: FOUND) is None
    assert tune(store, 2) is None
    assert caplog.text.count("longer than the 10 s") == 3


def test_without_a_store_nobody_tunes(caplog: pytest.LogCaptureFixture) -> None:
    assert tune(None, 0) is None
    assert tune(None, 1) is None
    assert "no store" in caplog.text


def test_alone_no_store_is_needed() -> None:
    assert tune_once_per_node(lambda: FOUND, Place(), patience_s=1) is FOUND


# --- two real ranks ---------------------------------------------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


class Data(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Rows() if split == "train" else None


class Seen(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows += batch[:, 0].tolist()
        return super().training_step(batch, batch_idx)


def fit(rank: int, world_size: int, how: str) -> Any:
    calls: list[int] = []

    def tune_loader(loader: Any, goal: Any, **_: Any) -> Tuned:
        calls.append(goal.local_ranks)
        if how == "raises":
            raise DatasetError("sample 3 is broken.")
        if how == "slow":
            store = tuning_ranks._default_store()
            store.get("the others gave up")  # waits for it
        return FOUND

    if how != "real":
        tuning_fit.tune_loader = tune_loader
    if how == "slow":
        tuning_fit.PATIENCE = 0.01
        original = tuning_ranks._warn

        def warn(patience_s: float) -> None:
            original(patience_s)
            tuning_ranks._default_store().set("the others gave up", "yes")

        tuning_ranks._warn = warn
    settings = (
        LoaderSettings(num_workers=1, prefetch_factor=3) if how == "by hand" else LoaderSettings(num_workers="tune")
    )
    data, model = Data(4, loader=settings), Seen()
    torch.manual_seed(3)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(model, datamodule=data)
    except (DatasetError, LoaderError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = data.recommendations["train"]
    weights = [value.tolist() for value in model.state_dict().values()]
    return {
        "calls": calls, "workers": found.num_workers, "why": found.reasons["num_workers"], "rows": model.rows,
        "weights": weights,
    }  # fmt: skip


def in_ranks(folder: Path, how: str) -> list[Any]:
    """What ``fit`` returns in each rank of a run as torchrun starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(_one_rank, (2, port, folder, how), nprocs=2, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _one_rank(rank: int, world_size: int, port: int, folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    (folder / f"{rank}.json").write_text(json.dumps(fit(rank, world_size, how)))


def test_one_of_two_ranks_tunes_for_both_and_training_is_the_same(tmp_path: Path) -> None:
    tuned = in_ranks(tmp_path, "fine")
    assert [one["calls"] for one in tuned] == [[2], []]
    assert [one["workers"] for one in tuned] == [1, 1]
    assert all("the fastest" in one["why"] for one in tuned)
    by_hand = in_ranks(tmp_path, "by hand")
    assert [one["weights"] for one in tuned] == [one["weights"] for one in by_hand]
    assert [one["rows"] for one in tuned] == [one["rows"] for one in by_hand]
    assert sorted(tuned[0]["rows"] + tuned[1]["rows"]) == [float(row) for row in range(32)]


def test_two_ranks_get_the_error_of_the_one_that_tunes(tmp_path: Path) -> None:
    first, second = in_ranks(tmp_path, "raises")
    assert first["error"] == "DatasetError: sample 3 is broken."
    assert "LoaderError: The rank that tunes" in second["error"]
    assert "sample 3 is broken." in second["error"]


def test_two_ranks_train_without_tuning_when_it_takes_too_long(tmp_path: Path) -> None:
    told = in_ranks(tmp_path, "slow")
    assert [one["calls"] for one in told] == [[2], []]
    assert all("it took too long for the ranks" in one["why"] for one in told)
    assert told[0]["workers"] == told[1]["workers"]

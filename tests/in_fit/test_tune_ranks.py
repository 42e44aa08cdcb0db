"""One rank of a node tunes for all of them: the result and errors, with two real ranks."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measure.test_ranks_gloo import in_ranks
from torch.utils.data import DataLoader, Dataset

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.in_fit import goal as goal_file
from lightning_feed.load.rehearsal import Rehearsal
from lightning_feed.load.settings import Setting
from lightning_feed.measure import rank_store
from lightning_feed.trials.search import Trial
from lightning_feed.trials.tune_loader import Goal, Tuned

FOUND = Tuned(
    setting=Setting(num_workers=1, prefetch_factor=3),
    own=Setting(num_workers=0),
    reason="the fastest",
    trials=(Trial(setting=Setting(num_workers=1, prefetch_factor=3), steps_s=(0.08,)),),
)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


def tune_on_a_rank(rank: int, how: str) -> dict[str, Any]:
    calls: list[int] = []

    def tune_loader(loader: Any, goal: Any, **_: Any) -> Tuned:
        calls.append(goal.local_ranks)
        if how == "raises":
            raise DatasetError("sample 3 is broken.")
        return FOUND

    goal_file.tune_loader = tune_loader
    trainer = SimpleNamespace(world_size=2, local_rank=rank, node_rank=0)
    try:
        tuned = goal_file.tune_for_fit(DataLoader(Rows()), trainer, Goal(local_ranks=2), Rehearsal())
    except (DatasetError, LoaderError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    assert tuned is not None
    return {"calls": calls, "workers": tuned.setting.num_workers}


def on_a_rank(rank: int) -> Any:
    torch.distributed.init_process_group("gloo")
    told: dict[str, Any] = {how: tune_on_a_rank(rank, how) for how in ("fine", "raises")}
    torch.distributed.new_group = None  # one that ends can hang with torch 2.6 and 2.7
    told["gathered"] = [
        rank_store.gather(SimpleNamespace(world_size=2), f"{number} of rank {rank}") for number in range(3)
    ]
    if rank:  # rank 0, which has the store, could end before this one has read
        read_all = rank_store.read_all
        rank_store.read_all = lambda *arguments: (time.sleep(0.5), read_all(*arguments))[1]
    told["last"] = rank_store.gather(SimpleNamespace(world_size=2), rank)
    if not rank:
        store = rank_store.default_store()
        told["kept"] = any(store.check([f"lightning_feed/gather/{number}/1"]) for number in range(9))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ``fit`` returns in each rank of a run as torchrun starts it."""
    return in_ranks(2, on_a_rank, tmp_path_factory.mktemp("ranks"))


def test_one_of_two_ranks_tunes_for_both(told: list[Any]) -> None:
    results = [rank["fine"] for rank in told]
    assert [result["calls"] for result in results] == [[2], []]
    assert [result["workers"] for result in results] == [1, 1]


def test_ranks_gather_without_a_new_group_and_leave_the_store_empty(told: list[Any]) -> None:
    assert [one["gathered"] for one in told] == [
        [[f"{number} of rank {r}" for r in range(2)] for number in range(3)]
    ] * 2
    assert [one["last"] for one in told] == [[0, 1]] * 2
    assert not told[0]["kept"]


def test_error_of_the_tuning_rank_is_raised_on_both_ranks(told: list[Any]) -> None:
    first, second = (one["raises"] for one in told)
    assert first["error"] == "DatasetError: sample 3 is broken."
    assert "LoaderError: The rank that tunes" in second["error"]
    assert "sample 3 is broken." in second["error"]


@pytest.mark.parametrize("node", [0, 1])
def test_each_node_uses_its_own_tuning_result(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(FOUND, reason="the other node's")
    monkeypatch.setattr(goal_file, "gather", lambda _, mine: [(0, FOUND), (0, None), (1, other), (1, None)])
    trainer = SimpleNamespace(local_rank=1, node_rank=node, world_size=4)
    assert goal_file._once_per_node(pytest.fail, trainer) is (FOUND, other)[node]


def test_ranks_not_connected_by_torch_distributed_do_not_tune(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SimpleNamespace(world_size=2)
    assert goal_file.tune_for_fit(DataLoader(Rows()), trainer, Goal(), Rehearsal()) is None
    assert "torch.distributed does not connect the ranks" in caplog.text

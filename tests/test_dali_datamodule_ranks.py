"""How DaliDataModule divides a set: every sample once, as many batches on every rank, two real ranks on the CPU."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_feed.errors import DatasetError
from lightning_feed.load.dali.shares import LAST_BATCH, LastBatch, Place, Share

pytest.importorskip("nvidia.dali")

from dali_numbers import VAL, DaliNumbers, flat
from dali_ranks import in_two_ranks


def share_of(samples: int, ranks: int, rank: int, batch_size: int, last: LastBatch, *, sticks: bool = True) -> Share:
    return Share(samples=samples, ranks=ranks, rank=rank, batch_size=batch_size, last_batch=last, sticks=sticks)


# --- the arithmetic -----------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 9), st.sampled_from(LAST_BATCH), st.integers(0, 7))
def test_every_rank_hands_out_as_many_batches_in_every_epoch(
    samples: int, ranks: int, batch_size: int, last: LastBatch, epochs: int
) -> None:
    lengths = set()
    for rank in range(ranks):
        share = share_of(samples, ranks, rank, batch_size, last, sticks=False)
        if samples < ranks or not len(share):
            return
        place = Place()
        for epoch in range(epochs + 1):
            kept = [place.advance(share) for _ in range(share.read_batches)]
            lengths.add(sum(count > 0 for count in kept))
            assert place == Place(epoch + 1, 0)
            if last != "partial":
                assert set(kept) <= {0, batch_size}
        lengths.add(len(share))
    assert len(lengths) == 1


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 9), st.integers(0, 5))
def test_partial_hands_out_each_sample_once_but_for_empty_batches(
    samples: int, ranks: int, batch_size: int, epoch: int
) -> None:
    if samples < ranks:
        return
    handed_out = 0
    for rank in range(ranks):
        share = share_of(samples, ranks, rank, batch_size, "partial", sticks=False)
        kept = [share.kept(epoch, batch) for batch in range(share.read_batches)]
        size = ((rank + epoch) % ranks + 1) * samples // ranks - (rank + epoch) % ranks * samples // ranks
        assert min(kept) >= 1
        assert sum(kept) - size == (size == batch_size * (share.read_batches - 1))  # one repeated, or none
        handed_out += sum(kept)
    assert samples <= handed_out < samples + ranks


@pytest.mark.parametrize(("last", "kept"), [("partial", [4, 4, 2]), ("drop", [4, 4, 0]), ("fill", [4, 4, 4])])
def test_the_last_batch(last: LastBatch, kept: list[int]) -> None:
    share = share_of(10, 1, 0, 4, last)
    assert [share.kept(0, batch) for batch in range(share.read_batches)] == kept
    assert len(share) == sum(count > 0 for count in kept)


# --- DALI's readers agree with it ---------------------------------------------------------------------------------


class OfRank(DaliNumbers):
    """As one of several ranks, without the others."""

    def at(self, rank: int, ranks: int) -> "OfRank":
        self.trainer = type(
            "Trainer",
            (),
            {
                "distributed_sampler_kwargs": {"rank": rank, "num_replicas": ranks},
                "num_devices": ranks,
                "world_size": 1,
                "overfit_batches": 0,
                "fit_loop": None,
                "callbacks": [],
            },
        )()
        return self


@pytest.mark.parametrize(
    ("samples", "ranks", "batch_size", "last"),
    [(11, 2, 5, "partial"), (10, 3, 2, "drop"), (10, 3, 3, "fill"), (12, 2, 3, "partial"), (5, 4, 1, "drop")],
)
def test_the_readers_agree(
    samples: int, ranks: int, batch_size: int, last: LastBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaliNumbers, "_feed_epoch", lambda self: 0)
    epochs: list[list[list[int]]] = [[] for _ in range(3)]
    lengths = set()
    for rank in range(ranks):
        module = OfRank(
            tmp_path,
            batch_size,
            train=samples,
            val=samples,
            device="cpu",
            seed=3,
            last_batch=last,
            eval_last_batch=last,
        ).at(rank, ranks)
        loader = module._feed_loaders("train")
        for seen in epochs:
            batches = list(loader)
            lengths.add(len(batches))
            seen.append(flat(batches))
        lengths.add(len(loader))
        module._dali_close("train")
    assert len(lengths) == 1
    for seen in epochs:
        together = [number for part in seen for number in part]
        if last == "drop":
            assert len(together) == len(set(together))
        else:
            assert set(together) == set(range(samples))
        if last == "partial":
            assert len(together) - samples < ranks
    assert len({tuple(seen[0]) for seen in epochs}) == 3  # epochs differ


@pytest.mark.parametrize(
    ("split", "samples", "said"),
    [
        ("train", 3, "share of 1 samples, which is less than one batch of 4. Give a batch size of 1 or less"),
        ("test", 5, "share of 2 samples, which is less than one batch of 4. .* eval_batch_size and eval_last_batch"),
        ("val", 1, "input samples: 1, needs to be at least equal to the requested number of shards:? ?2"),
    ],
)
def test_of_a_set_that_is_too_small_the_split_is_named(
    split: str, samples: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaliNumbers, "_feed_epoch", lambda self: 0)
    options: dict[str, Any] = {"last_batch": "drop", "eval_last_batch": "drop", "seed": 1}
    module = OfRank(tmp_path, 4, train=samples, val=samples, device="cpu", **options).at(1, 2)
    with pytest.raises(DatasetError, match=rf"(?s)OfRank\.pipeline\('{split}'\).*{said}"):
        len(module._feed_loaders(split))


# --- two ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """What two real ranks trained: shares of 4 and 5 samples, in 2 and 3 batches."""
    return in_two_ranks(tmp_path_factory.mktemp("ranks"), train=9, val=7)


def whole_numbers(batches: list[list[list[float]]]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


@pytest.mark.slow
def test_two_ranks_share_the_set_and_end_together(ranks: list[dict[str, list[Any]]]) -> None:
    assert [len(rank["whole"]) for rank in ranks] == [9, 9]
    for epoch in range(3):
        parts = [whole_numbers(rank["whole"][3 * epoch : 3 * epoch + 3]) for rank in ranks]
        assert sorted({*parts[0], *parts[1]}) == list(range(9))
        assert set(parts[0]).isdisjoint(parts[1])
        assert sum(map(len, parts)) == 10  # one sample repeated, so that no rank has an empty batch
    validated = [whole_numbers(rank["validated"]) for rank in ranks]
    assert sorted({*validated[0], *validated[1]}) == list(range(VAL, VAL + 7))
    assert sum(map(len, validated)) == 3 * 7


@pytest.mark.slow
def test_the_random_operators_of_the_ranks_draw_apart(ranks: list[dict[str, list[Any]]]) -> None:
    draws = [[value % 1 for batch in rank["whole"] for row in batch for value in row] for rank in ranks]
    assert len(set(draws[0])) > 50
    assert len(set(draws[0]) & set(draws[1])) < 5


@pytest.mark.slow
def test_two_ranks_are_killed_and_resumed(ranks: list[dict[str, list[Any]]]) -> None:
    for rank in ranks:
        assert len(rank["before"]) == 4
        assert rank["before"] + rank["after"] == rank["whole"]

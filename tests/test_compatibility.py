"""What docs/recipes.md says of other people's datasets and loaders: each cell of its table is tried here."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from recording import NullStreamPrefetch, Numbers, Recording, assert_same_run, first_tensor, fit, quiet_trainer
from resuming import assert_resumes_exactly
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings, diagnose
from lightning_feed.errors import DatasetError
from lightning_feed.measure import loop

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    # Of the libraries themselves: webdataset where a pass is broken off, LitData, Ray Data.
    pytest.mark.filterwarnings("ignore:unclosed file.*tar:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
    pytest.mark.filterwarnings("ignore:.*`use_.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
SIZE, BATCH = 24, 4
ROOT = Path(__file__).parents[1]


class Kind(NamedTuple):
    """One row of the table. All give the numbers below SIZE, once an epoch, as rows of four."""

    needs: tuple[str, ...]
    loader: Callable[[Path], Any]
    """What is trained from without us, in batches."""
    dataset: Callable[[Path], Any] | None = None
    """What make_dataset() can return; None: the library has no dataset of torch's."""
    collate: Callable[[list[Any]], Any] | None = None


def sample(index: int) -> Tensor:
    return torch.full((4,), float(index))


# --- the libraries ----------------------------------------------------------------------------------------------------


def litdata_set(folder: Path) -> Any:
    from litdata import StreamingDataset
    from litdata.streaming import Cache

    if not (folder / "chunks").exists():
        cache = Cache(str(folder / "chunks"), chunk_size=6)
        for index in range(SIZE):
            cache[index] = sample(index)
        cache.done()
        cache.merge()
    return StreamingDataset(str(folder / "chunks"), shuffle=True)


def litdata_loader(folder: Path) -> Any:
    from litdata import StreamingDataLoader

    return StreamingDataLoader(litdata_set(folder), batch_size=BATCH, num_workers=0)


def mosaic_set(folder: Path) -> Any:
    from streaming import MDSWriter, StreamingDataset

    if not (folder / "mds").exists():
        with MDSWriter(out=str(folder / "mds"), columns={"number": "int"}, size_limit=200) as out:
            for index in range(SIZE):
                out.write({"number": index})

    class Rows(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return sample(super().__getitem__(at)["number"])

    return Rows(local=str(folder / "mds"), batch_size=BATCH, shuffle=True)


def mosaic_loader(folder: Path) -> Any:
    from streaming import StreamingDataLoader

    return StreamingDataLoader(mosaic_set(folder), batch_size=BATCH, num_workers=0)


def web_set(folder: Path) -> Any:
    import webdataset

    shards = [str(folder / f"{first}.tar") for first in range(0, SIZE, 6)]
    for number, shard in enumerate(shards):
        if not Path(shard).exists():
            with webdataset.TarWriter(shard) as sink:
                for index in range(6 * number, 6 * number + 6):
                    sink.write({"__key__": f"{index:03}", "json": json.dumps(index).encode()})
    return webdataset.WebDataset(shards, shardshuffle=False).decode().map(lambda row: sample(row["json"]))


def web_loader(folder: Path) -> Any:
    import webdataset

    return webdataset.WebLoader(web_set(folder).batched(BATCH), batch_size=None, num_workers=0)


def hf_map(_: Path) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": [[float(index)] * 4 for index in range(SIZE)]}).with_format("torch")


def hf_iterable(folder: Path) -> Any:
    return hf_map(folder).to_iterable_dataset(num_shards=4)


def hf_streaming(folder: Path) -> Any:
    import datasets

    files = [str(folder / f"{first}.jsonl") for first in range(0, SIZE, 6)]
    for number, file in enumerate(files):
        rows = [json.dumps({"x": [float(index)] * 4}) for index in range(6 * number, 6 * number + 6)]
        Path(file).write_text("\n".join(rows))
    made = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))
    return made.with_format("torch")


def nodes_loader(_: Path) -> Any:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper

    read = ParallelMapper(IterableWrapper(range(SIZE)), sample, num_workers=2, method="thread")
    return Loader(ParallelMapper(Batcher(read, BATCH), torch.stack, num_workers=1, method="thread"))


class SpdlLoader:
    def __iter__(self) -> Iterator[Tensor]:
        from spdl.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(range(SIZE)).pipe(sample, concurrency=2, output_order="input")
        pipeline = builder.aggregate(BATCH).pipe(torch.stack).add_sink(2).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)


def ray_batches(_: Path) -> Any:
    import ray

    rows = ray.data.from_items([{"x": sample(index).numpy()} for index in range(SIZE)])
    return rows.iter_torch_batches(batch_size=BATCH)


def graphs(_: Path) -> Any:
    from torch_geometric.data import Data

    edges = torch.tensor([[0, 1], [1, 0]])
    return Graphs([Data(x=sample(index).repeat(2, 1), edge_index=edges) for index in range(SIZE)])


class Graphs(Dataset[Any]):
    """A plain list would be several datasets to make_dataset()."""

    def __init__(self, graphs: list[Any]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Any:
        return self.graphs[index]


def graph_loader(folder: Path) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader

    return GraphLoader(graphs(folder), batch_size=BATCH)


def graph_collate(samples: list[Any]) -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list(samples)


def pipes(_: Path) -> Any:
    from torch.utils.data.datapipes.iter import IterableWrapper

    return IterableWrapper(range(SIZE)).sharding_filter().map(sample)


def tensordict(samples: list[Tensor]) -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": torch.stack(samples), "deep": {"y": torch.ones(len(samples))}}, batch_size=[len(samples)])


if importlib.util.find_spec("tensordict"):
    from tensordict import tensorclass as _tensorclass

    @_tensorclass
    class Rows:
        """At the top of the file, where workers find it."""

        x: Tensor


def tensorclass(samples: list[Tensor]) -> Any:
    return Rows(x=torch.stack(samples), batch_size=[len(samples)])


def plain(dataset: Callable[[Path], Any], collate: Any = None) -> Callable[[Path], Any]:
    return lambda folder: DataLoader(dataset(folder), batch_size=BATCH, collate_fn=collate)


def numbers(_: Path) -> Any:
    return Numbers(SIZE)


KINDS = {
    "LitData": Kind(("litdata",), litdata_loader, litdata_set),
    "MosaicML Streaming": Kind(("streaming",), mosaic_loader, mosaic_set),
    "webdataset": Kind(("webdataset",), web_loader, web_set),
    "Hugging Face datasets, map-style": Kind(("datasets",), plain(hf_map), hf_map),
    "Hugging Face datasets, iterable": Kind(("datasets",), plain(hf_iterable), hf_iterable),
    "Hugging Face datasets, streaming": Kind(("datasets",), plain(hf_streaming), hf_streaming),
    "torchdata.nodes": Kind(("torchdata.nodes",), nodes_loader),
    "SPDL": Kind(("spdl.pipeline",), lambda _: SpdlLoader()),
    "Ray Data": Kind(("ray.data", "pyarrow"), ray_batches),
    "PyTorch Geometric": Kind(("torch_geometric",), graph_loader, graphs, graph_collate),
    "torch's DataPipes": Kind(("torch.utils.data.datapipes.iter",), plain(pipes), pipes),
    "TensorDict batches": Kind(("tensordict",), plain(numbers, tensordict), numbers, tensordict),
    "TensorClass batches": Kind(("tensordict",), plain(numbers, tensorclass), numbers, tensorclass),
}


def module_of(kind: Kind, folder: Path, workers: int = 0) -> FastDataModule:
    class Data(FastDataModule):
        def make_dataset(self, split: str) -> Any:
            return kind.dataset(folder) if split == "train" and kind.dataset is not None else None

        def collate(self, samples: list[Any], split: str) -> Any:
            return super().collate(samples, split) if kind.collate is None else kind.collate(samples)

    return Data(batch_size=BATCH, loader=LoaderSettings(num_workers=workers, seed=3))


# --- the columns ------------------------------------------------------------------------------------------------------


def each_sample_comes_once(kind: Kind, folder: Path) -> None:
    for workers in (0, 2):
        batches = list(module_of(kind, folder, workers).train_dataloader())
        assert sorted({row[0].item() for batch in batches for row in first_tensor(batch)}) == list(range(SIZE))
        assert sum(len(first_tensor(batch)) for batch in batches) in (SIZE, 2 * SIZE)  # two nodes in a graph


def prefetching_changes_nothing(kind: Kind, folder: Path) -> None:
    assert_same_run(lambda: {"train_dataloaders": kind.loader(folder)})


def steps_are_measured(kind: Kind, folder: Path) -> None:
    meter = GPUStarvationCallback(every_n_steps=5, report=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "READ_EVERY_NS", 0)  # of every window, however short
        *_, error = fit([meter], lambda: {"train_dataloaders": kind.loader(folder)})
    assert error is None
    stats = meter.summary()
    assert stats is not None
    assert stats.starved_pct is not None


def it_is_diagnosed(kind: Kind, folder: Path) -> None:
    loader = kind.loader(folder)
    diagnosis = diagnose(quiet_trainer([]), Recording(), train_dataloaders=loader, budget_s=8)
    results = diagnosis.measurements.experiments
    assert results.model_per_s is not None
    assert results.loader_per_s is not None
    assert not [reason for _, reason in results.left_out if "failed" in reason]


def our_loader_resumes(kind: Kind, folder: Path) -> None:
    assert kind.dataset is not None
    assert_resumes_exactly(lambda: {"datamodule": module_of(kind, folder)}, list, folder / "run.ckpt", count=(1, 7))


def its_loader_resumes(kind: Kind, folder: Path) -> None:
    assert_resumes_exactly(
        lambda: {"train_dataloaders": kind.loader(folder)},
        lambda: [NullStreamPrefetch(depth=2)],
        folder / "own.ckpt",
        count=(1, 7),
    )


CHECKS = {
    "`FastDataModule`": each_sample_comes_once,
    "`PrefetchCallback`": prefetching_changes_nothing,
    "`GPUStarvationCallback`": steps_are_measured,
    "`diagnose`": it_is_diagnosed,
    "exact resume, our loader": our_loader_resumes,
    "exact resume, its loader": its_loader_resumes,
}


TAKES_LONG = {
    "`diagnose`": ("webdataset", "PyTorch Geometric"),
    "exact resume, our loader": (
        "LitData",
        "Hugging Face datasets, map-style",
        "PyTorch Geometric",
        "torch's DataPipes",
    ),
    "exact resume, its loader": ("LitData", "webdataset", "torchdata.nodes", "PyTorch Geometric"),
}
"""Checks that are slow, with the rows that the gate tries; the others are tried nightly."""


def marks_of(row: str, column: str) -> list[pytest.MarkDecorator]:
    if column not in TAKES_LONG:
        return []
    return [pytest.mark.slow] if row in TAKES_LONG[column] else [pytest.mark.slow, pytest.mark.nightly]


def table() -> list[tuple[str, str, str]]:
    """Row, column and cell."""
    text = (ROOT / "docs" / "recipes.md").read_text().partition("## Other libraries")[2].partition("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [(row[0], column, cell) for row in rows for column, cell in zip(head[1:], row[1:], strict=True)]


def test_the_compatibility_table_lists_every_kind_and_check() -> None:
    assert [(row, column) for row, column, _ in table()] == [(row, column) for row in KINDS for column in CHECKS]
    assert {cell for *_, cell in table()} <= {"yes", "no", "-"}


@pytest.mark.parametrize(
    ("row", "column", "cell"),
    [
        pytest.param(row, column, cell, marks=marks_of(row, column), id=f"{row}: {column}")
        for row, column, cell in table()
    ],
)
def test_each_cell_of_the_compatibility_table_holds(row: str, column: str, cell: str, tmp_path: Path) -> None:
    kind = KINDS[row]
    for name in kind.needs:
        pytest.importorskip(name)
    if cell == "-":
        assert kind.dataset is None
        with pytest.raises(DatasetError, match="not a dataset"):
            module_of(kind._replace(dataset=kind.loader), tmp_path).train_dataloader()
    elif cell == "yes":
        CHECKS[column](kind, tmp_path)
    else:
        with pytest.raises((AssertionError, TypeError, RuntimeError)):
            CHECKS[column](kind, tmp_path)

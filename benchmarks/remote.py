"""Training on photos in an object store: samples/s of the first and of the second epoch, ours and others'.

A real S3 server (moto's) on loopback, behind a proxy that adds latency and a bandwidth limit. So that the server, in
Python and on the same CPUs, is not what is measured, the proxy answers objects that it has seen before from memory, and
has seen all of them before the clock runs. Each row is a process of its own, with the same decoder, recipe and workers;
they differ in how the bytes come. "local" reads the same photos from the disk.

    python benchmarks/remote.py --photos /data/photos --latency-ms 20 100 --mb-per-s 25
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from object_store import CREDENTIALS, ObjectStore, running_store

BUCKET = "photos"
ROWS = ("local", "ours", "ours, no cache", "plain s3fs", "litdata", "webdataset", "mosaicml")
PER_SHARD = 100
_PATIENCE_S = 170
_LONGEST_S = 12
"""An epoch that takes longer is broken off, and its rate has a star: the next one does not find all in its cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder of class folders")
    parser.add_argument("--count", type=int, default=1000, help="photos in the store; repeated under other names")
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[20, 100])
    parser.add_argument("--mb-per-s", type=float, default=25.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--mosaic-python", default="", help="a Python with mosaicml-streaming; without it, no such row")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        one_row(json.loads(arguments.row))
        return
    with tempfile.TemporaryDirectory() as folder, running_store() as store:
        local = Path(folder) / "local"
        total = fill(store, arguments.photos, local, arguments.count)
        if arguments.mosaic_python:
            fill_mosaic(store, local, arguments.mosaic_python)
        limit = arguments.mb_per_s * 1e6 / (total / arguments.count)
        print(f"{arguments.count} photos, {total / 1e6:.1f} MB, {arguments.workers} workers, {os.cpu_count()} CPUs")
        print(f"the network's limit: {arguments.mb_per_s:g} MB/s, {limit:.0f} photos/s\n")
        print(f"{'latency':>8}  {'':15} {'first epoch':>12} {'second':>8}   photos/s")
        for latency_ms in arguments.latency_ms:
            with slow_network(store, latency_ms / 1000, arguments.mb_per_s * 1e6) as url:
                for row in arguments.rows:
                    with tempfile.TemporaryDirectory(dir=folder) as scratch:
                        job = {"row": row, "url": url, "local": str(local), "scratch": scratch,
                               "workers": arguments.workers, "count": arguments.count}  # fmt: skip
                        python = arguments.mosaic_python if row == "mosaicml" else sys.executable
                        if not python:
                            continue
                        print(f"{latency_ms:5g} ms  {row:15} {measured(job, python)}", flush=True)


# --- the store --------------------------------------------------------------------------------------------------------


def fill(store: ObjectStore, photos: Path, local: Path, count: int) -> int:
    """Bring the photos into the store, as files, as shards and as LitData's chunks. Returns the bytes of the files."""
    found = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    files = {}
    for number in range(count):
        source = found[number % len(found)]
        files[f"{source.parent.name}/{number // len(found)}_{source.name}"] = source.read_bytes()
    for name, content in files.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(content)
    store.client.create_bucket(Bucket=BUCKET)
    uploads = {f"files/{name}": content for name, content in files.items()}
    names = sorted(files)
    classes = sorted({name.split("/")[0] for name in names})
    for first in range(0, count, PER_SHARD):
        shard = io.BytesIO()
        with tarfile.open(fileobj=shard, mode="w") as tar:
            for number, name in enumerate(names[first : first + PER_SHARD], first):
                for suffix, content in (
                    ("jpg", files[name]),
                    ("cls", str(classes.index(name.split("/")[0])).encode()),
                ):
                    info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        uploads[f"shards/{first // PER_SHARD:04d}.tar"] = shard.getvalue()
    chunks = local.parent / "chunks"
    write_litdata(chunks, [(files[name], classes.index(name.split("/")[0])) for name in names])
    uploads.update({f"litdata/{path.name}": path.read_bytes() for path in chunks.iterdir()})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: store.put(BUCKET, dict([item])), uploads.items()))
    return sum(map(len, files.values()))


def write_litdata(folder: Path, samples: list[tuple[bytes, int]]) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes=8 << 20)
    for number, (data, label) in enumerate(samples):
        cache[number] = {"data": data, "label": label}
    cache.done()
    cache.merge()


class slow_network:
    """The URL of a proxy before the store that knows all objects already."""

    def __init__(self, store: ObjectStore, latency_s: float, bytes_per_s: float) -> None:
        port = store.client.meta.endpoint_url.rsplit(":", 1)[1]
        script = str(Path(__file__).parents[1] / "tests" / "s3_proxy.py")
        # A fresh process without the limits first: what it has seen once it answers from memory.
        command = [sys.executable, script, port, str(latency_s), str(bytes_per_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"
        self.store = store

    def __enter__(self) -> str:
        import urllib.request

        listed = self.store.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        names = [entry["Key"] for page in listed for entry in page["Contents"]]

        def see(name: str) -> None:
            request = urllib.request.Request(f"{self.url}/{BUCKET}/{name}", headers={"X-Free": "1"})
            with urllib.request.urlopen(request) as response:
                response.read()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(see, names))
        return self.url

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


# --- one row, in its own process --------------------------------------------------------------------------------------


def measured(job: dict[str, Any], python: str) -> str:
    environment = {**os.environ, **CREDENTIALS, "XDG_CACHE_HOME": job["scratch"]}
    environment["S3_ENDPOINT_URL"] = job["url"]
    command = [python, __file__, "--photos", job["local"], "--row", json.dumps(job)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
        first, second = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"   more than {_PATIENCE_S} s"
    except (IndexError, ValueError):
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        return f"   failed: {(said or ['without a word'])[-1]}"
    return f"{first:>12} {second:>8}"


def one_row(job: dict[str, Any]) -> None:
    """Print the rates of two epochs. What is slow is stopped after a while: its rate is known by then."""
    import torch

    torch.set_num_threads(1)
    if job["row"] == "write mds":
        write_mds(Path(job["local"]))
        return
    rates = []
    loader = loader_of(job)
    for _ in range(2):
        began, seen = time.perf_counter(), 0
        for images, _labels in loader:
            seen += len(images)
            if time.perf_counter() - began > _LONGEST_S and job["row"] != "mosaicml":  # which would not begin again
                break
        rates.append(f"{seen / (time.perf_counter() - began):.0f}{'' if seen >= job['count'] else '*'}")
    print(json.dumps(rates))


def loader_of(job: dict[str, Any]) -> Any:
    row, options = job["row"], {"endpoint_url": job["url"]}
    peers = {"litdata": litdata_loader, "webdataset": webdataset_loader, "mosaicml": mosaic_loader}
    if row in peers:
        return peers[row](job, options)
    from lightning_feed import ImageFolderDataModule, LoaderSettings

    root: Any = job["local"] if row == "local" else f"s3://{BUCKET}/files"
    given: dict[str, Any] = {} if row == "local" else {"storage_options": options}
    if row == "ours":
        given.update(stage_to=job["scratch"], stage_limit="10GiB")
    settings = LoaderSettings(num_workers=job["workers"], prefetch_factor=4, seed=1)
    module = ImageFolderDataModule(root, 32, decoder="turbo", val_fraction=0, loader=settings, **given)
    if row == "plain s3fs":
        dataset = module.dataset("train")
        dataset.source.source = Plain(dataset.source.source, options)
    return module.train_dataloader()


class Plain:
    """One object after the other, as ``fs.cat_file`` gives it."""

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        self.source, self.options, self.fs = source, options, None
        self.labels, self.classes = source.labels, source.classes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        if self.fs is None:
            import s3fs

            self.fs = s3fs.S3FileSystem(skip_instance_cache=True, **self.options)
        return self.fs.cat_file(self.source.name(index))

    def name(self, index: int) -> str:
        return self.source.name(index)


def sample_of(data: bytes, label: int) -> tuple[Any, int]:
    from lightning_feed.decode.choose import make_decoder
    from lightning_feed.images.crop import SourceImage, TrainRecipe

    global _decoder, _recipe
    if _decoder is None:
        _decoder, _recipe = make_decoder("turbo").decoder, TrainRecipe(size=224)
    return _recipe(SourceImage(data, _decoder)), label


_decoder: Any = None
_recipe: Any = None


def litdata_loader(job: dict[str, Any], options: dict[str, Any]) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else it reads from https only

    class Photos(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return sample_of(sample["data"], sample["label"])

    dataset = Photos(f"s3://{BUCKET}/litdata", cache_dir=f"{job['scratch']}/litdata", shuffle=True,
                     storage_options={**options, "region_name": "us-east-1"}, max_cache_size="10GB")  # fmt: skip
    return StreamingDataLoader(dataset, batch_size=32, num_workers=job["workers"], prefetch_factor=4)


def fill_mosaic(store: ObjectStore, local: Path, python: str) -> None:
    job = json.dumps({"row": "write mds", "local": str(local)})
    subprocess.run([python, __file__, "--photos", str(local), "--row", job], check=True)
    for path in (local.parent / "mds").iterdir():
        store.put(BUCKET, {f"mds/{path.name}": path.read_bytes()})


def write_mds(local: Path) -> None:
    from streaming import MDSWriter

    paths = sorted(local.rglob("*.jp*g"))
    classes = sorted({path.parent.name for path in paths})
    with MDSWriter(out=str(local.parent / "mds"), columns={"data": "bytes", "label": "int"}, size_limit=8 << 20) as out:
        for path in paths:
            out.write({"data": path.read_bytes(), "label": classes.index(path.parent.name)})


def mosaic_loader(job: dict[str, Any], _options: dict[str, Any]) -> Any:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Photos(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return sample_of(sample["data"], sample["label"])

    dataset = Photos(remote=f"s3://{BUCKET}/mds", local=f"{job['scratch']}/mds", shuffle=True, batch_size=32)
    return DataLoader(dataset, batch_size=32, num_workers=job["workers"], prefetch_factor=4)


def webdataset_loader(job: dict[str, Any], _options: dict[str, Any]) -> Any:
    import webdataset

    last = (job["count"] - 1) // PER_SHARD
    Path(job["scratch"], "web").mkdir()
    urls = f"{job['url']}/{BUCKET}/shards/{{0000..{last:04d}}}.tar"
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=100, cache_dir=f"{job['scratch']}/web", seed=1, empty_check=False)
        .shuffle(500)
        .to_tuple("jpg", "cls")
        .map(lambda sample: sample_of(sample[0], int(sample[1])))
    )
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=32, num_workers=job["workers"], prefetch_factor=4)


if __name__ == "__main__":
    main()

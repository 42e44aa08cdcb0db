"""A Ray cluster of two nodes, simulated on this machine: a node that dies, a head node that is gone, a full store."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import DataLoader, Dataset

from lightning_feed.errors import LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import RayCluster

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import a test file
pytestmark = [
    pytest.mark.slow,
    # Ray 2.60 leaves these to garbage collection when it starts its own processes, and when it is shut down.
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
STORE = 80 << 20


class Large(Dataset):
    """200 KB a sample, and 10 ms."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.01)
        node = int(ray.get_runtime_context().get_node_id()[:6], 16)
        return torch.full((200_000,), index % 251, dtype=torch.uint8), torch.rand(()), node


@pytest.fixture
def cluster():
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": STORE,
            "include_dashboard": False,
            "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 4},  # else 15 s
        },
    )
    yield made
    ray.shutdown()
    made.shutdown()


def on(cluster, dataset, **options):
    return FeedLoader(dataset, batch_size=8, workers=RayCluster(cluster.address), **options)


def drawn(loader):
    torch.manual_seed(3)
    return [(pixels[:, 0].tolist(), noise.tolist()) for pixels, noise, _ in loader]


def test_a_node_that_dies_in_the_middle_costs_no_batch(cluster, caplog):
    second = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    plain = drawn(on(cluster, Large(400), num_workers=3, shuffle=True))
    torch.manual_seed(3)
    seen, nodes = [], []
    for number, (pixels, noise, node) in enumerate(on(cluster, Large(400), num_workers=3, shuffle=True)):
        seen.append((pixels[:, 0].tolist(), noise.tolist()))
        nodes.append(node[0].item())
        if number == 15:
            cluster.remove_node(second, allow_graceful=False)
    assert seen == plain
    assert len(set(nodes)) == 2
    assert "batches are made again" in caplog.text


def test_a_node_that_is_replaced_is_used(cluster):
    second = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    size, nodes, until = 20_000, set(), time.monotonic() + 100  # actors start slowly where others work
    torch.manual_seed(3)
    plain = DataLoader(range(size), batch_size=8, shuffle=True)
    order = [[index % 251 for index in batch.tolist()] for batch in plain]
    torch.manual_seed(3)
    for number, (pixels, _, node) in enumerate(on(cluster, Large(size), num_workers=3, shuffle=True)):
        assert pixels[:, 0].tolist() == order[number]
        nodes.add(node[0].item())
        if number == 15:
            cluster.remove_node(second, allow_graceful=False)
            cluster.add_node(num_cpus=2, object_store_memory=STORE)
        if len(nodes) == 3:
            break
        assert time.monotonic() < until


def test_another_version_of_ray_is_refused(cluster, monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.40.0")
    with pytest.raises(LoaderError, match=r"(?s)cannot be used: .*[Vv]ersion"):
        iter(on(cluster, Large(8), num_workers=1))


def test_an_address_without_a_cluster():
    with pytest.raises(LoaderError, match=r"ray_address='127.0.0.1:9' cannot be used"):
        iter(FeedLoader(Large(8), num_workers=1, workers=RayCluster("127.0.0.1:9")))


def test_more_workers_than_cpus_are_said_and_load(cluster, caplog):
    loader = on(cluster, Large(40), num_workers=3)
    assert len(list(loader)) == 5
    assert "has 1 CPUs for num_workers=3" in caplog.text


def test_the_head_node_is_gone(cluster):
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    head = cluster.head_node
    batches = iter(on(cluster, Large(100_000), num_workers=2))
    next(batches)
    head.kill_gcs_server(check_alive=False)
    with pytest.raises(LoaderError, match=r"The head node of the Ray cluster .* has not answered for"):
        list(batches)
    assert not ray.is_initialized()  # Ray would end this process


def test_a_dataset_that_is_larger_than_the_object_store_is_kept_on_disk(cluster):
    held = Large(16)
    held.bytes = bytearray(2 * STORE)
    assert len(list(on(cluster, held, num_workers=1))) == 2


def test_batches_that_are_larger_than_the_object_store_are_kept_on_disk(cluster):
    def collate(samples):
        return torch.zeros(2 * STORE, dtype=torch.uint8)

    assert [len(batch) for batch in on(cluster, Large(24), num_workers=1, collate_fn=collate)] == 3 * [2 * STORE]


def test_training_inside_an_actor_has_workers_of_its_own():
    """As under ray.train: the training is an actor in a placement group, which has no CPU left for others."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def train():
        loader = FeedLoader(range(40), batch_size=4, num_workers=2, workers=RayCluster("auto"))
        return [batch.tolist() for batch in loader]

    ray.init(address="local", num_cpus=3, include_dashboard=False)
    try:
        group = placement_group([{"CPU": 1}])
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        seen = ray.get(ray.remote(num_cpus=1, scheduling_strategy=strategy)(train).remote(), timeout=100)
    finally:
        ray.shutdown()
    assert seen == [list(range(at, at + 4)) for at in range(0, 40, 4)]


RANK = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_feed import FastDataModule, LoaderSettings

class Data(FastDataModule):
    def make_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(24.0)) if split == "train" else None

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch, _):
        self.seen += batch[0].tolist()
        return self.layer(batch[0][:, None]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

if __name__ == "__main__":
    model = Model()
    loader = LoaderSettings(workers="ray", num_workers=1, ray_address="ADDRESS")
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, datamodule=Data(batch_size=3, loader=loader))
    print("RANK", trainer.global_rank, sorted(map(int, model.seen)))
"""


def test_each_rank_of_ddp_has_its_own_share(tmp_path):
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    )
    try:
        script = tmp_path / "ranks.py"
        script.write_text(RANK.replace("ADDRESS", made.address))
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        told = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, env=env)
    finally:
        made.shutdown()
    shares = [eval(line.split(maxsplit=2)[2]) for line in told.stdout.splitlines() if line.startswith("RANK")]
    assert sorted(shares[0] + shares[1]) == list(range(24)), told.stderr


def test_passes_that_are_broken_off_leave_nothing_in_the_store(cluster):
    from ray._private.internal_api import memory_summary

    loader = on(cluster, Large(100_000), num_workers=1, persistent_workers=True)
    for _ in range(20):
        next(iter(loader))
    loader.close()

    def used():
        summary = memory_summary(address=cluster.address, stats_only=True)
        (line,) = [line for line in summary.splitlines() if line.startswith("Plasma memory usage")]
        return line

    until = time.monotonic() + 20
    while "Plasma memory usage 0 MiB" not in used():
        assert time.monotonic() < until, used()
        time.sleep(0.5)
    assert threading.active_count() < 20

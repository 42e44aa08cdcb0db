"""A Ray cluster of two nodes, simulated on this machine: a node that dies, a head node that is gone."""

import itertools
import sys
import time

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

from lightning_feed.errors import LoaderError
from lightning_feed.load import ray_workers
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import RayCluster

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
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


def start(cpus):
    # Else it takes 15 s to see that a node is dead.
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": cpus, "object_store_memory": STORE, "include_dashboard": False, "_system_config": quick}
    return Cluster(initialize_head=True, head_node_args=head)


@pytest.fixture
def cluster():
    ray.shutdown()
    made = start(1)
    yield made
    ray.shutdown()
    made.shutdown()


def on(cluster, dataset, **options):
    return FeedLoader(dataset, batch_size=8, workers=RayCluster(cluster.address), **options)


def drawn(batches):
    return [(pixels[:, 0].tolist(), noise.tolist()) for pixels, noise, _ in batches]


def test_dead_node_loses_no_batch_and_added_node_is_used(cluster):
    second = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    loader = on(cluster, Large(20_000), num_workers=3, persistent_workers=True)
    torch.manual_seed(3)
    plain = drawn(itertools.islice(loader, 50))
    torch.manual_seed(3)
    again = on(cluster, Large(20_000), num_workers=3)
    seen, nodes, until = [], [], time.monotonic() + 100  # workers start slowly where others work
    for number, batch in enumerate(again):
        seen += drawn([batch])
        nodes.append(batch[2][0].item())
        if number == 15:
            cluster.remove_node(second, allow_graceful=False)
        if number == 35:
            cluster.add_node(num_cpus=2, object_store_memory=STORE)
        if number >= 50 and len(set(nodes)) == 3:
            break
        assert time.monotonic() < until, nodes
    assert seen[:50] == plain
    assert [pixel for pixels, _ in seen for pixel in pixels] == [index % 251 for index in range(8 * len(seen))]


@pytest.mark.nightly
def test_batches_too_large_for_object_store_and_disk_raise_an_error():
    class Heavy(Large):
        def __getitem__(self, index):
            return torch.zeros(1 << 20, dtype=torch.uint8)

    def batches(size):
        loader = FeedLoader(Heavy(120), batch_size=size, num_workers=2, workers=RayCluster())
        return [len(batch) for batch in loader]

    full = {"local_fs_capacity_threshold": 1e-6}
    ray.shutdown()
    ray.init("local", num_cpus=2, object_store_memory=STORE, include_dashboard=False, _system_config=full)
    try:
        with pytest.raises(LoaderError, match=r"(?s)could not make batch \d, at .*disk is full.*lower num_workers"):
            batches(100)
        assert batches(10) == [10] * 12
    finally:
        ray.shutdown()


@pytest.mark.nightly
def test_mismatched_or_lost_head_node_raises_an_error(cluster, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ray, "__version__", "2.40.0")
        with pytest.raises(LoaderError, match=r"(?s)cannot be used: .*[Vv]ersion"):
            iter(on(cluster, Large(8), num_workers=1))
    ray.shutdown()
    monkeypatch.setattr(ray_workers, "_HEAD_CHECK_S", 0.5)
    monkeypatch.setattr(ray_workers, "_HEAD_PATIENCE_S", 3)
    head = cluster.head_node
    batches = iter(on(cluster, Large(100_000), num_workers=1))
    next(batches)
    head.kill_gcs_server(check_alive=False)
    with pytest.raises(LoaderError, match=r"The head node of the Ray cluster .* has not answered for"):
        list(batches)
    assert not ray.is_initialized()  # Ray would end this process

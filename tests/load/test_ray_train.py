"""Training by ray.train, with RayDDPStrategy: each rank loads its own share with tasks of the cluster it runs in."""

import sys

import lightning
import pytest
import ray
import torch

from lightning_feed import FastDataModule, GPUStarvationCallback, PrefetchCallback
from lightning_feed.load.settings import LoaderSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray about its own parts
    # Ray 2.60 leaves these to garbage collection when it starts its own processes, and when it is shut down.
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file


class Data(FastDataModule):
    def make_dataset(self, split):
        return range(40) if split == "train" else None


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch):
        self.seen += batch.tolist()
        return self.layer(batch[:, None].float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def train(config):
    from ray.train import get_context
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    data = Data(batch_size=4, loader=LoaderSettings(seed=3, **config["loader"]))
    torch.manual_seed(7)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[GPUStarvationCallback(), PrefetchCallback()],
    )
    prepare_trainer(trainer).fit(model, datamodule=data)
    rank = get_context().get_world_rank()
    (config["out"] / f"{rank}.txt").write_text(repr((model.seen, model.layer.weight.item())))


def fitted(out, **loader):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    out.mkdir()
    scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=str(out / "runs"))
    TorchTrainer(train, train_loop_config={"out": out, "loader": loader}, scaling_config=scaling, run_config=run).fit()
    return [eval((out / f"{rank}.txt").read_text()) for rank in range(2)]


def test_a_fit_with_ray_workers_matches_one_without_workers(tmp_path):
    for name in ("pandas", "pyarrow", "tensorboardX"):  # of ray[train]
        pytest.importorskip(name)
    ray.init(num_cpus=5, include_dashboard=False, object_store_memory=100 << 20)
    try:
        ranks = fitted(tmp_path / "ray", workers="ray", num_workers=2)
        plain = fitted(tmp_path / "plain", num_workers=0)
    finally:
        ray.shutdown()
    assert ranks == plain
    assert sorted(ranks[0][0][:20] + ranks[1][0][:20]) == list(range(40))

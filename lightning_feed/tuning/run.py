"""tune: the loader settings for this machine, this data and this model, found by a few trials."""

from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from lightning_feed.diagnosing.fits import Bench
from lightning_feed.image_measured import remember_tuning
from lightning_feed.load.tuning.store import Store
from lightning_feed.load.tuning.tune_loader import tune_loader
from lightning_feed.load.tuning.values import Goal, Trial, Tuned
from lightning_feed.tuning.demand import bench_of, measure_demand


def tune(  # noqa: PLR0913  # all but the target are by name, and have a default
    target: Any,
    *,
    model: Any = None,
    trainer: Any = None,
    batch_size: int | None = None,
    demand_per_s: float | None = None,
    budget_s: float = 30.0,
    max_trials: int = 5,
    fresh: bool = False,
    loader: str | None = None,
) -> Tuned:
    """Find the loader settings for a data module or a DataLoader, and leave everything as it was.

    With a model, or a demand, the smallest setting that keeps it fed is looked for, with a tenth to spare; without, the
    fastest. What was found is remembered for this machine, data set, batch size and these versions, and checked by one
    short trial the next time.

    Args:
        target: a LightningDataModule, which is prepared and set up for "fit", or torch DataLoaders.
        model: the LightningModule. What it can take is measured by training on one batch for some seconds.
        trainer: the Trainer that will train it. It is only read; loaders are tried for each of its local ranks at once.
        batch_size: samples in a batch, for figures in samples per second where the loader does not tell it.
        demand_per_s: batches per second that the model can take, in place of measuring it.
        budget_s: seconds for the trials. None is begun later.
        max_trials: the first, without workers, included.
        fresh: look anew, whatever is remembered.
        loader: which of several training loaders is tuned: its key or its number, ``"cls"``.

    Raises:
        SettingsError: for a target that cannot be tuned, or values that leave nothing to try.
        DatasetError: the data set raises; the message names the sample.
        LoaderError: the loader gives nothing, or hangs.

    Returns:
        The setting, why it was chosen, the trials, and what is predicted. ``Tuned.settings`` is for a FastDataModule.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from lightning_feed import tune
        >>> loader = DataLoader(range(10_000), batch_size=100)
        >>> tune(loader, demand_per_s=1, budget_s=1, fresh=True).setting.num_workers
        0
    """
    goal = Goal(demand_per_s=demand_per_s, budget_s=budget_s, max_trials=max_trials)
    with bench_of(target, model, trainer, loader) as (bench, one):
        goal = goal_for(bench, goal, ranks=trainer is not None)
        return find(bench, one, goal, batch_size=batch_size, fresh=fresh)


def find(bench: Bench, loader: DataLoader[Any], goal: Goal, *, batch_size: int | None, fresh: bool) -> Tuned:
    """The settings for a loader, with a progress bar on stderr.

    Args:
        bench: with a module, whose demand is measured unless the goal has one.
        loader: the training loader.
        goal: what for.
        batch_size: as for :func:`tune`.
        fresh: as for :func:`tune`.
    """
    with tqdm(total=goal.max_trials, desc="tune", disable=None, leave=False) as bar:
        if bench.model is not None and goal.demand_per_s is None:
            bar.set_description_str("tune: what the model can take")
            goal = replace(goal, demand_per_s=measure_demand(bench))

        def on_trial(trial: Trial) -> None:
            bar.set_description_str(f"tune: {trial.setting.num_workers} workers tried")
            bar.update()

        tuned = tune_loader(loader, goal, store=Store(), fresh=fresh, on_trial=on_trial)
    tuned = replace(tuned, batch_size=tuned.batch_size or batch_size or batch_size_of(loader))
    remember_tuning(bench.datamodule, bench.trainer.strategy.root_device, tuned, ranks=goal.local_ranks)
    return tuned


def goal_for(bench: Bench, goal: Goal, *, ranks: bool) -> Goal:
    """``goal`` with what the Trainer says: the device, whether workers may live on, and with ``ranks`` how many."""
    trainer = bench.trainer
    return replace(
        goal,
        local_ranks=trainer.num_devices if ranks else 1,
        device_type=trainer.strategy.root_device.type,
        may_persist=not trainer.reload_dataloaders_every_n_epochs,
    )


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Samples in a batch; None where the loader does not tell."""
    size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size

"""What ``lightning-feed tune`` runs: tuning, and with ``--sweep`` the whole grid, on one loader."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from lightning_feed.diagnosing.program import Fit
from lightning_feed.errors import SettingsError
from lightning_feed.load.tuning.sweep import Sweep, check_grid, sweep_loader
from lightning_feed.load.tuning.values import Goal, Tuned
from lightning_feed.tuning.demand import bench_of
from lightning_feed.tuning.run import batch_size_of, find, goal_for
from lightning_feed.watch.verdict.diagnosis import Place


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    samples_per_s: float | None = None
    """That the model can take; None: measured where there is a module."""
    budget_s: float = 30.0
    max_trials: int = 5
    fresh: bool = False
    grid: Sequence[int] | None = None
    """Numbers of workers to sweep; None: no sweep."""
    loader: str | None = None
    """Which of several loaders: its place."""


def run_tune(fit: Fit, wanted: Wanted) -> tuple[Tuned, Sweep | None, Place | None]:
    """Tune, and sweep where that is wanted, with the tuner's choice marked; and where the loader is set up, if known.

    Args:
        fit: what is to train, and on what.
        wanted: what for.

    Raises:
        FeedError: as for ``tune``; and for a demand in samples where nothing says how many a batch has.
    """
    goal = Goal(demand_per_s=wanted.samples_per_s, budget_s=wanted.budget_s, max_trials=wanted.max_trials)
    if wanted.grid is not None:
        check_grid(wanted.grid)  # before seconds are spent on trials
    data = next((one for one in (fit.datamodule, fit.train_dataloaders) if one is not None), fit.model)
    with bench_of(data, fit.model, fit.trainer, wanted.loader) as (bench, loader):
        size = batch_size_of(loader)
        if wanted.samples_per_s is not None:
            if size is None:
                raise SettingsError(
                    f"--demand {wanted.samples_per_s:g} is in samples per second, and the loader does not say how many "
                    "samples a batch has. Leave it out, or call tune(demand_per_s=...), in batches per second."
                )
            goal = replace(goal, demand_per_s=wanted.samples_per_s / size)
        tuned = find(bench, loader, goal_for(bench, goal, ranks=False), batch_size=size, fresh=wanted.fresh)
        place = bench.place()
        if wanted.grid is None:
            return tuned, None, place
        with tqdm(total=len(wanted.grid), desc="sweep", disable=None, leave=False) as bar:
            swept = sweep_loader(loader, grid=wanted.grid, told=lambda done, _: bar.update(done - bar.n))
    return tuned, replace(swept, chosen=tuned.setting, demand_per_s=tuned.demand_per_s), place

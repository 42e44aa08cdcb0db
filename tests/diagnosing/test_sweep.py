"""The grid of a sweep on a simulated loader, and how it is shown."""

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_feed.diagnosing import tune as sweep_file
from lightning_feed.diagnosing.tune import Sweep, sweep_loader, write_plot
from lightning_feed.errors import MissingExtraError
from lightning_feed.load.settings import Setting
from lightning_feed.machine.limits import read_machine
from lightning_feed.trials.search import Trial
from lightning_feed.trials.trial import TrialLimits


def trial(setting: Setting) -> Trial:
    """Two batches per second and worker, up to 4 workers; workers take 100 MiB."""
    workers = setting.num_workers
    rate = 1.5 if not workers else 2.0 * min(workers, 4) / (1 + max(0, workers - 4) / 10)
    return Trial(setting=setting, steps_s=(1 / rate,), memory_bytes=workers * 100 * 2**20)


def tried(*workers: int) -> Sweep:
    settings = [
        Setting(num_workers=count, prefetch_factor=2 if count else None) for count in workers or (0, 1, 2, 4, 8)
    ]
    return Sweep(trials=tuple(map(trial, settings)))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """The settings that were run, by arithmetic."""
    settings: list[Setting] = []

    def note(loader: Any, setting: Setting, work: Any, limits: Any) -> Trial:
        settings.append(setting)
        return Trial(setting=setting, infeasible="a worker died") if setting.num_workers == 3 else trial(setting)

    monkeypatch.setattr(sweep_file, "run_trial", note)
    return settings


LOADER: DataLoader[Any] = DataLoader(range(64), batch_size=4)  # type: ignore[arg-type]


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_file, "TrialLimits", lambda **_: TrialLimits(min_s=0.05))


def nothing() -> None:
    """In the place of a progress bar."""


def test_sweep_tries_each_number_of_workers_once_in_order(ran: list[Setting]) -> None:
    done: list[bool] = []
    found = sweep_loader(LOADER, [8, 3, 0, 3], lambda: done.append(True))
    assert [one.setting.num_workers for one in found.trials] == [0, 3, 8]
    assert [one.setting.prefetch_factor for one in found.trials] == [None, 2, 2]
    assert [one.infeasible for one in found.trials] == [None, "a worker died", None]  # it does not end the sweep
    assert len(done) == 3


def test_sweep_table_shows_rates_memory_and_the_tuned_setting() -> None:
    found = replace(tried(), batch_size=10, chosen=Setting(num_workers=4, prefetch_factor=4), seconds=1.0)
    assert found.text() == "\n".join(
        [
            "workers   samples/s   memory",
            "      0        15.0       0M  ######",
            "      1        20.0     100M  ########",
            "      2        40.0     200M  ###############",
            "      4        80.0     400M  ##############################  <- tuned",
            "      8        57.1     800M  #####################",
        ]
    )
    assert found.text().isascii()


@pytest.mark.usefixtures("briefly")
def test_sweep_of_a_real_loader_leaves_it_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    loader = DataLoader(range(64), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    found = sweep_loader(loader, (1, 0), nothing)
    assert [one.setting.num_workers for one in found.trials] == [0, 1]
    assert all(one.steps_s for one in found.trials)
    assert found.batch_size == 4
    assert found.trials[1].memory_bytes is None or found.trials[1].memory_bytes > 0
    assert torch.equal(generator.get_state(), before)
    assert loader.num_workers == 0


@pytest.mark.usefixtures("briefly")
def test_sweep_skips_settings_that_exceed_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(read_machine(), available_memory_bytes=2**20)
    monkeypatch.setattr(sweep_file, "read_machine", lambda: machine)
    loader = DataLoader(range(64), batch_size=4)  # type: ignore[arg-type]
    found = sweep_loader(loader, (0, 50), nothing)
    assert found.trials[0].steps_s
    assert "50" in (found.trials[1].infeasible or "")


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.fixture
def plotted(tmp_path: Path) -> Callable[[Sweep], bytes]:
    def draw(found: Sweep) -> bytes:
        path = tmp_path / "sweep.png"
        assert write_plot(found, path) == path
        assert [one.name for one in tmp_path.iterdir()] == ["sweep.png"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        return path.read_bytes()

    return draw


def test_plot_is_a_png_and_shows_the_chosen_setting(plotted: Callable[[Sweep], bytes]) -> None:
    found = replace(tried(), batch_size=10)
    chosen = replace(found, chosen=Setting(num_workers=4, prefetch_factor=2))
    pictures = [plotted(found), plotted(chosen)]
    assert all(picture.startswith(b"\x89PNG\r\n") for picture in pictures)
    assert len(set(pictures)) == 2


def test_missing_matplotlib_raises_an_error_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.delitem(__import__("sys").modules, "matplotlib.figure", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-feed\[plot\]'"):
        write_plot(tried(), tmp_path / "sweep.png")

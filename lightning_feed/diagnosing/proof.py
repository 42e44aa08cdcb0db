"""The check of what trials have found: training itself, with other loader settings, and with fewer threads of torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_feed.diagnosing.batches import idle_clone, own_loaders
from lightning_feed.diagnosing.session import Session
from lightning_feed.diagnosing.short_fits import FitLength, time_fit
from lightning_feed.in_fit.replaced_loader import with_setting
from lightning_feed.load.kinds import Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import Setting
from lightning_feed.measure.experiment_results import ThreadsTrial
from lightning_feed.measure.windows import WARM_UP_STEPS
from lightning_feed.trials.search import ALIKE
from lightning_feed.trials.tune_loader import Tuned

PROOF_STEPS = 60
"""Steps of each fit, after its warm-up."""
FEWEST_STEPS = 12


# --- other settings of the loader ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Step times of fits, one after the other, with the same training but different loader settings."""

    setting: Setting
    """The fastest of the settings that training was tried with, besides the user's."""
    chosen_ms: float
    """Step time with this setting, with its share of the start of an epoch's workers."""
    own_ms: float
    """Step time with the user's setting, with the same share."""

    @property
    def holds(self) -> bool:
        """True if the setting makes steps shorter by more than repeated trials differ (``ALIKE``)."""
        return ALIKE * self.chosen_ms < self.own_ms


def prove(session: Session, tuned: Tuned, *, seconds: float) -> Proof | None:
    """Train with the setting that the trials chose, and with the user's, to compare their step times.

    Trials only imitate the time of a step: they miss how torch's threads, which wait for each other, are delayed when
    workers take their CPUs. So training without workers is compared, too, if the trials leave that to it. Returns None
    if a fit had too few steps, there is no model, or there is nothing to compare.

    Args:
        session: the session, whose model was trained already. The session has one training loader.
        tuned: the result of the trials.
        seconds: seconds for each of the two or three fits.

    Raises:
        Exception: an error of the user's code.
    """
    others = [setting for setting in (tuned.setting, tuned.without_workers) if setting not in (None, tuned.own)]
    if session.model is None or not others:
        return None
    steps_ms: dict[Setting, float] = {}
    for setting in dict.fromkeys((*filter(None, others), tuned.own)):
        step_ms = _step_ms(session, setting, seconds)
        if step_ms is None:
            return None
        steps_ms[setting] = tuned.with_start_ms(setting, step_ms)
    own_ms = steps_ms.pop(tuned.own)
    fastest = min(steps_ms, key=lambda setting: steps_ms[setting])
    return Proof(setting=fastest, own_ms=own_ms, chosen_ms=steps_ms[fastest])


def proven(tuned: Tuned, proof: Proof) -> Tuned:
    """Return the tuning result after this check: with the user's own setting if no other made steps shorter."""
    figures = f"training itself took {proof.own_ms:.3g} ms a step with {tuned.own}, {proof.chosen_ms:.3g} with"
    reason = f"{figures} {proof.setting}"
    if not proof.holds:
        return replace(tuned, setting=tuned.own, reason=reason)
    if proof.setting == tuned.setting:
        reason = f"{tuned.reason}; {reason}"
    return replace(tuned, setting=proof.setting, reason=reason)


# --- fewer threads of torch ---------------------------------------------------------------------------------------


def threads_left(session: Session, num_workers: int) -> int | None:
    """Return the threads for torch that workers leave CPUs for, at least 1.

    Returns None if there are no workers, torch has no more threads than that already, or the model does not compute on
    the CPU.
    """
    threads = max(1, session.machine.usable_cpus - num_workers)
    if session.model is None or session.device.type != "cpu" or not num_workers:
        return None
    if threads >= torch.get_num_threads():
        return None
    return threads


def try_fewer_threads(session: Session, setting: Setting | None, *, seconds: float) -> ThreadsTrial | None:
    """Train with the threads of torch that workers leave CPUs for, and with torch's present number.

    Torch divides each operation among its threads and waits for the last of them, so that workers who take the CPU of
    one thread delay all (``benchmarks/threads.py``). Returns None if :func:`threads_left` does, or if a fit had too few
    steps.

    Args:
        session: the session, whose model was trained already.
        setting: the setting of the only training loader; None to leave all training loaders as they are.
        seconds: seconds for each of the two fits.

    Raises:
        Exception: an error of the user's code.
    """
    num_workers = own_workers(session) if setting is None else setting.num_workers
    fewer = threads_left(session, num_workers)
    if fewer is None:
        return None
    with _torch_threads(fewer):
        fewer_ms = _step_ms(session, setting, seconds)
    own_ms = _step_ms(session, setting, seconds)
    if fewer_ms is None or own_ms is None:
        return None
    return ThreadsTrial(torch_threads=fewer, num_workers=num_workers, step_ms=fewer_ms, own_ms=own_ms)


def own_workers(session: Session) -> int:
    """Return the workers of all training loaders of the unchanged run."""
    if session.measured is None:
        return 0
    return sum(session.measured.facts.loader.every_num_workers)


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- a fit --------------------------------------------------------------------------------------------------------


def _step_ms(session: Session, setting: Setting | None, seconds: float) -> float | None:
    queue = setting.batches_ahead if setting is not None and setting.prefetch_factor else 0
    fit_length = FitLength(min_steps=FEWEST_STEPS, max_steps=PROOF_STEPS + WARM_UP_STEPS + queue, seconds=seconds)
    with preserve_state(session.train_loaders):
        return time_fit(session, fit_length, own_loaders(session.train_loaders, _made_with(setting)))


def _made_with(setting: Setting | None) -> Callable[[Any], Any]:
    def make(loader: DataLoader[Batch]) -> DataLoader[Batch]:
        copy = idle_clone(loader)
        if setting is None or setting == Setting.of(loader):
            return copy
        return with_setting(copy, setting)

    return make

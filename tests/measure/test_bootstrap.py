"""The interval holds the truth as often as it says, though waits come in bursts; bounded memory; its own dice."""

import math
import random

import pytest

from lightning_feed.measure.step_meter import StepTimes
from lightning_feed.measure.windows import MOST_CHUNKS, WARM_UP_STEPS, Ledger, PairSums, ratio_interval

WORKERS, STEPS, SEEDS, SEEDS_ALONE = 8, 800, 200, 40
TRUE_PCT = 100 * math.exp(0.125) * 10 / (math.exp(0.125) * 10 + 10)


def _round_by_round(seed: int) -> PairSums:
    """All waits of a round are long, or all are short: the workers decode images of the same folder."""
    dice, sums, factor = random.Random(seed), PairSums(), 1.0
    for number in range(STEPS):
        if number % WORKERS == 0:
            factor = dice.lognormvariate(0, 0.5)
        sums.add(10 * factor, 10 * factor + 10)
    return sums


def test_interval_from_blocks_covers_the_true_share_unlike_single_steps() -> None:
    inside = alone = 0
    for seed in range(SEEDS):
        sums = _round_by_round(seed)
        found = sums.interval_pct(WORKERS)
        assert found is not None
        inside += found[0] <= TRUE_PCT <= found[1]
        if seed < SEEDS_ALONE:
            low, high = ratio_interval(sums.data, sums.step, 1)
            alone += 100 * low <= TRUE_PCT <= 100 * high
    assert inside >= 0.9 * SEEDS
    assert alone < 0.8 * SEEDS_ALONE


def test_exactly_periodic_waits_give_an_interval_of_zero_width() -> None:
    """One long wait in each round of eight: blocks of whole rounds are all alike, single steps are not."""
    sums = PairSums()
    for number in range(800):
        wait = 0.0 if number % 8 else 40.0
        sums.add(wait, wait + 10)
    assert sums.interval_pct(8) == pytest.approx((100 * 40 / 120, 100 * 40 / 120))
    low, high = ratio_interval(sums.data, sums.step, 1)
    assert high - low > 0.05


def test_pair_sums_use_bounded_memory_for_many_steps() -> None:
    sums = PairSums()
    for _ in range(100_000):
        sums.add(1.0, 4.0)
        assert len(sums.data) < MOST_CHUNKS
    assert sums.chunk == 128
    assert sum(sums.step) + sums._open[2] == pytest.approx(400_000)
    assert len(sums.data) == len(sums.step) >= MOST_CHUNKS // 2
    assert sums.interval_pct(6) == pytest.approx((25, 25))
    assert sums.step_interval_ns(6) == pytest.approx((4, 4))


def test_mean_step_interval_covers_the_true_mean() -> None:
    truth, inside = 10 * math.exp(0.125) + 10, 0
    for seed in range(SEEDS):
        found = _round_by_round(seed).step_interval_ns(WORKERS)
        assert found is not None
        inside += found[0] <= truth <= found[1]
    assert inside >= 0.9 * SEEDS
    assert PairSums().step_interval_ns() is None


def test_mean_step_interval_widens_when_part_of_the_run_is_slower() -> None:
    """Two runs of the same program, half as fast for some part of them, are within the noise of each other."""
    sums = PairSums()
    for number in range(400):
        sums.add(0.0, 20.0 if 100 <= number < 200 else 10.0)
    low, high = sums.step_interval_ns() or (0.0, 0.0)
    assert low < 10.5
    assert high > 14.5


def test_run_total_has_a_confidence_interval_and_windows_do_not() -> None:
    ledger = Ledger(period=2)
    ledger.fresh += [StepTimes(0, 900, 0, 100, 900, True)] * WARM_UP_STEPS  # would show: 90 %
    ledger.fresh += [StepTimes(10, 40 * (number % 2), 20, 50, 0, True) for number in range(60)]
    stats = ledger.close_window(lost=0, prefetch_active=None)
    assert (stats.starved_low_pct, stats.starved_high_pct) == (None, None)
    total = ledger.total(prefetch_active=None)
    assert total.starved_pct == pytest.approx(20)
    assert (total.starved_low_pct, total.starved_high_pct) == pytest.approx((20, 20))
    assert (total.steps, total.warm_up_steps) == (60, WARM_UP_STEPS)
    short = Ledger()
    short.fresh += [StepTimes(0, 5, 0, 5, 5, True)] * (WARM_UP_STEPS + 19)
    total = short.total(prefetch_active=None)
    assert total.starved_low_pct is None
    assert (total.steps, total.warm_up_steps) == (WARM_UP_STEPS + 19, 0)

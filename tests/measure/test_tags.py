"""Tags come from the dataclasses; what was not measured has none."""

import dataclasses
from typing import Any

import pytest

from lightning_feed.measure.stats import (
    GpuStats,
    LoaderStats,
    RankStats,
    StarvationStats,
    choose_tags,
    custom_scalar_layout,
    tag_table,
    to_tags,
)

FULL = StarvationStats(
    steps=50,
    confidence="medium",
    starved_pct=20.0,
    input_pct=30.0,
    speedup_if_free=1.25,
    prefetch_active=False,
    step_ms=10.0,
    compute_ms=5.0,
    forward_ms=2.0,
    backward_ms=2.5,
    optimizer_ms=0.5,
    copy_ms=1.0,
    data_ms=2.0,
    other_ms=2.0,
    next_wait_ms=3.0,
    hidden_wait_ms=1.0,
    epoch_start_s=0.5,
)


def test_every_figure_has_its_tag() -> None:
    assert to_tags(FULL) == {
        "feed/starved_pct": 20.0,
        "feed/speedup_if_free": 1.25,
        "feed/prefetch_active": 0.0,
        "feed_step/step_ms": 10.0,
        "feed_step/compute_ms": 5.0,
        "feed_step/forward_ms": 2.0,
        "feed_step/backward_ms": 2.5,
        "feed_step/optimizer_ms": 0.5,
        "feed_step/copy_ms": 1.0,
        "feed_step/data_ms": 2.0,
        "feed_step/other_ms": 2.0,
        "feed_host/next_wait_ms": 3.0,
        "feed_host/hidden_wait_ms": 1.0,
        "feed_epoch/start_s": 0.5,
    }


def test_unmeasured_figures_have_no_tag() -> None:
    assert to_tags(StarvationStats(steps=0, confidence="low")) == {}
    assert "feed_epoch/start_s" not in to_tags(dataclasses.replace(FULL, epoch_start_s=None))


def test_tag_table_lists_every_tag() -> None:
    gpu = GpuStats(util_pct=1, sm_pct=1, mem_used_mib=1, power_w=1, pcie_rx_mb_per_s=1)
    loaders = LoaderStats(**{one.name: 1.0 for one in dataclasses.fields(LoaderStats)})
    ranks = RankStats(
        world_size=2, steps=1, max_data_ms=1, slow_rank=1, starved_pct=1, amplification=1, data_ms_by_rank=()
    )
    assert set(tag_table()) == set(to_tags(FULL, gpu, loaders, ranks))


@pytest.mark.parametrize("which", ["core", "all"])
def test_custom_scalar_layout_shows_only_logged_tags(which: Any) -> None:
    categories = custom_scalar_layout(which).values()
    shown = [tag for charts in categories for _, tags in charts.values() for tag in tags]
    assert shown[0] == "feed/starved_pct"
    assert set(shown) <= set(choose_tags(tag_table(), which))


def test_core_tags_are_at_most_twelve() -> None:
    core = choose_tags(tag_table(), "core")
    assert len(core) <= 12
    assert {"feed/starved_pct", "feed_step/step_ms", "feed_epoch/start_s"} < set(core)
    assert choose_tags(tag_table(), "all") == tag_table()

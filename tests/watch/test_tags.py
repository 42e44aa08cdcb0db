"""Tags come from the dataclasses; what was not measured has none."""

import dataclasses

import pytest

from lightning_feed.watch.nvml import GpuStats
from lightning_feed.watch.stats import LoaderStats, RankStats, StarvationStats
from lightning_feed.watch.tags import STACK, custom_scalar_layout, tag_table, to_tags

FULL = StarvationStats(
    steps=50,
    confidence="medium",
    starved_pct=20.0,
    input_pct=30.0,
    speedup_if_free=1.25,
    prefetch_active=False,
    step_ms=10.0,
    compute_ms=5.0,
    h2d_ms=1.0,
    data_idle_ms=2.0,
    other_ms=2.0,
    next_wait_ms=3.0,
    hidden_wait_ms=1.0,
    epoch_start_s=0.5,
)


def test_every_figure_has_its_tag() -> None:
    assert to_tags(FULL) == {
        "feed/starved_pct": 20.0,
        "feed/input_pct": 30.0,
        "feed/speedup_if_free": 1.25,
        "feed/prefetch_active": 0.0,
        "feed_step/step_ms": 10.0,
        "feed_step/compute_ms": 5.0,
        "feed_step/h2d_ms": 1.0,
        "feed_step/data_idle_ms": 2.0,
        "feed_step/other_ms": 2.0,
        "feed_stack/1_compute_ms": 5.0,
        "feed_stack/2_plus_h2d_ms": 6.0,
        "feed_stack/3_plus_data_ms": 8.0,
        "feed_stack/4_plus_other_ms": 10.0,
        "feed_host/next_wait_ms": 3.0,
        "feed_host/hidden_wait_ms": 1.0,
        "feed_epoch/start_s": 0.5,
    }


def test_what_was_not_measured_is_absent() -> None:
    assert to_tags(StarvationStats(steps=0, confidence="low")) == {}
    assert "feed_epoch/start_s" not in to_tags(dataclasses.replace(FULL, epoch_start_s=None))


def test_a_measured_zero_is_logged() -> None:
    assert to_tags(dataclasses.replace(FULL, starved_pct=0.0))["feed/starved_pct"] == 0.0


def test_gpu_figures_stand_beside() -> None:
    tags = to_tags(StarvationStats(steps=0, confidence="low"), GpuStats(util_pct=97.0, power_w=0.0))
    assert tags == {"feed_gpu/util_pct": 97.0, "feed_gpu/power_w": 0.0}


def test_the_table_holds_every_tag() -> None:
    gpu = GpuStats(util_pct=1, sm_pct=1, mem_used_mib=1, power_w=1, pcie_rx_mb_per_s=1)
    loaders = LoaderStats(**{one.name: 1.0 for one in dataclasses.fields(LoaderStats)})
    ranks = RankStats(
        world_size=2, steps=1, max_data_idle_ms=1, slow_rank=1, starved_pct=1, amplification=1, data_idle_ms_by_rank=()
    )
    assert set(tag_table()) == set(to_tags(FULL, gpu, loaders, ranks))


def test_the_layout_shows_tags_that_exist() -> None:
    (charts,) = custom_scalar_layout().values()
    shown = [tag for kind, tags in charts.values() for tag in tags]
    assert set(shown) <= set(tag_table())
    assert shown[: len(STACK)] == list(STACK)
    assert {kind for kind, _ in charts.values()} == {"Multiline"}


@pytest.mark.parametrize("kind", [StarvationStats, RankStats, LoaderStats, GpuStats])
def test_every_field_says_what_it_means(kind: type) -> None:
    import ast
    import inspect
    import textwrap

    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), ast.unparse(field)

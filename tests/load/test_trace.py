"""Stages are named in a trace, and cost nothing but a look where there is no profiler."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.autograd import profiler

from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.stage import PREFIX, Traced, traced

ROOT = Path(__file__).parents[2]


def test_every_trace_stage_is_used_and_documented() -> None:
    code = "".join(path.read_text() for path in (ROOT / "lightning_feed").rglob("*.py") if path.name != "trace.py")
    used = Counter(re.findall(r"\btraced\(\"(\w+)\"\)", code))
    assert set(used) == set(get_args(Traced))
    page = (ROOT / "docs/reference/callbacks.md").read_text().split("## Stages in a profiler's trace")[1]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(get_args(Traced))
    assert f"`{PREFIX}`" in page


@pytest.fixture
def _no_record_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of ours: torch's own DataLoader makes one for each batch, profiler or not."""
    real = profiler.record_function

    def refuse(name: str, *args: Any) -> Any:
        assert not name.startswith(PREFIX), "record_function was constructed"
        return real(name, *args)

    monkeypatch.setattr(profiler, "record_function", refuse)


@pytest.mark.usefixtures("_no_record_function")
def test_no_record_function_is_created_without_a_profiler() -> None:
    assert traced("decode") is traced("loader_next")
    for options in ({}, {"background": 2}, {"workers": "thread", "num_workers": 2}):
        assert len(list(FeedLoader(range(6), batch_size=2, **options))) == 3
    with torch.profiler.profile(), pytest.raises(AssertionError, match="was constructed"):
        traced("decode")
    assert traced("decode") is traced("loader_next")

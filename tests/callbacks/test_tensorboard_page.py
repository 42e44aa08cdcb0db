"""TensorBoard for real: its server reads what a fit has written, and gives it out over HTTP."""

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_feed import GPUStarvationCallback, PrefetchCallback

WAIT_S = 90
STEPS = 120
RUNS = ("core", "all")
"""Which tags a fit logs; its run in TensorBoard is ``fit/core`` or ``fit/all``."""


def _fit(folder: Path, tags: Any) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch.utils.data import DataLoader

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name="fit", version=tags),
        callbacks=[PrefetchCallback(), GPUStarvationCallback(report=False, tags=tags)],
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, STEPS)))


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """``get(path, **query)``: the JSON that a real TensorBoard server answers, on the logs of two short fits."""
    folder = tmp_path_factory.mktemp("logs")
    for tags in RUNS:
        _fit(folder, tags)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    log_file = folder / "server.log"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
    with log_file.open("w") as log:
        server = subprocess.Popen([*command, "--load_fast", "false"], stdout=log, stderr=log)
    try:
        address = _until(lambda: _address(log_file), server, log_file)

        def get(path: str, **query: str) -> Any:
            url = f"{address}data/plugin/{path}?{urllib.parse.urlencode(query)}"
            with opener.open(url, timeout=30) as answer:
                return json.load(answer)

        _until(lambda: {f"fit/{tags}" for tags in RUNS} <= set(get("scalars/tags")), server, log_file)
        yield get
    finally:
        server.kill()
        server.wait(timeout=30)


def _address(log_file: Path) -> str | None:
    """The address that TensorBoard prints: ``TensorBoard 2.21.0 at http://127.0.0.1:41234/ (Press ...)``."""
    words = log_file.read_text().split()
    return next((word for word in words if word.startswith("http://127.0.0.1:") and word.endswith("/")), None)


def _until(condition: Callable[[], Any], server: "subprocess.Popen[bytes]", log_file: Path) -> Any:
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if value := condition():
            return value
        assert server.poll() is None, f"the server ended: {log_file.read_text()}"
        time.sleep(0.2)
    pytest.fail(f"nothing after {WAIT_S} s: {log_file.read_text()}")


@pytest.mark.parametrize(
    "tag",
    [
        "feed/starved_pct",
        "feed/speedup_if_free",
        "feed_step/step_ms",
        "feed_step/compute_ms",
        "feed_step/copy_ms",
        "feed_step/data_ms",
        "feed_step/other_ms",
    ],
)
def test_tensorboard_serves_every_scalar_with_increasing_steps(get: Callable[..., Any], tag: str) -> None:
    rows = get("scalars/scalars", tag=tag, run="fit/all")
    assert rows
    steps = [step for _, step, _ in rows]
    assert steps == sorted(set(steps))
    assert all(0 <= step < STEPS for step in steps)
    assert all(value >= 0 for _, _, value in rows)


def test_the_custom_scalars_layout_names_only_existing_tags(get: Callable[..., Any]) -> None:
    first, parts, *others = get("custom_scalars/layout")["category"]
    assert [chart["multiline"]["tag"] for chart in first["chart"]] == [["feed/starved_pct"]]
    assert all(len(chart["multiline"]["tag"]) == 1 for chart in parts["chart"])  # lines have the colours of runs
    shown = {tag for one in (first, parts, *others) for chart in one["chart"] for tag in chart["multiline"]["tag"]}
    # The server joins the layouts of all runs; a chart of figures that were not measured stays empty.
    served = get("scalars/tags")
    assert {tag for tag in shown if tag.startswith(("feed/", "feed_step/"))} <= set(served["fit/all"])
    assert "feed/starved_pct" in shown & set(served["fit/core"])
    assert "feed/speedup_if_free" not in served["fit/core"]

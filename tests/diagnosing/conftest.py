"""What the tests of diagnose() share."""

import pytest

from lightning_feed.diagnosing import run
from lightning_feed.diagnosing.session import Session

SMALL_FITS = (
    "ignore:.*does not have many workers",
    "ignore:The number of training batches",
    "ignore:Found 1 module.s. in eval mode",  # small_runs keeps one so, to see it kept
)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as a verdict needs, and a third of a second of a loader alone where 3 s are planned."""
    monkeypatch.setattr(run, "QUICK_RUN_STEPS", 20)
    monkeypatch.setattr(run, "QUICK_REPLAY_STEPS", 40)
    counted_s = Session.counted_s
    monkeypatch.setattr(Session, "counted_s", lambda session, share=1.0: min(0.3, counted_s(session, share)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fits are small on purpose."""
    for item in items:
        if "diagnosing" in item.path.parts:
            for said in SMALL_FITS:
                item.add_marker(pytest.mark.filterwarnings(said))

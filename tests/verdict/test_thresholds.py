"""The table of thresholds: complete, explained, and what the documentation says of it."""

import ast
from pathlib import Path

import pytest

from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.verdict import thresholds

ROOT = Path(__file__).parents[2]
VERDICT = ROOT / "lightning_feed" / "verdict"
BODY = ast.parse(Path(thresholds.__file__).read_text()).body
NAMES = {name: value for name, value in vars(thresholds).items() if name.isupper()}


def test_each_threshold_has_its_reason() -> None:
    for definition, reason in zip(BODY[1::2], BODY[2::2], strict=True):
        assert isinstance(definition, ast.Assign)
        assert isinstance(reason, ast.Expr)
    assert len(NAMES) == len(BODY) // 2


def test_each_threshold_is_used_and_other_files_define_none() -> None:
    trees = [ast.parse(path.read_text()) for path in VERDICT.glob("*.py") if path.name != "thresholds.py"]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert NAMES.keys() - used == set()
    numbers = [
        ast.unparse(statement)
        for tree in trees
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, (int, float))
    ]
    assert numbers == []


def pct(name: str) -> str:
    return f"{getattr(thresholds, name):.0f} %"


STATEMENTS = {
    "docs/explanation.md": [
        f"from {pct('FRAMEWORK_PCT')} for `other`, {pct('COPY_PCT')} for the copy and {pct('DATA_PCT')} for data on",
        f"unless it is below {pct('HEADLINE_PCT')} and the step itself takes more",
        f"workers wait for a CPU {pct('RUN_QUEUE_PCT')} of their time",
        f"{pct('HEAD_OF_LINE_PCT')} of the wait is lost to a slow batch",
        f"batches are ready in {pct('HANDOVER_PCT')} of the wait",
        f"that take {OTHERS_PCT:.0f} % of the CPUs or more, confidence is low",
        f"the threads that load then wait for a CPU {pct('RUN_QUEUE_PCT')} of their time",
    ],
    "docs/start.md": [
        f"for {thresholds.DATA_PCT:.0f}, {thresholds.MODERATE_PCT:.0f} or {pct('HIGH_PCT')} of each step or more",
    ],
    "docs/how-to/diagnose.md": [
        f"cannot save {pct('LEAST_GAIN_PCT')} of an epoch, or {pct('LEAST_UNSURE_GAIN_PCT')} when confidence is low",
        f"from {OTHERS_PCT:.0f} % of these CPUs on they may change every figure",
    ],
}


@pytest.mark.parametrize("page", STATEMENTS)
def test_pages_state_the_thresholds_of_the_table(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [statement for statement in STATEMENTS[page] if statement not in text] == []


def test_thresholds_that_pages_state_in_words_have_those_values() -> None:
    """Such as "half of the wait", "half full", "less than half of their time" and "at most three remedies"."""
    assert (thresholds.PIN_SHARE, thresholds.QUEUE_READY_SHARE, thresholds.BLOCKED_PCT) == (0.5, 0.5, 50)
    assert thresholds.MOST_REMEDIES == 3

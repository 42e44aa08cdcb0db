"""The files of ours that a measured loop loads: it must not pay for what it does not use."""

import subprocess
import sys

MOST_FILES = 26
_PROGRAM = """
import sys
from lightning_feed import watch_loader
for _ in watch_loader([1, 2, 3], report=False):
    pass
print(*(m for m, module in sys.modules.items() if m.startswith("lightning_feed") and not hasattr(module, "__path__")))
"""


def test_watch_loader_imports_few_modules() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    loaded = run.stdout.split()
    assert "lightning_feed.measure.loop" in loaded
    assert len(loaded) <= MOST_FILES, loaded
    assert not [name for name in loaded if any(part in name for part in ("dali", "ray", "remote"))]

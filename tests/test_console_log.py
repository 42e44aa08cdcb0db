"""What the package logs is seen in a plain script, once, and nowhere twice."""

import subprocess
import sys

import pytest

PLAIN = "import logging, lightning_feed; logging.getLogger('lightning_feed.x').info('standing aside')"


def _said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (PLAIN, "standing aside\n"),
        (f"import lightning_feed, importlib; importlib.reload(lightning_feed); {PLAIN}", "standing aside\n"),
        (
            f"import logging, lightning_feed; logging.basicConfig(level=logging.INFO); {PLAIN}",
            "INFO:lightning_feed.x:standing aside\n",
        ),
        (f"import logging; logging.getLogger('lightning_feed').setLevel(logging.WARNING); {PLAIN}", ""),
        (PLAIN.replace(".info(", ".debug("), ""),
        (f"import sys; sys.stderr.close(); {PLAIN}", ""),
    ],
)
def test_info_lines_are_printed_unless_logging_is_configured(code: str, said: str) -> None:
    assert _said(code) == said

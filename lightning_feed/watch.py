"""Earlier name of :mod:`lightning_feed.report`, which was ``lightning_feed.watch.reports``."""

import sys

from lightning_feed import report
from lightning_feed.report import compare, document, files

sys.modules[f"{__name__}.reports"] = report
for module in (compare, document, files):
    sys.modules[f"{__name__}.reports.{module.__name__.rpartition('.')[2]}"] = module

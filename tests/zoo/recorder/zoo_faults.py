"""What is planted into projects to slow them down."""

import time
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger


class SlowCallback(Callback):
    """Looks at something after each step."""

    def __init__(self, seconds: float = 0.012) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


class SlowLogger(CSVLogger):
    """A server that is far away."""

    def __init__(self, save_dir: str = "slow_logs", seconds: float = 0.012) -> None:
        super().__init__(save_dir)
        self.seconds = seconds

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)
        super().log_metrics(*args, **kwargs)

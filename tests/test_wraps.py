"""A wrap of a method: it is called in place of the method until it is taken off, and then the method is as before."""

from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from lightning_feed._host import Wrap


class Logger:
    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log_metrics(self, metrics: Any) -> None:
        self.logged.append(metrics)


def doubled(original: Any, metrics: int) -> None:
    original(2 * metrics)


def test_a_method_is_wrapped_and_restored() -> None:
    logger = Logger()
    wrap = Wrap(logger, "log_metrics", doubled)
    logger.log_metrics(1)
    wrap.undo()
    logger.log_metrics(1)
    assert logger.logged == [2, 1]
    assert "log_metrics" not in vars(logger)


@pytest.mark.parametrize("kind", [Mock, MagicMock, lambda: Mock(spec=Logger)])
@pytest.mark.parametrize("times", [1, 2])
def test_a_wrapped_mock_gets_its_method_back(kind: Any, times: int) -> None:
    logger = kind()
    method = logger.log_metrics
    for _ in range(times):
        wrap = Wrap(logger, "log_metrics", doubled)
        logger.log_metrics(1)
        wrap.undo()
        assert logger.log_metrics is method
    logger.log_metrics(5)
    assert [call.args for call in method.call_args_list] == [(2,)] * times + [(5,)]

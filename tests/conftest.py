import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Puts the process's handlers back: set-up of logs, by a reload too, is for the whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

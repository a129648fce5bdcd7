from pathlib import Path

import pytest

from tests.tiny_cosyvoice import build


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete tiny model folder with both layouts of the language model. Read it only."""
    return build(tmp_path_factory.mktemp("tiny-cosyvoice"), layout="both")

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.embedded import Server, write_config


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the embedded default for all tests that only talk to it."""
    server = Server(*write_config(tmp_path_factory.mktemp("embedded")))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(50)
        yield server
        assert asyncio.run_coroutine_threadsafe(server.stop(), loop).result(50) == 0
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

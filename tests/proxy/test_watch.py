"""Files and folders that are written, replaced, taken away and brought back, on the real file system."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.watch import watch


class Watched:
    """Counts what the watcher asks and says, and waits for it."""

    def __init__(self, *names: Path) -> None:
        self.names = list(names)
        self._asked = asyncio.Event()
        self._news = asyncio.Event()

    def ask(self) -> list[Path]:
        self._asked.set()
        return self.names

    def changed(self) -> None:
        self._news.set()

    async def looks(self, count: int) -> None:
        """Until it has looked so many times more."""
        for _ in range(count):
            self._asked.clear()
            await self._asked.wait()

    async def notices(self, change: Callable[[], object]) -> None:
        """Until it has said something after this change."""
        self._news.clear()
        change()
        await self._news.wait()

    async def watches(self, file: Path) -> None:
        """Until it has noticed a write: only then it is certain that it watches."""
        self._news.clear()
        while not self._news.is_set():
            append(file)
            await self.looks(2)


def append(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("#")


@asynccontextmanager
async def watching(*names: Path) -> AsyncIterator[Watched]:
    watched = Watched(*names)
    task = asyncio.create_task(watch(watched.ask, watched.changed, look=0.1))
    try:
        yield watched
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text("{}")
    return tmp_path / "conf/config.yaml"


async def test_a_file_that_is_written_or_replaced_is_noticed(file: Path) -> None:
    async with watching(file) as watched:
        await watched.watches(file)
        (file.parent / "new").write_text("{}")
        await watched.looks(3)  # so that the writes before are not taken for what follows
        await watched.notices(lambda: (file.parent / "new").rename(file))


async def test_changes_of_other_files_leave_no_trace_in_the_log_which_may_be_one_of_them(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with watching(file) as watched:
        await watched.watches(file)
        append(file.parent / "llama-lease.log")
        await watched.looks(3)
        assert [record.name for record in caplog.records if record.name.startswith("watchfiles")] == []


async def test_a_folder_that_goes_is_told_once_and_watched_again_when_it_is_back(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(file) as watched:
        for _ in range(2):
            await watched.watches(file)
            caplog.clear()
            file.parent.rename(tmp_path / "away")
            await watched.looks(5)
            assert caplog.messages == [f"the folder of {file} is gone; the file is read again once it is back"]
            await watched.notices(lambda: (tmp_path / "away").rename(file.parent))
        await watched.watches(file)


async def test_a_folder_that_is_made_anew_at_once_is_watched(file: Path) -> None:
    def replace() -> None:
        shutil.rmtree(file.parent)
        file.parent.mkdir()
        file.write_text("{}")

    async with watching(file) as watched:
        await watched.watches(file)
        await watched.notices(replace)
        await watched.watches(file)


async def test_a_link_that_leads_to_another_folder_is_noticed(file: Path, tmp_path: Path) -> None:
    shutil.copytree(file.parent, tmp_path / "second")
    link, new = tmp_path / "current", tmp_path / "new"
    link.symlink_to(file.parent)
    new.symlink_to(tmp_path / "second")
    async with watching(link / "config.yaml") as watched:
        await watched.watches(file)
        await watched.notices(lambda: new.rename(link))
        shutil.rmtree(file.parent)
        await watched.watches(tmp_path / "second/config.yaml")


async def test_a_folder_that_is_not_there_does_not_keep_the_others_from_being_watched(
    file: Path, tmp_path: Path
) -> None:
    async with watching(file, tmp_path / "none/swap.yaml") as watched:
        await watched.watches(file)


async def test_other_files_are_watched_once_they_are_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    async with watching(file) as watched:
        await watched.watches(file)
        watched.names.append(tmp_path / "swap/swap.yaml")
        await watched.watches(tmp_path / "swap/swap.yaml")

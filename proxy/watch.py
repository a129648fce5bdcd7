"""When to read files again: their folders are watched, since editors replace files, and folders are replaced, too."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from watchfiles import awatch

logger = logging.getLogger(__name__)


class Target(NamedTuple):
    """What a name leads to at this moment, links followed: the file, and which folder it is in."""

    file: Path
    device: int
    inode: int


async def watch(names: Callable[[], Iterable[Path]], changed: Callable[[], object], *, look: float = 1.0) -> None:
    """Call `changed` when one of the files was written, or its name leads to another one. Never ends.

    `names` is asked every `look` seconds: a reload may name other files. A folder that has gone is told once, and
    watched again when it is back.
    """
    # It tells of every change in the folder, and a log that lies there is changed by that.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    known: dict[Path, Target] = {}
    missing: set[Path] = set()
    trouble = ""
    replaced = False  # a folder was: the new one may even have the old one's number
    while True:
        targets = _targets(names())
        for name, target in targets.items():
            if target is None and name not in missing:
                missing.add(name)
                logger.error("the folder of %s is gone; the file is read again once it is back", name)
            elif target is not None and (replaced or name in missing or target != known.get(name, target)):
                missing.discard(name)
                changed()
        known = {name: target for name, target in targets.items() if target is not None}
        folders = {target.file.parent for target in known.values()}
        replaced = False
        try:
            async with aclosing(_look(folders, look)) as looks:
                async for paths in looks:
                    if any(target.file in paths for target in known.values()):
                        changed()
                    replaced = not paths.isdisjoint(folders)
                    if replaced or _targets(names()) != targets:
                        break
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and str(error) != trouble:  # it is told of above
                trouble = str(error)
                logger.error("changes of the configuration are not noticed: %s", trouble)
            await asyncio.sleep(look)


async def _look(folders: Iterable[Path], seconds: float) -> AsyncGenerator[set[Path], None]:
    """What has changed in the folders, a folder itself included; nothing after so many quiet seconds."""
    quiet = round(seconds * 1000)
    async for changes in awatch(*folders, recursive=False, rust_timeout=quiet, yield_on_timeout=True):
        yield {Path(path) for _, path in changes}


def _targets(names: Iterable[Path]) -> dict[Path, Target | None]:
    return {name: _target(name) for name in names}


def _target(name: Path) -> Target | None:
    """None: there is no way to its folder."""
    try:
        file = name.resolve()
        status = file.parent.stat()
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return None
    return Target(file, status.st_dev, status.st_ino)

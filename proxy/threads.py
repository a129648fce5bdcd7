"""Blocking work in a thread that is over, one way or the other, before its caller goes on."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def run(work: Callable[[], T], stop: Callable[[], None], *, patience: float = 30.0) -> T:
    """The result of `work()`, which runs in a worker thread. May be cancelled.

    On cancellation `stop()` is called, which must make `work` end soon, and the thread is waited for before the
    cancellation goes on, so that a lease held around this call is never free while the work still runs. After
    `patience` seconds the thread is given up, with an error in the log.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.wait({thread})
    except asyncio.CancelledError:
        stop()
        await _settled(thread, patience)
        raise
    return thread.result()


async def _settled(thread: "asyncio.Future[T]", patience: float) -> None:
    """Wait for the thread, and do not let a second cancellation cut the wait short."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while not thread.done() and loop.time() < deadline:
        try:
            await asyncio.wait({thread}, timeout=deadline - loop.time())
        except asyncio.CancelledError:
            continue  # the caller raises one anyway
    if not thread.done():
        logger.error("a worker thread did not stop within %.0f s; its work goes on unwatched", patience)
        return
    if not thread.cancelled():
        thread.exception()  # looked at, so that the loop does not report it as lost

"""The bytes between a thread that makes audio and a client that may read it slowly.

Small amounts stay in memory, more goes to a temporary file, and from a bound on the thread has to wait. So a slow
reader does not hold the GPU, and an endless one does not fill the disk.
"""

import asyncio
import tempfile
import threading
from typing import IO


class Closed(Exception):
    """The other side is not there any more: stop."""


class Spool:
    """One writer thread, one reader in the event loop, one ending.

    The writer calls `put` ... `put`, then `finish`, with an error if the bytes are not complete. The reader calls
    `take` until it returns None, then looks at `error`; `close` ends it early.
    """

    def __init__(self, *, memory: int = 1 << 20, limit: int = 1 << 28) -> None:
        """At most `memory` bytes are held in memory and `limit` bytes in all."""
        self._limit = limit
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=memory)  # noqa: SIM115 closed in close()
        self._changed = threading.Condition()
        self._read = self._written = 0  # positions in the file
        self._finished = self._closed = False
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    @property
    def error(self) -> BaseException | None:
        """Why the bytes are not complete; final once `take` has returned None."""
        return self._error

    @property
    def size(self) -> int:
        """Bytes that wait for the reader."""
        return self._written - self._read

    def put(self, data: bytes) -> None:
        """Writer. Waits while the spool is full. Raises Closed when the reader has left."""
        if not data:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._written - self._read < self._limit)
            if self._closed:
                raise Closed
            self._file.seek(self._written)
            self._file.write(data)
            self._written += len(data)
        self._tell()

    def finish(self, error: BaseException | None = None) -> None:
        """Writer. Nothing more comes. The first call counts."""
        with self._changed:
            if not self._finished:
                self._finished, self._error = True, error
        self._tell()

    async def take(self, size: int = 1 << 16) -> bytes | None:
        """Reader. The next bytes, at most `size`, as soon as there are some; None after the last.

        May be cancelled: no byte is lost. Raises Closed after `close`, which is no end of the bytes.
        """
        while True:
            self._news.clear()
            with self._changed:
                if self._closed:
                    raise Closed
                if self._read < self._written:
                    return self._next(size)
                if self._finished:
                    return None
            await self._news.wait()

    def close(self) -> None:
        """Reader, or whoever ends both: drops what is left and makes the writer stop."""
        with self._changed:
            self._closed = True
            self._read = self._written = 0
            self._file.close()
            self._changed.notify_all()
        self._news.set()

    def _next(self, size: int) -> bytes:
        self._file.seek(self._read)
        data = self._file.read(min(size, self._written - self._read))
        self._read += len(data)
        if self._read == self._written:
            # The reader keeps up: the file starts again, so that it stays small however long the audio is.
            self._file.seek(0)
            self._file.truncate()
            self._read = self._written = 0
        self._changed.notify_all()
        return data

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:
            return  # the loop has ended, and its readers with it

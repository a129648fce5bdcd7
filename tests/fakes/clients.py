"""A client made of one bare socket, to send and read exactly as slowly and as badly as a test wants."""

import asyncio
import json
import socket
from typing import Any, Self
from urllib.parse import urlsplit


class RawClient:
    """One connection. `async with RawClient(url) as client:` then send, read, or hang up at any point.

    small_buffers: let the kernel hold as little unread data as it can, so that a slow reader is felt at once.
    """

    def __init__(self, url: str, *, small_buffers: bool = False) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self._small = small_buffers
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        sock = socket.socket()
        if self._small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        limit = 4096 if self._small else 2**20
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=limit)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.hang_up()

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, method: str, path: str, length: int | None = 0, **headers: str) -> None:
        """Request line and headers (with _ for -); `length` None: no Content-Length."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def post(self, path: str, fields: dict[str, Any], **headers: str) -> None:
        """A whole JSON request."""
        body = json.dumps(fields).encode()
        await self.head("POST", path, len(body), Content_Type="application/json", **headers)
        await self.send(body)

    async def upload(self, path: str, body: bytes, piece: int, between: float = 0.0, **headers: str) -> None:
        """A whole request, its body sent `piece` bytes at a time, `between` seconds apart."""
        await self.head("POST", path, len(body), **headers)
        for at in range(0, len(body), piece):
            await self.send(body[at : at + piece])
            await asyncio.sleep(between)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        """(status, headers with lower-case names) of the next answer, a 1xx counted as one."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:-2])
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def read(self, count: int) -> bytes:
        """Exactly so many raw bytes, chunk framing included."""
        return await self._reader.readexactly(count)

    async def read_until(self, mark: bytes) -> bytes:
        """Raw bytes up to and with `mark`."""
        return await self._reader.readuntil(mark)

    async def read_rest(self) -> bytes:
        """All until the server closes."""
        return await self._reader.read()

    async def read_body(self, headers: dict[str, str]) -> bytes:
        """The body that belongs to these headers. Raises IncompleteReadError when the connection is cut."""
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self._reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return body

    def hang_up(self, *, reset: bool = False) -> None:
        """Close the connection; `reset`: as a crashed program would, without a farewell."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()

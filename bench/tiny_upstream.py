"""The smallest model server: a fixed JSON answer, or 200 server-sent events that each say when they left.

`python -m bench.tiny_upstream PORT`. `"stream": true` asks for events; `"seed": N` puts N microseconds
between them (a field that every proxy passes on), 0 sends each as soon as the loop turns. The text of an event
is `t<nanoseconds>;` on CLOCK_MONOTONIC, which all processes of a machine share.
"""

import asyncio
import json
import re
import sys
import time
from typing import cast

import uvloop

EVENTS = 200
_SEED = re.compile(rb'"seed": ?(\d+)')
_MESSAGE = {"role": "assistant", "content": "ash birch cedar elm fir hazel larch maple oak pine"}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19}
_JSON = json.dumps({
    "id": "chatcmpl-tiny", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}], "usage": _USAGE,
}).encode()  # fmt: skip
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_JSON), _JSON)
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (b'data: {"id":"chatcmpl-tiny","object":"chat.completion.chunk","created":0,"model":"m","choices":'
          b'[{"index":0,"delta":{"content":"t%d;"},"finish_reason":null}]}\n\n')  # fmt: skip
_LAST = (b'data: {"id":"chatcmpl-tiny","object":"chat.completion.chunk","created":0,"model":"m","choices":'
         b'[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')  # fmt: skip


class TinyServer(asyncio.Protocol):
    """One connection; requests with a Content-Length or without a body."""

    def __init__(self) -> None:
        self.buffer = b""
        self.transport: asyncio.Transport
        self.streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self.streaming:
            self.streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            at = self.buffer[:end].lower().find(b"content-length:")
            length = int(self.buffer[at + 15 : end].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            if b'"stream": true' in body or b'"stream":true' in body:
                seed = _SEED.search(body)
                self.streaming = asyncio.ensure_future(self.stream(int(seed[1]) / 1e6 if seed else 0.0))
            else:
                self.transport.write(_ANSWER)

    async def stream(self, between: float) -> None:
        """EVENTS events, each a chunk and a write of its own, on an absolute timetable."""
        self.transport.write(_STREAM)
        due = time.monotonic()
        for _ in range(EVENTS):
            due += between
            await asyncio.sleep(max(0.0, due - time.monotonic()) if between else 0)
            self.chunk(_EVENT % time.monotonic_ns())
        self.chunk(_LAST)
        self.transport.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        """One chunk."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(port: int) -> None:
    """Serve on 127.0.0.1 until ended."""
    server = await asyncio.get_running_loop().create_server(TinyServer, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

"""What a FaultyUpstream can do to a request. Each is a Behaviour, or makes one."""

import asyncio
import gzip
import itertools
import json

from tests.fakes.answers import JSON, answer, event
from tests.fakes.faulty import Behaviour, Exchange

CHAT = answer("/chat/completions", "m", {"messages": [{"role": "user", "content": "hello"}], "stream": True})
"""A whole and correct SSE answer."""
TEXT = answer("/chat/completions", "m", {"messages": [{"role": "user", "content": "hello"}]})
"""A whole and correct JSON answer."""


async def ok(exchange: Exchange) -> None:
    """A whole answer: SSE where the request asks for it, else JSON."""
    if not exchange.wants_stream:
        await exchange.whole(200, TEXT.body)
        return
    await exchange.open_stream()
    for piece in CHAT.pieces:
        await exchange.chunk(piece)
    await exchange.end()


async def dies_before_headers(exchange: Exchange) -> None:
    """Reads the request and resets the connection."""
    exchange.cut()


async def dies_in_mid_stream(exchange: Exchange) -> None:
    """Three events, then a reset in the middle of a chunk."""
    await exchange.open_stream()
    for piece in CHAT.pieces[:3]:
        await exchange.chunk(piece)
    await exchange.raw(b"40\r\ndata: {")
    await asyncio.sleep(0.02)  # a reset discards what the kernel has not delivered yet
    exchange.cut()


async def dies_in_mid_body(exchange: Exchange) -> None:
    """Half of a JSON body whose length was announced, then the end of the connection."""
    await exchange.head(200, {"Content-Type": JSON, "Content-Length": str(len(TEXT.body))})
    await exchange.raw(TEXT.body[: len(TEXT.body) // 2])
    exchange.writer.close()


async def truncated(exchange: Exchange) -> None:
    """Three events and a clean end of the body: no finish_reason, no [DONE]."""
    await exchange.open_stream()
    for piece in CHAT.pieces[:3]:
        await exchange.chunk(piece)
    await exchange.end()


async def error_appended(exchange: Exchange) -> None:
    """Three events, then an error object as bare JSON, then a clean end."""
    await exchange.open_stream()
    for piece in CHAT.pieces[:3]:
        await exchange.chunk(piece)
    await exchange.chunk(json.dumps({"error": {"message": "load failed", "type": "server_error"}}).encode())
    await exchange.end()


def refuses(status: int, **headers: str) -> Behaviour:
    """An OpenAI error object with this status; headers with _ for -."""

    async def behave(exchange: Exchange) -> None:
        body = json.dumps({"error": {"message": "not now", "type": "server_error", "param": None, "code": None}})
        await exchange.whole(status, body.encode(), {n.replace("_", "-"): v for n, v in headers.items()})

    return behave


def busy(retry_after: int = 1) -> Behaviour:
    """429 with Retry-After."""
    return refuses(429, Retry_After=str(retry_after))


def loading() -> Behaviour:
    """503, as a llama-server says while its model loads."""
    return refuses(503)


async def one_byte_chunks(exchange: Exchange) -> None:
    """A correct SSE answer, each byte a chunk and a write of its own."""
    await exchange.open_stream()
    for at in range(len(CHAT.body)):
        await exchange.chunk(CHAT.body[at : at + 1])
    await exchange.end()


async def gzipped(exchange: Exchange) -> None:
    """A JSON answer, gzip-encoded, with the length of what is sent."""
    await exchange.whole(200, gzip.compress(TEXT.body), {"Content-Encoding": "gzip"})


def huge(size: int) -> Behaviour:
    """`size` bytes of a repeated pattern in chunks of 64 KiB."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": "application/octet-stream", "Content-Length": str(size)})
        block = bytes(range(256)) * 256
        for start in range(0, size, len(block)):
            await exchange.raw(block[: min(len(block), size - start)])

    return behave


async def never_answers(exchange: Exchange) -> None:
    """Reads the request and says nothing until the client goes."""
    await exchange.gone.wait()


def stalls_after(events: int) -> Behaviour:
    """So many events of a stream, then silence until the client goes."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open_stream()
        for piece in CHAT.pieces[:events]:
            await exchange.chunk(piece)
        await exchange.gone.wait()

    return behave


def slow(seconds: float, then: Behaviour = ok) -> Behaviour:
    """Waits, then behaves."""

    async def behave(exchange: Exchange) -> None:
        await asyncio.sleep(seconds)
        await then(exchange)

    return behave


async def early_hints(exchange: Exchange) -> None:
    """102 and 103 come before the real answer."""
    await exchange.raw(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
    await ok(exchange)


async def endless(exchange: Exchange) -> None:
    """Events as fast as the reader takes them, for ever."""
    await exchange.open_stream()
    for count in itertools.count():
        await exchange.chunk(event({"choices": [{"index": 0, "delta": {"content": f"{count} "}}]}))
        if count % 100 == 0:
            await asyncio.sleep(0)

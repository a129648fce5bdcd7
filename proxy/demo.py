"""`llama-lease demo`: overlapping chat streams, a speech request in between, embeddings throughout.

It is a client like any other: what it prints about waiting comes from the Server-Timing header of each answer.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp

_PROMPT = "Write a short story about a lighthouse keeper who shares one lamp with three neighbours."
_TEXT = "The lamp is yours now. Two chats were reading by it when you came, and you waited for them alone."


class DemoFailed(Exception):
    """The demo could not be shown; the message says what the server answered."""


@dataclass(frozen=True)
class Row:
    """One request as its client saw it. Seconds; `sent` from the start of the demo."""

    name: str
    sent: float
    waited: float
    first: float
    ended: float


class Demo:
    """One run against one server."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url
        self._start = time.monotonic()

    async def chat(self, name: str, model: str) -> Row:
        """A stream of some length."""
        body = {
            "model": model,
            "stream": True,
            "max_tokens": 120,
            "messages": [{"role": "user", "content": _PROMPT}],
        }
        return await self._ask(name, "/v1/chat/completions", body)

    async def speak(self, name: str, model: str) -> Row:
        """A sentence or two, as they are made."""
        body = {"model": model, "input": _TEXT, "response_format": "pcm"}
        return await self._ask(name, "/v1/audio/speech", body)

    async def embed(self, name: str, model: str) -> Row:
        """A vector, which takes no turn."""
        return await self._ask(name, "/v1/embeddings", {"model": model, "input": "one lamp, three neighbours"})

    async def _ask(self, name: str, path: str, body: Mapping[str, object]) -> Row:
        sent = self._now()
        first = 0.0
        try:
            async with self._client.post(self._url + path, json=body) as answer:
                if answer.status != 200:
                    raise DemoFailed(f"{name}: {answer.status} {(await answer.text())[:300]}")
                async for data in answer.content.iter_any():
                    if not first and not data.startswith(b":"):
                        first = self._now()
        except aiohttp.ClientError as error:
            raise DemoFailed(f"{name}: no answer from {self._url}: {error}") from None
        timing = re.search(r"lease;dur=([\d.]+)", answer.headers.get("Server-Timing", ""))
        waited = float(timing[1]) / 1000 if timing else max(0.0, first - sent)
        return Row(name, sent, waited, first, self._now())

    def _now(self) -> float:
        return time.monotonic() - self._start


async def run(url: str, api_key: str, chat: str, embedding: str, speech: str, streams: int) -> str:
    """Run the demo and return its table. Raises DemoFailed."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
        demo = Demo(client, url.rstrip("/"))
        tasks: list[asyncio.Task[Row]] = []

        async def later(seconds: float, ask: Callable[[str, str], Awaitable[Row]], name: str, model: str) -> Row:
            await asyncio.sleep(seconds)
            return await ask(name, model)

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(streams):
                    tasks.append(group.create_task(later(index * 0.5, demo.chat, f"chat {index + 1}", chat)))
                tasks.append(group.create_task(later(0.75, demo.speak, "speech", speech)))
                for index in range(3 if embedding else 0):
                    pause, name = 0.25 + index * 0.75, f"embedding {index + 1}"
                    tasks.append(group.create_task(later(pause, demo.embed, name, embedding)))
        except* DemoFailed as failures:
            raise failures.exceptions[0] from None
    return render([task.result() for task in tasks], speech)


def render(rows: list[Row], speech: str) -> str:
    """The table, in order of sending, and what it shows."""
    lines = ["request       sent   waited   first byte   ended   (seconds from the start)"]
    for row in sorted(rows, key=lambda row: row.sent):
        lines.append(f"{row.name:<12}{row.sent:6.2f}{row.waited:9.2f}{row.first:13.2f}{row.ended:8.2f}")
    spoken = next(row for row in rows if row.name == "speech")
    before = [row for row in rows if row.name.startswith("chat") and row.sent < spoken.sent]
    after = [row for row in rows if row.name.startswith("chat") and row.sent > spoken.sent]
    granted = spoken.sent + spoken.waited
    passed = [row for row in after if row.sent + row.waited < granted - 0.01]
    embeddings = [row.waited for row in rows if row.name.startswith("embedding")]
    lines.append("")
    lines.append(
        f"'{speech}' came at {spoken.sent:.2f} s, behind {len(before)} chats, and had the GPU at {granted:.2f} s."
    )
    lines.append(f"Of the {len(after)} chats that came after it, {len(passed)} had the GPU before it.")
    if passed:
        lines.append(
            "Those came while the chat model's room was still opening; the room then closed, as the order says."
        )
    if embeddings:
        lines.append(f"Embeddings take no turn with them: they waited {max(embeddings):.2f} s at most.")
    return "\n".join(lines)

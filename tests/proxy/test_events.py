"""The feed of GET /lease/events: what is kept, where a reader goes on, what is told, and who is dropped."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.events import EventFeed, stream
from proxy.facts import FACTS, Facts
from proxy.lease import Kind, LeaseEvent
from proxy.line import Mode, Ticket
from proxy.tracing import NoTracing
from tests.proxy.lines import Clock
from tests.proxy.speech_server import speech_server

UNIX = 1_700_000_000.0


class Story:
    """A feed, its clock, and tickets to which things happen."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.feed = EventFeed(clock=self.clock, wall=lambda: UNIX, **settings)
        self.tickets = 0

    def comes(self, model: str = "qwen", mode: Mode = Mode.READ) -> Ticket:
        self.tickets += 1
        ticket = Ticket(f"r{self.tickets}", model, "chat", mode, arrived=self.clock.now, number=self.tickets)
        self.tell("queued", ticket)
        return ticket

    def granted(self, ticket: Ticket, swaps: bool = False) -> None:
        ticket.granted, ticket.swaps = self.clock.now, swaps
        self.tell("granted", ticket)

    def opened(self, ticket: Ticket) -> None:
        ticket.opened = self.clock.now
        self.tell("opened", ticket)

    def released(self, ticket: Ticket, reason: str = "done") -> None:
        ticket.released = self.clock.now
        self.tell("released", ticket, reason)

    def tell(self, kind: Kind, ticket: Ticket, reason: str = "") -> None:
        self.feed.on_lease_event(LeaseEvent(kind, "gpu0", ticket, self.clock.now, reason))

    def told(self, last_event_id: str | None = None) -> list[dict[str, Any]]:
        batch = self.feed.after(self.feed.position(last_event_id).number)
        assert batch is not None
        return [self.feed.describe(event) for _, event in batch]


def test_a_ticket_s_life_is_told_in_order_with_its_times_in_unix_time() -> None:
    story = Story()
    ticket = story.comes()
    story.clock.now = 3
    story.granted(ticket, swaps=True)
    story.clock.now = 10
    story.opened(ticket)
    story.clock.now = 14.5
    story.released(ticket)
    told = story.told()
    assert [event["kind"] for event in told] == ["queued", "granted", "opened", "released"]
    assert told[-1] == {
        "kind": "released",
        "at": UNIX + 14.5,
        "lease": "gpu0",
        "ticket": 1,
        "request": "r1",
        "model": "qwen",
        "group": "chat",
        "mode": "read",
        "arrived": UNIX,
        "granted": UNIX + 3,
        "swap": True,
        "overtook": False,
        "opened": UNIX + 10,
        "reason": "done",
    }


def test_an_event_that_is_read_late_tells_no_more_than_was_known_when_it_happened() -> None:
    story = Story()
    ticket = story.comes()
    story.granted(ticket)
    story.opened(ticket)
    queued, granted, opened = story.told()
    assert "granted" not in queued
    assert "granted" in granted
    assert "opened" not in granted
    assert "opened" in opened


def test_a_swap_is_a_fact_of_the_grant_and_no_event_of_its_own() -> None:
    story = Story()
    story.granted(story.comes(), swaps=True)
    story.tell("swap", Ticket("r1", "qwen", "chat", Mode.READ))
    assert [event["kind"] for event in story.told()] == ["queued", "granted"]


@pytest.mark.parametrize("kind", ["rejected", "timeout", "cancelled"])
def test_one_who_was_never_granted_ends_without_a_grant(kind: Kind) -> None:
    story = Story()
    story.tell(kind, story.comes(), "why")
    ending = story.told()[-1]
    assert (ending["kind"], ending["reason"]) == (kind, "why")
    assert "granted" not in ending


def test_a_reader_goes_on_behind_its_last_event() -> None:
    story = Story()
    ticket = story.comes()
    seen = story.feed.last_id
    story.granted(ticket)
    assert [event["kind"] for event in story.told(seen)] == ["granted"]
    assert story.told(story.feed.last_id) == []


@pytest.mark.parametrize("id", ["nonsense", "00000000-1", "", "-", "{run}-99", "{run}-x", "{run}--1", "{run}-²"])
def test_an_id_that_is_not_of_this_run_starts_at_the_beginning(id: str) -> None:
    story = Story()
    story.comes()
    run = story.feed.last_id.partition("-")[0]
    position = story.feed.position(id.format(run=run))
    assert (position.number, position.lost) == (0, "unknown" if id else "")


def test_events_over_ten_minutes_old_are_not_sent_and_then_forgotten() -> None:
    story = Story()
    old = story.comes()
    first = story.feed.last_id
    story.clock.now = 601
    story.granted(old)
    assert [event["kind"] for event in story.told()] == ["granted"]
    story.clock.now = 700
    story.opened(old)
    assert story.feed.position(first).lost == ""  # nothing that came after it is gone
    assert story.feed.position(f"{first.partition('-')[0]}-0").lost == "too_old"


def test_the_ring_has_a_bound_whatever_the_age() -> None:
    story = Story(most=100)
    for _ in range(1000):
        story.comes()
        story.clock.now += 0.1
    assert len(story.told()) == 100
    assert repr(story.feed).endswith("110 kept>")
    assert story.feed.since == pytest.approx(UNIX + 90)


def test_it_says_from_when_on_it_knows_everything() -> None:
    story = Story()
    story.clock.now = 30
    assert story.feed.since == UNIX
    story.clock.now = 1000
    assert story.feed.since == UNIX + 400


def test_a_reader_that_starts_at_the_edge_is_not_left_behind_at_once() -> None:
    story = Story(most=100)
    for _ in range(500):
        story.comes()
    number = story.feed.position(None).number
    story.comes()
    assert story.feed.after(number) is not None


def test_a_reader_that_the_ring_has_left_behind_is_told_so() -> None:
    story = Story(most=100)
    story.comes()
    for _ in range(500):
        story.comes()
    assert story.feed.after(1) is None


def test_much_is_read_in_pieces() -> None:
    story = Story()
    for _ in range(5):
        story.comes()
    first = story.feed.after(0, most=2)
    assert first is not None
    assert [number for number, _ in first] == [1, 2]
    rest = story.feed.after(2, most=9)
    assert rest is not None
    assert [number for number, _ in rest] == [3, 4, 5]


class Reader:
    """A client of /lease/events: blocks, as they come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def block(self) -> dict[str, str]:
        """Fields of the next event; comments and `retry` alone are passed over."""
        while True:
            text = (await self.response.content.readuntil(b"\n\n")).decode()
            fields = dict(line.split(": ", 1) for line in text.split("\n") if ": " in line[1:])
            if fields.keys() - {"retry"}:
                return fields

    async def event(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((await self.block())["data"])
        return told


@asynccontextmanager
async def reading(client: aiohttp.ClientSession, path: str = "/lease/events", **headers: str) -> AsyncIterator[Reader]:
    async with client.get(path, headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield Reader(response)


async def chat(client: aiohttp.ClientSession, **headers: str) -> None:
    fields = {"model": "qwen", "stream": True, "messages": [{"role": "user", "content": "the-secret-prompt"}]}
    async with client.post("/v1/chat/completions", json=fields, headers=headers) as response:
        await response.read()


async def test_a_reader_follows_a_request_from_the_queue_to_its_end(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, reading(server.client) as reader:
        await chat(server.client, **{"X-Request-Id": "mine"})
        told = [await reader.event() for _ in range(4)]
    assert [event["kind"] for event in told] == ["queued", "granted", "opened", "released"]
    assert {event["request"] for event in told} == {"mine"}


async def test_a_reader_that_comes_back_has_missed_nothing(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        async with reading(server.client) as reader:
            await chat(server.client, **{"X-Request-Id": "one"})
            last = [await reader.block() for _ in range(4)][-1]["id"]
        await chat(server.client, **{"X-Request-Id": "two"})
        async with reading(server.client, **{"Last-Event-ID": last}) as reader:
            told = [await reader.event() for _ in range(4)]
    assert [event["kind"] for event in told] == ["queued", "granted", "opened", "released"]
    assert {event["request"] for event in told} == {"two"}


async def test_the_state_and_the_feed_meet_without_a_gap(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        await chat(server.client)
        state = await server.json("GET", "/lease")
        async with reading(server.client, **{"Last-Event-ID": state["events"]["last"]}) as reader:
            await chat(server.client, **{"X-Request-Id": "later"})
            assert (await reader.event())["request"] == "later"


async def test_a_reader_of_another_run_is_told_to_start_over_and_gets_all_that_is_kept(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        await chat(server.client)
        async with reading(server.client, **{"Last-Event-ID": "cafe0123-7"}) as reader:
            reset = await reader.block()
            assert (reset["event"], json.loads(reset["data"])) == ("reset", {"reason": "unknown"})
            assert (await reader.event())["kind"] == "queued"


async def test_the_feed_has_no_prompt_no_output_and_no_key(tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_keys=["the-secret-key"]) as server:
        async with server.client.post("/v1/audio/speech", json={"model": "tts", "input": "the-secret-input."}) as reply:
            await reply.read()
        await chat(server.client)
        async with reading(server.client) as reader:
            text = str([await reader.block() for _ in range(8)])
    assert "secret" not in text
    assert "birch" not in text  # what the fake model says


async def test_a_reader_needs_a_key_where_there_are_keys(tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_keys=["right"]) as server:
        status, _ = await server.error("GET", "/lease/events", headers={"Authorization": "Bearer wrong"})
        assert status == 401


async def test_readers_do_not_count_as_requests_or_as_clients_that_left(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        before = _counts(server.runtime.metrics.render()[0])
        async with reading(server.client) as reader:
            await chat(server.client)
            await reader.event()
        await chat(server.client)  # the server has noticed by now that the reader has gone
        after = _counts(server.runtime.metrics.render()[0])
    assert after["requests"] - before["requests"] == 2
    assert after["disconnects"] == before["disconnects"] == 0


def _counts(page: bytes) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in page.decode().splitlines()]

    def total(name: str) -> float:
        return sum(float(value) for series, _, value in lines if series.startswith(f"llama_lease_{name}_total{{"))

    return {"requests": total("requests"), "disconnects": total("client_disconnects")}


async def test_the_server_stops_although_somebody_reads(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        async with speech_server(tmp_path) as server:
            url = f"{server.url}/lease/events"
            reader = await stack.enter_async_context(reading(client, url))
        assert await reader.response.content.read() == b"retry: 1000\n\n"  # to a proper end


@asynccontextmanager
async def small_server(feed: EventFeed, **times: float) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """host and port of a server with nothing but the feed; the event: a stream has ended."""
    ended = asyncio.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        request[FACTS] = Facts("id", "/lease/events", NoTracing().request_span({}, "").__enter__())
        try:
            return await stream(request, feed, **times)
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/lease/events", events)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}", ended
    finally:
        await runner.cleanup()


async def test_a_quiet_feed_shows_that_it_is_alive() -> None:
    async with (
        small_server(EventFeed(), alive=0.01) as (address, _),
        aiohttp.ClientSession(f"http://{address}") as client,
        client.get("/lease/events") as response,
    ):
        assert await response.content.readuntil(b": alive\n\n") == b"retry: 1000\n\n: alive\n\n"


@asynccontextmanager
async def idle_reader(address: str) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has the head of the feed and takes nothing more by itself."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        writer.write(b"GET /lease/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_reader_that_takes_nothing_does_not_hold_up_the_end() -> None:
    story = Story()
    async with small_server(story.feed, stall=3600) as (address, ended), idle_reader(address):
        for _ in range(1000):
            story.comes("a model with a very long name " * 1000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.3)
        story.feed.close()
        await ended.wait()


async def test_a_reader_that_takes_nothing_is_dropped() -> None:
    story = Story()
    async with small_server(story.feed, stall=0.05) as (address, ended), idle_reader(address) as reader:
        while not ended.is_set():
            story.comes("a model with a very long name " * 1000)
            await asyncio.sleep(0)
        assert not (await reader.read()).endswith(b"0\r\n\r\n")  # cut, without a proper end

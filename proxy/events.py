"""The feed behind GET /lease/events: what happened to every ticket in the last ten minutes, then what happens now.

1. All readers share one ring, and a reader is a position in it: a slow one costs no memory. One that takes nothing for
   `STALL` seconds, or that the ring has left behind, is dropped; it can come back with its Last-Event-ID.
2. An id is RUN-NUMBER. After an id of this run that the ring still reaches back to, nothing is missed. After any other,
   a `reset` event says so, and the ring is sent from its start.
3. An event has names, times and outcomes; never a prompt, an output or a key.
4. The lease's listener costs one append. Events become JSON when somebody reads them: what an event tells about its
   ticket has been written down by then, and does not change any more.
"""

import asyncio
import json
import secrets
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from aiohttp import web

from proxy import facts, sse
from proxy.errors import LeaseClosed
from proxy.lease import LeaseEvent

KEPT = 600.0
MOST = 20_000
GRACE = 0.1
"""Share by which the ring is longer than promised, so that a reader that starts at its edge is not left behind at once."""
BATCH = 100
"""Events that are written at a time: as JSON they take a millisecond or so, in which nothing else runs."""
ALIVE = 15.0
STALL = 30.0

_ENDS = frozenset({"released", "rejected", "timeout", "cancelled"})
_TOLD = _ENDS | {"queued", "granted", "opened"}  # a swap and an overtake are facts of the grant


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has come. `lost`: why it cannot go on after the id it gave, "" if it can."""

    number: int
    lost: str = ""


class EventFeed:
    """A listener for every lease. `clock` is the leases' own, `wall` is Unix time; both in seconds.

    `keep`: seconds that an event is kept; `most`: events, whatever their age.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        keep: float = KEPT,
        most: int = MOST,
    ) -> None:
        self._clock = clock
        self._keep = keep
        self._most = most
        self._longest = keep * (1 + GRACE)
        self._largest = round(most * (1 + GRACE))
        self._ring: deque[LeaseEvent] = deque()
        self._last = 0
        self._run = secrets.token_hex(4)
        # One offset for the whole run: intervals stay exact when the wall clock is set.
        self._offset = wall() - clock()
        self._began = clock()
        self._news = asyncio.Event()
        self._writing: set[asyncio.Timeout] = set()
        self.closed = False

    def __repr__(self) -> str:
        return f"<EventFeed {self.last_id}, {len(self._ring)} kept>"

    def on_lease_event(self, event: LeaseEvent) -> None:
        """Called by the leases."""
        if event.kind not in _TOLD:
            return
        ring = self._ring
        ring.append(event)
        self._last += 1
        if len(ring) > self._largest:
            ring.popleft()
        oldest = event.at - self._longest
        while ring[0].at < oldest:
            ring.popleft()
        self._news.set()

    @property
    def last_id(self) -> str:
        """The id of the newest event. "RUN-0" before the first."""
        return f"{self._run}-{self._last}"

    @property
    def since(self) -> float:
        """From when on everything that happened is known, in Unix time."""
        full = self._last - self._start() == self._most
        oldest = self._ring[-self._most].at if full else self._began
        return self.unix(max(oldest, self._clock() - self._keep))

    @property
    def now(self) -> float:
        """Unix time, by this feed's offset."""
        return self.unix(self._clock())

    def unix(self, at: float) -> float:
        """A time of the leases' clock as Unix time, to the millisecond."""
        return round(at + self._offset, 3)

    def position(self, last_event_id: str | None) -> Position:
        """Where to go on for a reader that gives this id; None: at the start of the ring."""
        start = self._start()
        if not last_event_id:
            return Position(start)
        run, _, number = last_event_id.partition("-")
        if run != self._run or not (number.isascii() and number.isdigit()) or int(number) > self._last:
            return Position(start, lost="unknown")
        if int(number) < self._last - len(self._ring):
            return Position(start, lost="too_old")
        return Position(int(number))

    def after(self, number: int, most: int = BATCH) -> Sequence[tuple[int, LeaseEvent]] | None:
        """The next events after this number, oldest first; none: there are no newer; None: the ring has moved on."""
        new = self._last - number
        if new > len(self._ring):
            return None
        start = len(self._ring) - new
        if start < new:  # a deque is walked from the nearer end
            batch = list(islice(self._ring, start, start + most))
        else:
            batch = list(islice(reversed(self._ring), max(0, new - most), new))[::-1]
        return list(enumerate(batch, number + 1))

    def encode(self, number: int, event: LeaseEvent) -> bytes:
        """One event as it is sent."""
        data = json.dumps(self.describe(event), separators=(",", ":"))
        return f"id: {self._run}-{number}\nevent: ticket\ndata: {data}\n\n".encode()

    def describe(self, event: LeaseEvent) -> dict[str, Any]:
        """What an event tells: whose, which, and the times so far, in Unix time."""
        ticket, kind = event.ticket, event.kind
        told: dict[str, Any] = {
            "kind": kind,
            "at": self.unix(event.at),
            "lease": event.lease,
            "ticket": ticket.number,
            "request": ticket.id,
            "model": ticket.model,
            "group": ticket.group,
            "mode": str(ticket.mode),
            "arrived": self.unix(event.at if ticket.arrived is None else ticket.arrived),
        }
        if kind != "queued" and ticket.granted is not None:
            told |= {"granted": self.unix(ticket.granted), "swap": ticket.swaps, "overtook": ticket.overtakes}
            if kind != "granted" and ticket.opened is not None:
                told["opened"] = self.unix(ticket.opened)
        if kind in _ENDS:
            told["reason"] = event.reason
        return told

    async def news(self, timeout: float) -> None:
        """Until something has happened, the feed is closed, or `timeout` seconds are over.

        The caller has looked at `after` and has not awaited anything since.
        """
        self._news.clear()  # whoever waits for it already has been woken
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """End all streams; the server stops, and waits for no reader."""
        self.closed = True
        self._news.set()
        for limit in self._writing:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def write(self, response: web.StreamResponse, data: bytes, stall: float) -> None:
        """Send to one reader. Raises TimeoutError after `stall` seconds, and when the feed is closed meanwhile."""
        async with asyncio.timeout(stall) as limit:
            self._writing.add(limit)
            try:
                await response.write(data)
            finally:
                self._writing.discard(limit)

    def _start(self) -> int:
        """The number before the first event that a new reader gets."""
        oldest = self._clock() - self._keep
        fresh = len(self._ring) - bisect_left(self._ring, oldest, key=lambda event: event.at)
        return self._last - min(fresh, self._most)


async def stream(
    request: web.Request, feed: EventFeed, *, alive: float = ALIVE, stall: float = STALL
) -> web.StreamResponse:
    """Answer with the feed until the reader goes, the server stops, or the reader takes nothing for `stall` seconds.

    `alive`: a comment is sent after so many quiet seconds. Raises LeaseClosed when the server stops already.
    """
    if feed.closed:
        raise LeaseClosed
    facts.of(request).watches = True
    response = web.StreamResponse(headers=sse.headers())
    await response.prepare(request)
    position = feed.position(request.headers.get("Last-Event-ID"))
    number = position.number
    try:
        await feed.write(response, _greeting(position), stall)
        while not feed.closed and (batch := feed.after(number)) is not None:
            if batch:
                await feed.write(response, b"".join(feed.encode(*numbered) for numbered in batch), stall)
                number = batch[-1][0]
                continue
            seen = feed.last_id
            await feed.news(alive)
            if seen == feed.last_id and not feed.closed:
                await feed.write(response, b": alive\n\n", stall)
    except (TimeoutError, ConnectionError):
        _drop(request)
    else:
        if not feed.closed or _lags(request):
            _drop(request)
    return response


def _greeting(position: Position) -> bytes:
    """A reader learns at once that it is connected, and whether it must start over."""
    retry = b"retry: 1000\n\n"
    if not position.lost:
        return retry
    return retry + b"event: reset\ndata: " + json.dumps({"reason": position.lost}).encode() + b"\n\n"


def _lags(request: web.Request) -> bool:
    """Its client has not taken everything that was written."""
    return request.transport is not None and request.transport.get_write_buffer_size() > 0


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def routes(feed: EventFeed) -> Iterator[tuple[str, str, Callable[[web.Request], Any]]]:
    """(methods, path, endpoint)."""

    async def events(request: web.Request) -> web.StreamResponse:
        return await stream(request, feed)

    yield "GET", "/lease/events", events

"""Every metric of the server, in one place: the names, labels and units of the metrics page come from here.

1. Label values come from the configuration (`Known`) or from the short fixed lists below; anything else is `other`, so
   that a client which invents model names or paths makes no series.
2. Every way in which a wait can end is observed: a histogram of grants alone hides the worst waits. Who is still
   waiting shows in the gauges, which are computed when they are asked for.
3. `render` costs in the number of series, never of waiters, and takes no lock.
4. All methods are for the event loop's thread. None raises for an unknown name.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proxy import __version__
from proxy.line import Ticket
from proxy.series import CONTENT_TYPE, Distribution, Family, Registry, Value

if TYPE_CHECKING:
    from proxy.lease import LeaseEvent

PREFIX = "llama_lease_"
OTHER = "other"

# The upper edges are where real clients give up: 5, 60, 120, 300 and 600 seconds.
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 180, 300, 600)
HOLD_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
FIRST_AUDIO_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30)

MODES = ("read", "write", "none")
OUTCOMES = ("granted", "timeout", "cancelled", "rejected")
REJECTIONS = ("full", "timeout", "shutdown", "model_failed")
PHASES = ("queued", "upstream", "streaming")
UPSTREAM_ERRORS = ("connect", "timeout", "reset", "truncated", "5xx", "429")
HEARTBEATS = ("comment", "chunk", "ping", "space")
RESULTS = ("success", "failure")
_CODES = frozenset(str(status.value) for status in HTTPStatus) | {"499"}  # 499: the client closed the connection


@dataclass(frozen=True)
class Known:
    """The names that the configuration gives; made anew at each reload."""

    leases: Mapping[str, float] = field(default_factory=dict)  # name -> max_hold in seconds
    groups: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name -> (lease, mode)
    upstreams: frozenset[str] = frozenset()
    backends: frozenset[str] = frozenset()
    routes: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class _Place:
    """The tickets of one (lease, mode, group), when each came and when each was granted, oldest first; its series."""

    lease: str
    mode: str
    waits: dict[str, Distribution]  # by outcome
    holds: Distribution
    busy: Value | None  # None for mode none, which excludes nobody
    depth: Value
    holders: Value
    waiting: dict[Ticket, float] = field(default_factory=dict)  # by object: a client may choose an id that is in use
    active: dict[Ticket, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Sharing:
    """The places that hold a lease now, and up to when their time has been counted."""

    places: set[_Place] = field(default_factory=set)
    since: float = 0.0

    def count(self, now: float) -> None:
        for place in self.places:
            if place.busy is not None:
                place.busy.add(max(0.0, now - self.since) / len(self.places))
        self.since = now


class Metrics(Collector):
    """Told what happens by everybody; read by Prometheus alone. `clock` must be the leases' own clock, in seconds."""

    def __init__(self, known: Known, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[tuple[str, str, str], _Place] = {}
        self._where: dict[Ticket, _Place] = {}  # a reload must not move a ticket to another place
        self._sharing: dict[str, _Sharing] = {}
        self._declare(Registry(PREFIX))
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.build_info(__version__).set(1)
        self.config_last_reload_success_timestamp_seconds().set(time.time())
        self.config_last_reload_successful().set(1)
        self.reconfigure(known)
        self.registry = CollectorRegistry()  # the same numbers for prometheus_client's own writers
        self.registry.register(self)

    def _declare(self, r: Registry) -> None:
        self._families = r
        ticket = ("lease", "mode", "group")
        self.lease_wait_seconds = r.histogram(
            "lease_wait_seconds", "Time in the queue, however it ended.", (*ticket, "outcome"), WAIT_BUCKETS
        )
        self.lease_hold_seconds = r.histogram(
            "lease_hold_seconds", "Time from the grant to the release.", ticket, HOLD_BUCKETS
        )
        self.queue_depth = r.gauge("queue_depth", "Requests that wait for the lease now.", ticket)
        self.leases_active = r.gauge("leases_active", "Requests that hold the lease now.", ticket)
        self.queue_oldest_wait_seconds = r.gauge(
            "queue_oldest_wait_seconds", "How long the oldest waiting request has waited.", ("lease", "mode")
        )
        self.lease_oldest_hold_seconds = r.gauge(
            "lease_oldest_hold_seconds", "How long the oldest holder has held the lease.", ("lease", "mode")
        )
        self.lease_max_hold_seconds = r.gauge(
            "lease_max_hold_seconds", "The configured max_hold, after which a holder is cancelled.", ("lease",)
        )
        self.lease_busy_seconds_total = r.counter(
            "lease_busy_seconds_total",
            "Time in which a group held the lease; groups that hold it together share it equally.",
            ("lease", "group"),
        )
        self.swaps_total = r.counter("swaps_total", "Grants that changed which models are resident.", ("lease",))
        self.overtakes_total = r.counter("overtakes_total", "Grants that passed an older waiting request.", ("lease",))
        self.queue_rejected_total = r.counter(
            "queue_rejected_total", "Requests that were refused a place or lost it.", ("lease", "reason")
        )
        self.client_disconnects_total = r.counter(
            "client_disconnects_total", "Clients that went away before their answer was complete.", ("phase",)
        )
        self.requests_total = r.counter("requests_total", "Answered requests.", ("route", "group", "code"))
        self.request_duration_seconds = r.histogram(
            "request_duration_seconds", "Whole request, the wait included.", ("route", "group"), REQUEST_BUCKETS
        )
        self.time_to_first_byte_seconds = r.histogram(
            "time_to_first_byte_seconds",
            "From the grant to the first byte of the answer: without the wait.",
            ("route", "group"),
            FIRST_BYTE_BUCKETS,
        )
        self.upstream_errors_total = r.counter(
            "upstream_errors_total", "Upstream exchanges that failed.", ("upstream", "kind")
        )
        self.heartbeats_total = r.counter("heartbeats_total", "Signs of life sent to waiting clients.", ("kind",))
        self.speech_first_audio_seconds = r.histogram(
            "speech_first_audio_seconds", "From the grant to the first audio.", ("backend",), FIRST_AUDIO_BUCKETS
        )
        backend = ("backend",)
        self.speech_audio_seconds_total = r.counter("speech_audio_seconds_total", "Audio made, in seconds.", backend)
        self.speech_synthesis_seconds_total = r.counter(
            "speech_synthesis_seconds_total", "Time spent making audio.", backend
        )
        self.speech_tokens_total = r.counter("speech_tokens_total", "Speech tokens generated.", backend)
        self.speech_characters_total = r.counter("speech_characters_total", "Characters of text spoken.", backend)
        self.config_reloads_total = r.counter("config_reloads_total", "Reloads of the configuration.", ("result",))
        self.config_last_reload_success_timestamp_seconds = r.gauge(
            "config_last_reload_success_timestamp_seconds", "When a configuration was last accepted, Unix time."
        )
        self.config_last_reload_successful = r.gauge(
            "config_last_reload_successful", "1 if the last configuration that was tried was accepted, else 0."
        )
        self.build_info = r.gauge("build_info", "1, with the version as label.", ("version",))

    def reconfigure(self, known: Known) -> None:
        """Take the names of a new configuration. Series of names that are gone stay: counters must not fall back.

        What can happen gets its series at zero now: `increase()` does not see the first event of a new series.
        """
        self.known = known
        for lease, max_hold in known.leases.items():
            self.lease_max_hold_seconds(lease).set(max_hold)
            self.swaps_total(lease)
            self.overtakes_total(lease)
            for reason in REJECTIONS:
                self.queue_rejected_total(lease, reason)
        for group, (lease, mode) in known.groups.items():
            self._place(lease, mode, group)
        for phase in PHASES:
            self.client_disconnects_total(phase)
        for kind in HEARTBEATS[:3]:
            self.heartbeats_total(kind)
        for upstream in known.upstreams:
            for kind in UPSTREAM_ERRORS:
                self.upstream_errors_total(upstream, kind)
        for backend in known.backends:
            self.speech_first_audio_seconds(backend)
            for family in self._speech_counters():
                family(backend)
        for result in RESULTS:
            self.config_reloads_total(result)

    def _speech_counters(self) -> tuple[Family[Value], ...]:
        return (
            self.speech_audio_seconds_total,
            self.speech_synthesis_seconds_total,
            self.speech_tokens_total,
            self.speech_characters_total,
        )

    # The lease

    def on_lease_event(self, event: "LeaseEvent") -> None:
        """A listener for every lease. Counts each ticket's wait once and its hold once."""
        ticket = event.ticket
        match event.kind:
            case "queued":
                self._place_of(event).waiting[ticket] = _arrived(event)
            case "granted":
                self._granted(event, self._ended_waiting(event, "granted"))
            case "released":
                self._released(event)
            case "rejected":
                self._ended_waiting(event, "rejected")
                self.queue_rejected(event.lease, event.reason)
                self._where.pop(ticket, None)
            case "timeout":
                self._ended_waiting(event, "timeout")
                self.queue_rejected(event.lease, "timeout")
                self._where.pop(ticket, None)
            case "cancelled":
                self._ended_waiting(event, "cancelled")
                if event.reason == "shutdown":
                    self.queue_rejected(event.lease, "shutdown")
                self._where.pop(ticket, None)
            case "swap":
                self.swaps_total(self._lease(event.lease)).add()
            case "overtake":
                self.overtakes_total(self._lease(event.lease)).add()
            case _:
                pass  # opened, closed: the page's timeline shows them

    def _ended_waiting(self, event: "LeaseEvent", outcome: str) -> _Place:
        place = self._place_of(event)
        place.waiting.pop(event.ticket, None)
        place.waits[outcome].observe(max(0.0, event.at - _arrived(event)))
        return place

    def _granted(self, event: "LeaseEvent", place: _Place) -> None:
        if not place.active and place.busy is not None:
            sharing = self._sharing[place.lease]
            sharing.count(event.at)
            sharing.places.add(place)
        place.active[event.ticket] = event.at

    def _released(self, event: "LeaseEvent") -> None:
        place = self._where.pop(event.ticket, None)
        granted = place.active.pop(event.ticket, None) if place else None
        if place is None or granted is None:
            return
        place.holds.observe(max(0.0, event.at - granted))
        if not place.active and place.busy is not None:
            sharing = self._sharing[place.lease]
            sharing.count(event.at)
            sharing.places.discard(place)

    def _place_of(self, event: "LeaseEvent") -> _Place:
        place = self._where.get(event.ticket)
        if place is None:
            ticket = event.ticket
            place = self._place(self._lease(event.lease), _among(str(ticket.mode), MODES), self._group(ticket.group))
            self._where[ticket] = place
        return place

    def _place(self, lease: str, mode: str, group: str) -> _Place:
        key = lease, mode, group
        place = self._places.get(key)
        if place is None:
            self._sharing.setdefault(lease, _Sharing())
            place = self._places[key] = _Place(
                lease,
                mode,
                waits={outcome: self.lease_wait_seconds(*key, outcome) for outcome in OUTCOMES},
                holds=self.lease_hold_seconds(*key),
                busy=self.lease_busy_seconds_total(lease, group) if mode != "none" else None,
                depth=self.queue_depth(*key),
                holders=self.leases_active(*key),
            )
        return place

    # Requests, upstreams, speech, configuration

    def request_finished(self, route: str, group: str, code: int, seconds: float, first_byte: float | None) -> None:
        """`seconds`: the whole request. `first_byte`: seconds from the grant to the answer's first byte, if it came."""
        route, group = _among(route, self.known.routes), self._group(group)
        self.requests_total(route, group, _among(str(code), _CODES)).add()
        self.request_duration_seconds(route, group).observe(seconds)
        if first_byte is not None:
            self.time_to_first_byte_seconds(route, group).observe(first_byte)

    def disconnected(self, phase: str) -> None:
        """A client went away while its request was queued, at the upstream (no byte yet), or streaming."""
        self.client_disconnects_total(_among(phase, PHASES)).add()

    def upstream_error(self, upstream: str, kind: str) -> None:
        self.upstream_errors_total(_among(upstream, self.known.upstreams), _among(kind, UPSTREAM_ERRORS)).add()

    def heartbeat(self, kind: str) -> None:
        self.heartbeats_total(_among(kind, HEARTBEATS)).add()

    def queue_rejected(self, lease: str, reason: str) -> None:
        """For refusals that no lease event tells of: model_failed. Events count full, timeout and shutdown."""
        self.queue_rejected_total(self._lease(lease), _among(reason, REJECTIONS)).add()

    def speech_first_audio(self, backend: str, seconds: float) -> None:
        self.speech_first_audio_seconds(_among(backend, self.known.backends)).observe(seconds)

    def speech_done(
        self, backend: str, audio_seconds: float, synthesis_seconds: float, tokens: int, characters: int
    ) -> None:
        """Also for a speech that was cut short: what was made was made."""
        backend = _among(backend, self.known.backends)
        amounts = (audio_seconds, synthesis_seconds, tokens, characters)
        for family, amount in zip(self._speech_counters(), amounts, strict=True):
            family(backend).add(amount)

    def config_reloaded(self, ok: bool) -> None:
        """For each reload, not for the first load."""
        self.config_reloads_total(RESULTS[0] if ok else RESULTS[1]).add()
        self.config_last_reload_successful().set(1 if ok else 0)
        if ok:
            self.config_last_reload_success_timestamp_seconds().set(time.time())

    # The page

    def render(self) -> tuple[bytes, str]:
        """The metrics page in Prometheus' text format, and its content type."""
        self._refresh(self._clock())
        return self._families.text().encode() + generate_latest(self._process), CONTENT_TYPE

    def collect(self) -> Iterator[Metric]:
        """The same as prometheus_client's objects: slower, for its other formats."""
        self._refresh(self._clock())
        yield from self._families.collect()

    def _refresh(self, now: float) -> None:
        waits: dict[tuple[str, str], float] = {}
        holds: dict[tuple[str, str], float] = {}
        for place in self._places.values():
            place.depth.set(len(place.waiting))
            place.holders.set(len(place.active))
            for tickets, oldest in ((place.waiting, waits), (place.active, holds)):
                key = place.lease, place.mode
                since = next(iter(tickets.values()), now)
                oldest[key] = max(oldest.get(key, 0.0), now - since)
        for (lease, mode), seconds in waits.items():
            self.queue_oldest_wait_seconds(lease, mode).set(seconds)
        for (lease, mode), seconds in holds.items():
            self.lease_oldest_hold_seconds(lease, mode).set(seconds)
        for sharing in self._sharing.values():
            sharing.count(now)

    def _lease(self, name: str) -> str:
        return _among(name, self.known.leases)

    def _group(self, name: str) -> str:
        return _among(name, self.known.groups)


def _among(value: str, known: "Mapping[str, object] | frozenset[str] | tuple[str, ...]") -> str:
    return value if value in known else OTHER


def _arrived(event: "LeaseEvent") -> float:
    return event.at if event.ticket.arrived is None else event.ticket.arrived

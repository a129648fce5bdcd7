"""Replays a trace through the real Line with a virtual clock, and through llama-swap's own scheduler, to compare them.

The machine: models that exclude each other take turns on the GPU, loading one takes its `load`, stopping one takes no
time, and requests that run side by side do not slow each other down. A wait is the time from a request's arrival until
its work begins: in the queue, and for its model to load.

llama-swap's scheduler knows no modes: it runs side by side what we let write one after the other. Its limit of requests
per model, past which it refuses, is left out: refused requests would make its waits look better than they are.
"""

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.classify import Classifier
from proxy.config import Config
from proxy.errors import NotFound
from proxy.line import Line, Mode, Policy, Residency, Ticket
from proxy.residency import Exclusive
from proxy.residency import Residency as Rules
from proxy.rooms import residency_of
from proxy.trace import Request, Trace
from proxy.usual import Usual

PATIENCES = (5.0, 60.0, 120.0, 300.0)
"""Seconds after which clients give up: a voice assistant's satellite, and the usual settings of proxies and SDKs."""


@dataclass(frozen=True, slots=True)
class Place:
    """How the requests for one model are treated."""

    mode: Mode
    group: str
    load: float
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a trace is replayed on."""

    places: Mapping[str, Place]
    residency: Residency

    @classmethod
    def of(cls, trace: Trace) -> "Machine":
        """The machine that a trace itself describes."""
        places = {name: Place(model.mode, model.group, model.load) for name, model in trace.models.items()}
        return cls(places, Rules([Exclusive(trace.exclusive)]))

    @classmethod
    def configured(cls, trace: Trace, config: Config, lease: str) -> "Machine":
        """The same models under the groups, limits and residency of a configuration; what it does not know is as the
        trace says. Raises ConfigError."""
        classifier = Classifier(config)
        places: dict[str, Place] = {}
        for name, model in trace.models.items():
            group = model.group
            if group not in config.groups:
                with contextlib.suppress(NotFound):
                    group = classifier.plan("POST", "/v1/chat/completions", name).group
            section = config.groups.get(group)
            mode = model.mode if section is None else section.mode
            limit = config.upstreams[section.upstream].max_in_flight if section and section.upstream else None
            places[name] = Place(mode, group, model.load, limit)
        return cls(places, residency_of(config, lease) or cls.of(trace).residency)


@dataclass(slots=True)
class Outcome:
    """One replay. `waits`: (group, seconds) of each request in order of arrival."""

    waits: list[tuple[str, float]] = field(default_factory=list)
    swaps: int = 0
    makespan: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """Statistics of one policy, over all requests or those of one group. Seconds; `given_up`: shares of requests."""

    policy: str
    group: str
    count: int
    mean: float
    p50: float
    p95: float
    longest: float
    given_up: Mapping[float, float]
    swaps: int
    makespan: float


def policies(policy: Policy) -> dict[str, Policy | None]:
    """The usual line-up, around the settings of a configuration. None: llama-swap's own scheduler."""
    patience = policy.patience or 45.0
    return {
        "llama-swap": None,
        "fifo": Policy(order="fifo"),
        "phases": Policy("phases", policy.slice, policy.max_slice, 0.0),
        f"phases + {patience:g} s": Policy("phases", policy.slice, policy.max_slice, patience),
    }


def run(trace: Trace, machine: Machine | None = None, policy: Policy | None = None) -> list[Row]:
    """Replays a trace under each of the `policies`; all requests first, then group by group."""
    machine = machine or Machine.of(trace)
    rows: list[Row] = []
    for name, one in policies(policy or Policy()).items():
        outcome = replay_swapper(trace, machine) if one is None else replay(trace, machine, one)
        rows += statistics(name, outcome)
    return rows


def render(rows: Sequence[Row]) -> str:
    """The rows as a table for people."""
    patiences = [f">{patience:g} s" for patience in PATIENCES]
    head = ["policy", "group", "requests", "mean", "p50", "p95", "longest", *patiences, "swaps", "makespan"]
    cells = [
        [
            row.policy,
            row.group,
            str(row.count),
            *(f"{seconds:.1f}" for seconds in (row.mean, row.p50, row.p95, row.longest)),
            *(f"{row.given_up[patience]:.1%}" for patience in PATIENCES),
            *((str(row.swaps), f"{row.makespan:.0f}") if row.group == "all" else ("", "")),
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]
    lines = []
    for line in (head, *cells):
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        padded[:2] = [cell.ljust(width) for cell, width in zip(line[:2], widths, strict=False)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def statistics(policy: str, outcome: Outcome) -> list[Row]:
    """One row for all, and one for each group where there are several."""
    groups: dict[str, list[float]] = {}
    for group, wait in outcome.waits:
        groups.setdefault(group, []).append(wait)
    everything = {"all": [wait for _, wait in outcome.waits]}
    return [
        Row(
            policy,
            group,
            len(waits),
            math.fsum(waits) / len(waits) if waits else 0.0,
            *_percentiles(sorted(waits)),
            {patience: sum(wait > patience for wait in waits) / max(1, len(waits)) for patience in PATIENCES},
            outcome.swaps,
            outcome.makespan,
        )
        for group, waits in (everything | (groups if len(groups) > 1 else {})).items()
    ]


def _percentiles(waits: Sequence[float]) -> tuple[float, float, float]:
    """p50, p95 and the longest, by nearest rank."""
    if not waits:
        return 0.0, 0.0, 0.0
    return waits[math.ceil(0.5 * len(waits)) - 1], waits[math.ceil(0.95 * len(waits)) - 1], waits[-1]


class _Clock:
    """Events in order of time; those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.last = 0.0

    def at(self, time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._order), what))

    def run(self, requests: Sequence[Request], arrive: Callable[[int, Request], None]) -> float:
        """Lets everything happen, arrivals after what else happens at their time; the time of the last event."""
        heap, now = self._heap, 0.0
        for number, request in enumerate(requests):
            while heap and heap[0][0] <= request.at:
                now, _, what = heapq.heappop(heap)
                what(now)
            arrive(number, request)
        while heap:
            now, _, what = heapq.heappop(heap)
            what(now)
        return now


def replay(trace: Trace, machine: Machine, policy: Policy) -> Outcome:
    """A trace through a Line in front of a swapper that loads what is asked for."""
    usual = Usual()
    line = Line(policy, machine.residency, usual)
    clock = _Clock()
    outcome = Outcome()
    waits = [0.0] * len(trace.requests)
    ready: dict[str, float] = {}  # when the model loaded last serves, or has begun to
    work: dict[Ticket, tuple[int, float]] = {}

    def arrive(number: int, request: Request) -> None:
        place = machine.places[request.model]
        ticket = Ticket("", request.model, place.group, place.mode, place.limit)
        work[ticket] = number, request.work
        start(line.join(ticket, request.at), request.at)

    def start(granted: Sequence[Ticket], now: float) -> None:
        for ticket in granted:
            if ticket.swaps or ticket.model not in ready:
                outcome.swaps += 1
                ready[ticket.model] = now + machine.places[ticket.model].load
            if ready[ticket.model] > now:
                clock.at(ready[ticket.model], lambda then, ticket=ticket: begin(ticket, then))  # type: ignore[misc]
            else:
                begin(ticket, now)

    def begin(ticket: Ticket, now: float) -> None:
        number, seconds = work.pop(ticket)
        waits[number] = now - trace.requests[number].at
        line.opened(ticket, now)
        clock.at(now + seconds, lambda then: end(ticket, then))

    def end(ticket: Ticket, now: float) -> None:
        granted = line.leave(ticket, now)
        usual.learn(ticket)
        start(granted, now)

    last = clock.run(trace.requests, arrive)
    return _finish(outcome, trace, machine, waits, last)


def replay_swapper(trace: Trace, machine: Machine) -> Outcome:
    """A trace through llama-swap's own scheduler.

    1. A model that is being loaded: wait for that load.  2. A model that is resident: served at once, whoever waits.
    3. A load in progress conflicts: queue.  4. Loading would stop a model that still has requests: queue.
    5. Else stop what must stop, and load. The queue is looked at, oldest first, when a load or a model's last request
    has ended; all that waits for one model is decided alike.
    """
    rules = machine.residency
    clock = _Clock()
    outcome = Outcome()
    waits = [0.0] * len(trace.requests)
    resident: frozenset[str] = frozenset()
    loading: dict[str, list[int]] = {}
    running: dict[str, int] = {}
    queue: dict[str, list[int]] = {}

    def arrive(number: int, request: Request) -> None:
        if not decide(request.model, [number], request.at):
            queue.setdefault(request.model, []).append(number)

    def decide(model: str, numbers: list[int], now: float) -> bool:
        nonlocal resident
        if model in loading:  # (1)
            loading[model] += numbers
            return True
        if model in resident:  # (2)
            serve(model, numbers, now)
            return True
        there = frozenset(resident | loading.keys())
        stopped = there - rules.after(there, frozenset(), model)
        if stopped & loading.keys() or any(running.get(other) for other in stopped):  # (3) (4)
            return False
        resident -= stopped  # (5)
        loading[model] = numbers
        outcome.swaps += 1
        clock.at(now + machine.places[model].load, lambda then: loaded(model, then))
        return True

    def loaded(model: str, now: float) -> None:
        nonlocal resident
        resident |= {model}
        serve(model, loading.pop(model), now)
        retry(now)

    def serve(model: str, numbers: list[int], now: float) -> None:
        running[model] = running.get(model, 0) + len(numbers)
        for number in numbers:
            request = trace.requests[number]
            waits[number] = now - request.at
            clock.at(now + request.work, lambda then: done(model, then))

    def done(model: str, now: float) -> None:
        running[model] -= 1
        if not running[model]:
            retry(now)

    def retry(now: float) -> None:
        for model in sorted(queue, key=lambda model: queue[model][0]):
            if decide(model, queue[model], now):
                del queue[model]

    last = clock.run(trace.requests, arrive)
    return _finish(outcome, trace, machine, waits, last)


def _finish(outcome: Outcome, trace: Trace, machine: Machine, waits: Sequence[float], last: float) -> Outcome:
    if trace.requests:
        outcome.makespan = last - trace.requests[0].at
    outcome.waits = [
        (machine.places[request.model].group, wait) for request, wait in zip(trace.requests, waits, strict=True)
    ]
    return outcome

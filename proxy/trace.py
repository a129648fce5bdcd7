"""Traces: which models were asked for when, and how long they worked. No prompts, no names of clients. Pure.

A trace is a file of JSON lines. The head says what is known about the models,

    {"models": {"chat": {"mode": "read", "group": "chat", "load": 12.0}, ...}, "exclusive": [["chat", "vision"], ...]}

(`load`: seconds until it serves; `exclusive`: of each list one model at a time), and each further line is one request:
`at` (seconds since the beginning), `model`, `work` (seconds that it needs once its model is loaded).
"""

import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from proxy.errors import ConfigError
from proxy.lease import LeaseEvent
from proxy.line import Mode, Ticket


class Request(NamedTuple):
    """One request of a trace. Times in seconds."""

    at: float
    model: str
    work: float


@dataclass(frozen=True, slots=True)
class Model:
    """What a trace says about a model. `load` in seconds."""

    mode: Mode
    group: str
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and the models that they ask for."""

    models: Mapping[str, Model]
    exclusive: Sequence[Sequence[str]]
    requests: Sequence[Request]

    def lines(self) -> Iterator[str]:
        """The file, line by line, without line ends."""
        models = {name: {"mode": str(m.mode), "group": m.group, "load": m.load} for name, m in self.models.items()}
        yield json.dumps({"models": models, "exclusive": [list(names) for names in self.exclusive]})
        for request in self.requests:
            yield json.dumps(request._asdict())


def read(lines: Iterable[str], name: str = "trace") -> Trace:
    """Parses a file. Raises ConfigError that names the line and the field."""
    models: dict[str, Model] = {}
    exclusive: list[list[str]] = []
    requests: list[Request] = []
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if number == 1:
                models = {str(key): _model(str(key), value) for key, value in data["models"].items()}
                exclusive = [[str(model) for model in names] for names in data.get("exclusive", ())]
            else:
                requests.append(_request(data, models))
        except KeyError as error:
            raise ConfigError(f"{name}:{number}: {error} is missing") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name}:{number}: {error}") from None
    if not number:
        raise ConfigError(f"{name}: is empty")
    return Trace(models, exclusive, sorted(requests))


def poisson(
    models: Mapping[str, Model],
    gaps: Mapping[str, float],
    works: Mapping[str, float],
    *,
    seconds: float,
    seed: int,
    exclusive: Sequence[Sequence[str]],
) -> Trace:
    """Requests that know nothing of each other: of each model one every `gaps` seconds on average, with gamma-distributed
    work of shape 2 and mean `works`."""
    rng = random.Random(seed)
    requests = []
    for model, gap in gaps.items():
        at = rng.expovariate(1 / gap)
        while at < seconds:
            requests.append(Request(round(at, 3), model, round(rng.gammavariate(2, works[model] / 2), 3)))
            at += rng.expovariate(1 / gap)
    return Trace(models, exclusive, sorted(requests))


class Recorder:
    """A listener for leases that remembers the last tickets, as far as a trace needs them."""

    def __init__(self, *, keep: int = 20_000) -> None:
        self._tickets: dict[str, deque[_Seen]] = {}
        self._keep = keep

    def on_lease_event(self, event: LeaseEvent) -> None:
        """Takes in the end of a ticket that asked for a model."""
        ticket = event.ticket
        if event.kind not in ("released", "timeout", "cancelled") or ticket.model in ("", "*"):
            return
        tickets = self._tickets.setdefault(event.lease, deque(maxlen=self._keep))
        tickets.append(_Seen.of(ticket))

    def trace(self, lease: str, excludes: Callable[[str, str], bool] = lambda one, other: False) -> Trace:
        """What is remembered of a lease. `excludes` says which models cannot be resident together."""
        seen = sorted(self._tickets.get(lease, ()))
        works, loads = _means(seen, "work"), _means(seen, "load")
        models = {s.model: Model(s.mode, s.group, round(loads.get(s.model, 0.0), 3)) for s in seen}
        names = sorted(models)
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if excludes(a, b)]
        start = seen[0].arrived if seen else 0.0
        requests = [
            Request(
                round(s.arrived - start, 3), s.model, round(works.get(s.model, 0.0) if s.work is None else s.work, 3)
            )
            for s in seen
        ]
        return Trace(models, pairs, requests)


class _Seen(NamedTuple):
    arrived: float
    model: str
    mode: Mode
    group: str
    work: float | None  # None: not to be seen from this ticket
    load: float | None

    @classmethod
    def of(cls, ticket: Ticket) -> "_Seen":
        """Work begins with the grant, or, where the model had to be loaded, when its room has opened. For the one who
        opened it with an answer in one piece nothing is left of it then."""
        work = load = None
        granted, opened, released = ticket.granted, ticket.opened, ticket.released
        if granted is not None and opened is not None and released is not None:
            room = ticket.room
            begins = granted if room is None or room.opened is None else max(granted, room.opened)
            if begins < released and (begins < opened or opened < released):
                work = released - begins
            if ticket.swaps:
                load = opened - granted
        return cls(ticket.arrived or 0.0, ticket.model, ticket.mode, ticket.group, work, load)


def _means(seen: Sequence[_Seen], what: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in seen:
        value = getattr(one, what)
        if value is not None:
            values.setdefault(one.model, []).append(value)
    return {model: statistics.fmean(several) for model, several in values.items()}


def _model(name: str, data: Any) -> Model:
    load = float(data.get("load", 0.0))
    if not load >= 0:
        raise ValueError(f"models.{name}.load: must not be negative")
    return Model(Mode(data.get("mode", "read")), str(data.get("group", name)), load)


def _request(data: Any, models: Mapping[str, Model]) -> Request:
    request = Request(float(data["at"]), str(data["model"]), float(data["work"]))
    if request.model not in models:
        raise ValueError(f"model: the head does not name '{request.model}'")
    if not (request.at >= 0 and request.work >= 0):
        raise ValueError("at, work: must not be negative")
    return request

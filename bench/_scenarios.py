"""Loads for one GPU, played in real time against FakeSwapper, alone or behind llama-lease.

All times here are seconds of FakeSwapper's clock, which runs SPEED times as fast as the wall's.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yaml

from bench._contenders import Server, free_port
from proxy.trace import Trace, read
from tests.fakes import FakeModel, FakeSwapper

SPEED = 20.0
LIMIT = 100
"""Requests of one model at the swapper. llama-swap's own default, 10, would answer 429 to bursts of the unfair order."""
KINDS = {"q": "chat", "v": "vision", "t": "speech"}


@dataclass(frozen=True)
class Arrival:
    """One request of a load: when it comes, for which model, and how much work it is."""

    at: float
    model: str
    work: float


@dataclass(frozen=True)
class Scenario:
    """A load, the seconds that each model needs to load, and which models stay side by side."""

    name: str
    arrivals: Sequence[Arrival]
    loads: Mapping[str, float]
    matrix: str

    def kind(self, model: str) -> str:
        """What its requests are for: chat, vision, speech, or the model itself."""
        return KINDS.get(model, model)

    @property
    def speech(self) -> list[str]:
        """The models that speak: they write, all others read."""
        return [model for model in self.loads if self.kind(model) == "speech"]


@dataclass(frozen=True)
class Policy:
    """A contender: `lease` None is FakeSwapper alone, else the settings of the lease in front of it.

    `simulated`: what proxy/simulate.py calls it.
    """

    name: str
    simulated: str
    lease: Mapping[str, Any] | None


POLICIES = (
    Policy("llama-swap's order, alone", "llama-swap", None),
    Policy("fifo", "fifo", {"order": "fifo"}),
    Policy("phases", "phases", {"order": "phases", "max_slice": 30 / SPEED}),
    Policy(
        "phases, patience 45 s", "phases + 45 s", {"order": "phases", "max_slice": 30 / SPEED, "patience": 45 / SPEED}
    ),
)


@dataclass(frozen=True)
class Outcome:
    """One request's life: sent, first worked on, over."""

    arrival: Arrival
    sent: float
    served: float
    ended: float

    @property
    def wait(self) -> float:
        """From the sending to the moment the model works on it: the queues and the load."""
        return self.served - self.sent


@dataclass(frozen=True)
class Played:
    """What one run of a scenario gave. `loads`: (began, ready, model)."""

    outcomes: Sequence[Outcome]
    loads: Sequence[tuple[float, float, str]]

    @property
    def makespan(self) -> float:
        return max(o.ended for o in self.outcomes) - min(o.sent for o in self.outcomes)

    def waits(self, model: str | None = None) -> list[float]:
        """All waits, or those of one model."""
        return [o.wait for o in self.outcomes if model in (None, o.arrival.model)]


def overlapping(model: str, seconds: float, others: Sequence[float]) -> Scenario:
    """Chat streams of 3 s started every 1.5 s, and at some moments a request of 2 s for another model."""
    chats = [Arrival(1.5 * i, "q", 3.0) for i in range(int(seconds / 1.5))]
    rest = [Arrival(at, model, 2.0) for at in others]
    arrivals = sorted((*chats, *rest), key=lambda a: a.at)
    return Scenario(f"overlapping chat + {KINDS[model]}", arrivals, {"q": 1.0, model: 1.0}, f"q | {model}")


def letters(text: str) -> Scenario:
    """One request a letter, 2 s of work each, all sent within the first load (5 s)."""
    arrivals = [Arrival(0.4 * i, letter.lower(), 2.0) for i, letter in enumerate(text)]
    return Scenario(" ".join(text), arrivals, dict.fromkeys("abc", 5.0), "a | b | c")


def of_trace(path: Path, seconds: float) -> tuple[Scenario, Trace]:
    """The beginning of a trace file, as a scenario and as a trace. Raises ConfigError, OSError."""
    with path.open() as lines:
        whole = read(lines, path.name)
    part = replace(whole, requests=[request for request in whole.requests if request.at < seconds])
    loads = {name: model.load for name, model in part.models.items()}
    arrivals = [Arrival(request.at, request.model, request.work) for request in part.requests]
    together = " & ".join(f"({' | '.join(names)})" for names in part.exclusive)
    return Scenario(f"{seconds / 60:g} minutes of {path.name}", arrivals, loads, together), part


async def play(scenario: Scenario, policy: Policy) -> Played:
    """Send the whole load in real time and wait for its end. Raises RuntimeError when a request fails."""
    async with _served(scenario, policy) as (fake, url), _session() as http:
        began = fake.now() + 2.0
        outcomes = await asyncio.gather(
            *(
                _ask(http, url, fake, i, arrival, began, speech=arrival.model in scenario.speech)
                for i, arrival in enumerate(scenario.arrivals)
            )
        )
        ready = fake.events_of("ready")
        loads = [
            (event.at - began, next(r.at for r in ready if r.model == event.model and r.at >= event.at) - began, event.model)
            for event in fake.events_of("load")
        ]  # fmt: skip
        return Played(outcomes, loads)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=None)
    )


@asynccontextmanager
async def _served(scenario: Scenario, policy: Policy) -> AsyncIterator[tuple[FakeSwapper, str]]:
    models = {name: FakeModel(load=load, limit=LIMIT) for name, load in scenario.loads.items()}
    async with FakeSwapper(models, matrix=scenario.matrix, speed=SPEED) as fake:
        if policy.lease is None:
            yield fake, fake.url
            return
        with (
            TemporaryDirectory(prefix="llama-lease-bench-") as folder,
            start_llama_lease(Path(folder), fake, policy.lease, scenario.speech) as server,
        ):
            await asyncio.to_thread(server.wait)
            yield fake, server.url.removesuffix("/v1/chat/completions")


def start_llama_lease(folder: Path, fake: FakeSwapper, lease: Mapping[str, Any], speech: Sequence[str]) -> Server:
    """llama-lease in front of a FakeSwapper whose configuration it reads."""
    port = free_port()
    (folder / "llama-swap.yaml").write_text(yaml.safe_dump(fake.config()))
    read = {"mode": "read", "models": [name for name in fake.models if name not in speech], "upstream": "swap"}
    groups = {
        "chat": read,
        **({"speech": {"mode": "write", "models": list(speech), "upstream": "swap"}} if speech else {}),
    }
    config = {
        "listen": f"127.0.0.1:{port}",
        "data_dir": "data",
        "leases": {"gpu0": dict(lease)},
        "upstreams": {"swap": {"url": fake.url, "swap_config": "llama-swap.yaml", "max_in_flight": LIMIT}},
        "groups": groups,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "proxy", "serve", "--config", "config.yaml"]
    root = Path(__file__).resolve().parent.parent
    return Server("llama-lease", command, port, cwd=folder, cpu=None, env={"PYTHONPATH": str(root)})


async def _ask(
    http: aiohttp.ClientSession,
    url: str,
    fake: FakeSwapper,
    number: int,
    arrival: Arrival,
    began: float,
    *,
    speech: bool,
) -> Outcome:
    await fake.sleep(max(0.0, began + arrival.at - fake.now()))
    sent = fake.now()
    path = "/v1/audio/speech" if speech else "/v1/chat/completions"
    said = {"input": "Hello."} if speech else {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"X-Bench-Number": str(number), "X-Fake-Work": str(arrival.work)}
    async with http.post(url + path, json={"model": arrival.model, **said}, headers=headers) as reply:
        body = await reply.read()
        if reply.status != 200 or b'"error"' in body:
            raise RuntimeError(f"request {number} for {arrival.model}: {reply.status} {body[-300:]!r}")
    request = next(r.id for r in fake.requests if r.headers.get("X-Bench-Number") == str(number))
    times = {event.kind: event.at for event in fake.events if event.request == request}
    return Outcome(arrival, sent - began, times["served"] - began, times["done"] - began)

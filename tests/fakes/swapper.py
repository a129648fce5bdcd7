"""FakeSwapper: a stand-in for llama-swap that follows its scheduler's rules and answers with made-up models.

Times are in seconds of the fake's own clock, which runs `speed` times as fast as the wall's. A request says how
much work it is with the headers `X-Fake-Work` (seconds) and `X-Fake-Events` (pieces of the answer); else its
model says so.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from tests.fakes.gates import Gate
from tests.fakes.residency import evictions
from tests.fakes.routes import build_app
from tests.fakes.scheduler import Job, Scheduler, Swap, SwapperError


@dataclass(frozen=True)
class FakeModel:
    """One model: seconds to load, to stop, and of work per request; pieces of a streamed answer.

    `slots`: requests worked on side by side, the others wait in the model (None: no limit).
    """

    load: float = 0.0
    work: float = 0.0
    stop: float = 0.0
    events: int = 8
    limit: int = 10
    slots: int | None = None
    aliases: tuple[str, ...] = ()
    parameter_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Received:
    """A request as it arrived; `body` is raw, as sent (not inflated)."""

    id: int
    at: float
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    model: str | None


@dataclass(frozen=True)
class Event:
    """What happened when (fake clock, seconds). `request` is Received.id, 0 where none is meant.

    kind: arrived, served, first_byte, done, gone (its client hung up), killed, refused, load, ready, stop, failed.
    """

    at: float
    kind: str
    model: str
    request: int = 0


@dataclass(eq=False)
class Use:
    """One request's use of a model: the scheduler's job and the task that works on it."""

    job: Job
    task: asyncio.Task[Any]
    killed: bool = False


class FakeSwapper:
    """`async with FakeSwapper({"q": FakeModel(load=1)}, matrix="(q | v) & e") as fake:` then `fake.url`.

    matrix: an expression, or llama-swap's whole `matrix` mapping; groups: llama-swap's `groups` mapping; neither:
    every model excludes every other. `speed`: fake seconds per second. `kills`: abort running requests that stand
    in the way of a load (llama-server's router); else they are waited for. `cuts`: a request killed in mid-stream
    loses its connection; else it sees a clean end, which is what llama-swap makes of it (default: as `kills`).
    `loading_state`: streams open at once and say "loading" in their reasoning text.
    """

    def __init__(
        self,
        models: Mapping[str, FakeModel] | Sequence[str],
        *,
        matrix: str | Mapping[str, Any] | None = None,
        groups: Mapping[str, Any] | None = None,
        speed: float = 1.0,
        kills: bool = False,
        cuts: bool | None = None,
        loading_state: bool = False,
    ) -> None:
        self.models = dict(models) if isinstance(models, Mapping) else {name: FakeModel() for name in models}
        self.matrix = {"vars": {}, "sets": {"all": matrix}} if isinstance(matrix, str) else matrix
        self.groups = groups
        self.speed = speed
        self.cuts = kills if cuts is None else cuts
        self.loading_state = loading_state
        self.requests: list[Received] = []
        self.events: list[Event] = []
        self.most_in_flight: Counter[str] = Counter()
        self.fail_loads: Counter[str] = Counter()
        self.names = {name: name for name in self.models}
        for name, model in self.models.items():
            self.names |= dict.fromkeys((*model.aliases, *model.parameter_ids), name)
        limits = {name: model.limit for name, model in self.models.items()}
        self.scheduler = Scheduler(limits, evictions(self.config()), self._start_swap, kills=kills)
        self.stopping: set[str] = set()
        self.changed = asyncio.Event()
        self._slots = {name: asyncio.Semaphore(m.slots) for name, m in self.models.items() if m.slots}
        self._gates: list[tuple[str | None, Gate]] = []
        self._load_gates: list[tuple[str, Gate]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(1)
        self._began = time.monotonic()
        self._runner: web.AppRunner | None = None
        self.url = ""

    def config(self) -> dict[str, Any]:
        """This fake as llama-swap's configuration file would say it (a mapping to dump as YAML)."""
        models: dict[str, Any] = {}
        for name, model in self.models.items():
            models[name] = {"cmd": f"fake-server --model {name}", "concurrencyLimit": model.limit}
            if model.aliases:
                models[name]["aliases"] = list(model.aliases)
            if model.parameter_ids:
                models[name]["filters"] = {"setParamsByID": {i: {"temperature": 0} for i in model.parameter_ids}}
        config: dict[str, Any] = {"models": models}
        if self.matrix:
            config["matrix"] = self.matrix
        if self.groups:
            config["groups"] = self.groups
        return config

    # What tests ask

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests being served now, per model that has any."""
        return {model: len(jobs) for model, jobs in self.scheduler.serving.items() if jobs}

    @property
    def resident(self) -> set[str]:
        """Models that are loaded and ready."""
        return set(self.scheduler.ready)

    @property
    def loads(self) -> list[str]:
        """Every load that was started, in order."""
        return [event.model for event in self.events if event.kind == "load"]

    def events_of(self, *kinds: str) -> list[Event]:
        """The log, these kinds only."""
        return [event for event in self.events if event.kind in kinds]

    def hold(self, model: str | None = None, *, after: int | None = None) -> Gate:
        """A gate for the next request (for `model`) that is served: before its headers or after so many bytes."""
        gate = Gate(after)
        self._gates.append((model, gate))
        return gate

    def hold_load(self, model: str) -> Gate:
        """A gate at the end of the next load of `model`."""
        gate = Gate()
        self._load_gates.append((model, gate))
        return gate

    async def until(self, kind: str, count: int = 1, model: str | None = None) -> None:
        """Wait until the log holds `count` events of this kind (of this model)."""
        while sum(e.kind == kind and model in (None, e.model) for e in self.events) < count:
            self.changed.clear()
            await self.changed.wait()

    def now(self) -> float:
        """The fake clock, seconds since this fake was made."""
        return (time.monotonic() - self._began) * self.speed

    async def sleep(self, seconds: float) -> None:
        """Wait on the fake clock."""
        await asyncio.sleep(seconds / self.speed)

    # Serving

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        self._runner = web.AppRunner(
            build_app(self), handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=0.2
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Cut every connection and stop."""
        for _, gate in (*self._gates, *self._load_gates):
            gate.open()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # What the routes use

    def note(self, kind: str, model: str, request: int = 0) -> None:
        """One line of the log."""
        self.events.append(Event(self.now(), kind, model, request))
        self.changed.set()

    def received(self, method: str, path: str, headers: Mapping[str, str], body: bytes, model: str | None) -> int:
        """Record a request; returns its number."""
        number = next(self._ids)
        self.requests.append(Received(number, self.now(), method, path, headers, body, model))
        if model:
            self.note("arrived", model, number)
        return number

    def gate_for(self, model: str) -> Gate | None:
        """The first free gate that fits, taken."""
        for index, (wanted, gate) in enumerate(self._gates):
            if wanted in (None, model):
                del self._gates[index]
                return gate
        return None

    def slot(self, model: str) -> asyncio.Semaphore | None:
        """Where requests wait inside the model, if it has slots."""
        return self._slots.get(model)

    async def acquire(self, model: str, request: int) -> Use:
        """Wait until the scheduler serves this request. Raises SwapperError. Leaves the queue when cancelled."""
        decision: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.current_task()
        assert task is not None

        def decided(error: SwapperError | None) -> None:
            if decision.done():
                return
            if error is None:
                decision.set_result(None)
                self.most_in_flight[model] = max(self.most_in_flight[model], len(self.scheduler.serving[model]))
            else:
                decision.set_exception(error)

        def killed() -> None:
            use.killed = True
            self.note("killed", model, request)
            use.task.cancel()

        use = Use(Job(request, model, decided, killed), task)
        try:
            self.scheduler.arrive(use.job)
            await decision
        except BaseException as error:
            self.scheduler.leave(use.job)
            if use.killed:  # served and killed before it could take a step
                task.uncancel()
                raise SwapperError(502, f"model {model!r} stopped") from error
            self.note("refused" if isinstance(error, SwapperError) else "gone", model, request)
            raise
        self.note("served", model, request)
        return use

    def unload(self, models: set[str]) -> None:
        """Stop these at once; requests on them die."""
        for model in sorted(models & (self.scheduler.ready | self.scheduler.swaps.keys())):
            self.note("stop", model)
        self.scheduler.unload(models)

    def _start_swap(self, swap: Swap) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(swap))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, swap: Swap) -> None:
        self.stopping |= swap.evicted
        for model in sorted(swap.evicted):
            self.note("stop", model)
        if swap.evicted:
            await self.sleep(max(self.models[model].stop for model in swap.evicted))
        self.stopping -= swap.evicted
        error = None
        if swap.model not in self.scheduler.ready:  # asked again while resident: only its rivals had to stop
            self.note("load", swap.model)
            await self.sleep(self.models[swap.model].load)
            for index, (wanted, gate) in enumerate(self._load_gates):
                if wanted == swap.model:
                    del self._load_gates[index]
                    await gate()
                    break
            if self.fail_loads[swap.model] > 0:
                self.fail_loads[swap.model] -= 1
                error = SwapperError(502, f"model {swap.model!r} failed to load")
        self.note("failed" if error else "ready", swap.model)
        self.scheduler.loaded(swap, error)

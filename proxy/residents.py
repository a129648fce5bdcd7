"""Making room on the GPU, for one lease: what must go before a ticket's model can come.

A swapper makes room among its own models. What it cannot know is what else is on the card: a speech model in this
process, or another server's models. So after a grant, and before its request goes out, whatever the rules do not let
stay beside the ticket's model is unloaded, and waited for: backends in a worker thread, models of a swapper with
`POST /api/models/unload/<model>` until `GET /running` does not show them any more. Then a backend of our own is loaded.

What is resident is followed from the tickets that pass here, and a server is asked only when something that must go
may be there: a room that stays costs nothing. Models change on their own, too (a `ttl`, somebody else's request), so
`watch` asks while nobody holds.

What fails is an error of the ticket for whom room was made. Cancelled work is waited for: a lease is never free while a
model is still on its way.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict

from backends.api import SpeechBackend
from backends.errors import BackendError
from proxy import threads
from proxy.config import Upstream
from proxy.errors import ModelUnavailable
from proxy.headers import sent_headers
from proxy.lease import Lease
from proxy.line import Mode, Ticket
from proxy.residency import Residency

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


class Swapper:
    """An upstream, as far as it tells and changes what is resident there."""

    def __init__(self, name: str, config: Upstream, client: aiohttp.ClientSession) -> None:
        self.name = name
        self.config = config
        self.may_have: set[str] | None = None
        """The models that may be resident: as last seen, and all that were asked for since. None: nobody has looked."""
        self._asked_for: set[str] = set()
        self._client = client
        self._headers = sent_headers(CIMultiDict(), config, "")

    def ask_for(self, model: str) -> None:
        """A request for this model goes there now."""
        self._asked_for.add(model)
        if self.may_have is not None:
            self.may_have.add(model)

    async def look(self) -> set[str]:
        """The models that run there, those that start or stop included. Raises ModelUnavailable."""
        self._asked_for.clear()
        try:
            async with asyncio.timeout(self.config.timeouts.connect + 5):
                async with self._client.get(f"{self.config.url}/running", headers=self._headers) as answer:
                    answer.raise_for_status()
                    running = (await answer.json(content_type=None))["running"]
                    found = {str(entry["model"]) for entry in running}
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise ModelUnavailable(
                f"the upstream '{self.name}' does not say what is resident: {_why(error)}"
            ) from error
        self.may_have = found | self._asked_for  # what was asked for while the answer was on its way, it may not show
        return found

    async def unload(self, model: str) -> None:
        """Stops a model and waits until it has gone, at most `load_timeout`. Raises ModelUnavailable."""
        started = time.monotonic()
        url = f"{self.config.url}/api/models/unload/{quote(model, safe='')}"
        try:
            async with asyncio.timeout(self.config.load_timeout):
                async with self._client.post(url, headers=self._headers) as answer:
                    answer.raise_for_status()
                pause = _FIRST_PAUSE
                while model in await self.look():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ModelUnavailable(
                f"the model '{model}' at the upstream '{self.name}' could not be unloaded to make room: {_why(error)}"
            ) from error
        logger.info("unloaded model=%s upstream=%s seconds=%.1f", model, self.name, time.monotonic() - started)


class Residents:
    """What is resident under one lease. `prepare` is what its Lease awaits after each grant."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._rules: Residency | None = None
        self._lease: Lease | None = None
        self._swappers: dict[str, Swapper] = {}
        self._backends: Mapping[str, SpeechBackend] = {}
        self._place_of: Callable[[str], str | None] = lambda model: None
        self._beside: set[str] = set()
        self._turn = asyncio.Lock()

    def configure(
        self,
        rules: Residency | None,
        upstreams: Mapping[str, Upstream],
        backends: Mapping[str, SpeechBackend],
        place_of: Callable[[str], str | None],
        lease: Lease | None = None,
    ) -> None:
        """Sets or changes what there is: the upstreams and backends of this lease, and which of them runs a model.

        The rules know a backend by its own name. Without a `lease` nobody is known to hold.
        """
        known = {
            name: known
            for name, config in upstreams.items()
            if (known := self._swappers.get(name)) is not None and known.config == config
        }
        self._swappers = {
            name: known.get(name) or Swapper(name, config, self._client) for name, config in upstreams.items()
        }
        self._rules = rules
        self._backends = backends
        self._place_of = place_of
        self._lease = lease

    async def prepare(self, ticket: Ticket) -> None:
        """Makes room for a ticket that has been granted, and loads its backend. Raises ModelUnavailable."""
        model = ticket.model if self._rules is None else self._rules.id(ticket.model)
        if ticket.mode is Mode.NONE:
            self._beside.add(model)  # its tickets hold nothing, so that it may be in use at any time
        if self._rules is not None and self._in_the_way(model, self._rules):
            async with self._turn:
                await self._make_room(model, self._rules)
        place = self._place_of(model) or ""
        if (swapper := self._swappers.get(place)) is not None:
            swapper.ask_for(model)
        backend = self._backends.get(place)
        if backend is not None and not backend.loaded:
            async with self._turn:
                await self._load(place, backend)

    async def watch(self, every: float = 15.0) -> None:
        """Looks again and again at what is resident in truth, while nobody holds the lease. Ends when cancelled."""
        while True:
            await self.correct()
            await asyncio.sleep(every)

    async def correct(self) -> None:
        """Looks once at what is resident, unless somebody holds the lease."""
        lease = self._lease
        if lease is None or not lease.idle:
            return
        seen: set[str] = set()
        for swapper in self._swappers.values():
            try:
                seen |= await swapper.look()
            except ModelUnavailable:
                return  # not a swapper, or down: what the grants say stands
        if lease.idle:
            loaded = {name for name, backend in self._backends.items() if backend.loaded}
            lease.correct_resident({self._rules.id(name) if self._rules else name for name in seen | loaded})

    # What must go

    def _going(self, model: str, rules: Residency) -> list[tuple[str, str]]:
        """(place, model) of what may be resident and cannot stay. The model's own server sees to its own."""
        where = {name: name for name, backend in self._backends.items() if backend.loaded}
        for swapper in self._swappers.values():
            where |= {rules.id(name): swapper.name for name in swapper.may_have or ()}
        held = frozenset() if self._lease is None else self._lease.held - {model}
        resident = frozenset(where) - self._beside
        gone = resident - rules.after(resident, held, model)
        own = self._place_of(model)
        return [(where[name], name) for name in sorted(gone) if where[name] != own]

    def _unseen(self, model: str, rules: Residency) -> list[Swapper]:
        """Servers where nobody has looked and where something may be in the way."""
        return [
            swapper
            for swapper in self._swappers.values()
            if swapper.may_have is None
            and swapper.name != self._place_of(model)
            and any(self._place_of(m) == swapper.name and rules.excludes(m, model) for m in rules.models())
        ]

    def _in_the_way(self, model: str, rules: Residency) -> bool:
        return bool(self._going(model, rules) or self._unseen(model, rules))

    async def _make_room(self, model: str, rules: Residency) -> None:
        places = {place for place, _ in self._going(model, rules)}
        doubtful = [swapper for swapper in self._swappers.values() if swapper.name in places]
        for swapper in (*self._unseen(model, rules), *doubtful):
            await swapper.look()
        for place, other in self._going(model, rules):
            try:
                if place in self._swappers:
                    await self._swappers[place].unload(other)
                else:
                    await self._unload(other, self._backends[place])
            except ModelUnavailable as error:
                logger.error("no room for model=%s: %s", model, error.message)
                raise

    async def _unload(self, name: str, backend: SpeechBackend) -> None:
        started = time.monotonic()
        try:
            await threads.run(backend.unload, _let_it_end, patience=600.0)
        except BackendError as error:
            raise ModelUnavailable(f"the backend '{name}' could not be unloaded to make room: {error}") from error
        logger.info("unloaded backend=%s seconds=%.1f", name, time.monotonic() - started)

    async def _load(self, name: str, backend: SpeechBackend) -> None:
        if backend.loaded:
            return
        started = time.monotonic()
        try:
            await threads.run(backend.load, _let_it_end, patience=600.0)
        except BackendError as error:
            raise ModelUnavailable(f"the backend '{name}' cannot run: {error}") from error
        logger.info("loaded backend=%s seconds=%.1f", name, time.monotonic() - started)


def _let_it_end() -> None:
    """A load cannot be stopped half-way."""


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it answered {error.status}"
    return str(error) or type(error).__name__

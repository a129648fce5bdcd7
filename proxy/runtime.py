"""What one configuration brings to life: leases, upstreams, the servers started for them, backends, metrics.

Handlers get one Runtime and ask it; a reload changes what is inside and keeps whoever waits or runs in place.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import backends
from backends.api import SpeechBackend
from backends.errors import BackendError
from proxy import forward
from proxy.children import Child, expand
from proxy.classify import Classifier, Plan, Source
from proxy.config import Config, LeaseConfig
from proxy.config import Upstream as UpstreamConfig
from proxy.errors import ConfigError, LeaseClosed, ModelUnavailable, NotFound
from proxy.events import EventFeed
from proxy.forward import Upstream
from proxy.lease import Hold, Lease, LeaseSettings
from proxy.line import Mode
from proxy.metrics import Known, Metrics
from proxy.residency import Residency
from proxy.residents import Residents
from proxy.rooms import places, residency_of
from proxy.speech_request import JobSettings, SpeechSettings
from proxy.ticketlog import TicketLog
from proxy.trace import Recorder
from proxy.tracing import Tracing, TracingSettings, build_tracing

logger = logging.getLogger(__name__)

ROUTES = frozenset(
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
     "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/voices", "/v1/audio/speech/jobs",
     "/v1/images/generations", "/v1/models", "/lease"]
)  # fmt: skip
"""The values of the metrics' label `route`; every other path counts as "other"."""


_PLANS = 512


class Runtime:
    """Build with a checked configuration, `start` inside the event loop, `apply` others, `stop` once."""

    def __init__(self, config: Config) -> None:
        """Create everything that does not need an event loop. Raises ConfigError: a backend's options, say."""
        check_commands(config)
        self.config = config
        self.classifier = Classifier(config)
        self.metrics = Metrics(known_names(config))
        self.ticket_log = TicketLog()
        self.feed = EventFeed()
        self.recorder = Recorder()
        self.tracing: Tracing = build_tracing(TracingSettings(config.tracing.endpoint, config.tracing.service_name))
        self.leases: dict[str, Lease] = {}
        self.upstreams: dict[str, Upstream] = {}
        self.children: dict[str, Child] = {}
        self.backends = create_backends(config)
        self.stopping = False
        self._rules = {name: residency_of(config, name) for name in config.leases}
        self._plans: dict[tuple[str, str, str | None, Source | None], Plan] = {}
        self._residents: dict[str, Residents] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self.requests: dict[str, asyncio.Task[Any] | None] = {}
        """Those that had a lease, or wait for one, and are not over yet: id, task."""

    async def start(self) -> None:
        """Open the client session and start the servers of `command`. Does not wait until they are healthy."""
        self.client = forward.session()
        self._bring_up(self.config)

    async def drain(self) -> None:
        """Refuse new requests and those that wait; let those that run finish, to the last byte that a slow client reads
        after the lease, within drain_timeout."""
        self.stopping = True
        for lease in self.leases.values():
            lease.close()
        patience, loop = self.config.drain_timeout, asyncio.get_running_loop()
        until = loop.time() + patience
        drained = await asyncio.gather(*(lease.drain(patience) for lease in self.leases.values()))
        if not all(drained):
            logger.warning("some requests were still running after drain_timeout, %g s", patience)
        elif requests := [task for task in self.requests.values() if task is not None]:
            await asyncio.wait(requests, timeout=until - loop.time())

    async def stop(self) -> None:
        """Take everything down; `drain` comes first where requests may run."""
        self.stopping = True
        for lease in self.leases.values():
            lease.close()
        tasks = [*self._background, *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self.children.values()))
        await self.client.close()
        for backend in self.backends.values():
            await asyncio.to_thread(backend.close)
        await self.tracing.close()

    def apply(self, config: Config) -> None:
        """Change to another configuration, or read again the files that it names. Raises ConfigError before anything is
        changed."""
        rules = {name: residency_of(config, name) for name in config.leases}
        fresh = create_backends(config, keep=self.backends, old=self.config)
        check_commands(config)
        for key in ("listen", "data_dir", "tracing"):
            if getattr(config, key) != getattr(self.config, key):
                logger.warning("%s has changed; that takes effect at the next start", key)
        gone = {name: backend for name, backend in self.backends.items() if fresh.get(name) is not backend}
        self.config, self.classifier = config, Classifier(config)
        self.backends, self._rules = fresh, rules
        self._plans.clear()
        self.metrics.reconfigure(known_names(config))
        self._bring_up(config)
        for backend in gone.values():
            self._in_background(asyncio.to_thread(backend.close))

    @property
    def speech_settings(self) -> SpeechSettings:
        """The configuration's rules for one speech request."""
        speech = self.config.speech
        return SpeechSettings(voice=speech.voice, voices=speech.voices, max_input=speech.max_input)

    @property
    def job_settings(self) -> JobSettings:
        """The configuration's rules for speech jobs."""
        speech = self.config.speech
        return JobSettings(slice=speech.job_slice, ttl=speech.job_ttl, max_jobs=speech.max_jobs)

    def excludes(self, lease: str, one: str, other: str) -> bool:
        """Whether two models under a lease cannot be resident together, as far as is known."""
        rules = self._rules.get(lease)
        return rules is not None and rules.excludes(one, other)

    def canonical(self, model: str) -> str:
        """The id of a model that an upstream's own configuration knows under this name, too."""
        for rules in self._rules.values():
            if rules is not None and (id := rules.id(model)) != model:
                return id
        return model

    # -- one request --------------------------------------------------------------------------------------------

    def plan(self, method: str, path: str, model: str | None, where: Source | None = None) -> Plan:
        """The classifier's plan; a model that its swapper has on another machine takes no turn. Raises what it does."""
        if path not in ROUTES:
            return self._plan(method, path, model, where)
        asked = method, path, model, where
        plan = self._plans.get(asked)
        if plan is None:
            if len(self._plans) >= _PLANS:  # models' names are the clients' to choose
                self._plans.clear()
            plan = self._plans[asked] = self._plan(method, path, model, where)
        return plan

    def _plan(self, method: str, path: str, model: str | None, where: Source | None) -> Plan:
        plan = self.classifier.plan(method, path, model, where=where, known=self.canonical)
        if plan.mode is not None and (rules := self._rules_of(plan)) is not None and rules.elsewhere(plan.model):
            return dataclasses.replace(plan, mode=Mode.NONE, why=f"{plan.why}; it runs on another machine")
        return plan

    def lease_of(self, plan: Plan) -> Lease:
        """The lease that a plan's place lives under."""
        return self.leases[self._lease_name(plan)]

    def lease_section(self, plan: Plan) -> LeaseConfig:
        """What the configuration says about that lease."""
        return self.config.leases[self._lease_name(plan)]

    def _lease_name(self, plan: Plan) -> str:
        if plan.backend is not None:
            return self.config.backends[plan.backend].lease
        assert plan.upstream is not None
        return self.config.upstreams[plan.upstream].lease

    def _rules_of(self, plan: Plan) -> Residency | None:
        return self._rules[self._lease_name(plan)]

    def hold(self, plan: Plan, request_id: str, max_wait: float | None = None) -> Hold:
        """The hold for a plan that takes a lease."""
        if self.stopping:
            raise LeaseClosed
        assert plan.mode is not None
        model, limit, rules = plan.model, None, self._rules_of(plan)
        if plan.upstream is not None:
            limit = self.config.upstreams[plan.upstream].max_in_flight
            if rules is not None:
                model = rules.id(model)
                limit = min(limit, rules.limits.get(model, limit))
        elif plan.backend is not None and not self.classifier.names(plan.model):
            model = plan.backend  # the rules cannot know what a pattern matches
        return self.lease_of(plan).hold(
            id=request_id, model=model, group=plan.group, mode=plan.mode, limit=limit, max_wait=max_wait
        )

    async def before_lease(self, plan: Plan) -> None:
        """What must not be waited for with the lease in hand. Raises ModelUnavailable and UpstreamError."""
        if plan.upstream is None:
            return
        upstream = self.upstreams[plan.upstream]
        try:
            upstream.refuse_failed(plan.model)
        except ModelUnavailable:
            self.metrics.queue_rejected(upstream.config.lease, "model_failed")
            raise
        await self._started(plan.upstream, upstream.config.url)

    async def _started(self, name: str, url: str) -> None:
        """Until the server that we start for an upstream is up; after a reload, the one in its place."""
        while (child := self.children.get(name)) is not None and not child.healthy:
            if await child.ready(self.upstreams[name].config.load_timeout):
                continue
            if self.stopping:
                raise LeaseClosed
            now = self.upstreams.get(name)
            if now is None or now.config.url != url:
                change = "taken out of the configuration" if now is None else f"moved to {now.config.url}"
                raise ModelUnavailable(f"the server '{name}' was {change} while this request waited for it")

    def backend(self, name: str) -> SpeechBackend:
        """A backend by its name in the configuration."""
        try:
            return self.backends[name]
        except KeyError:
            raise NotFound(f"no backend is named '{name}'") from None

    @asynccontextmanager
    async def hold_model(self, model: str, request_id: str) -> AsyncIterator[Hold]:
        """The lease for work that no client waits for on a connection: a slice of a speech job."""
        plan = self.plan("POST", "/v1/audio/speech", model)
        await self.before_lease(plan)
        async with self.hold(plan, request_id) as hold:
            yield hold

    # -- building -----------------------------------------------------------------------------------------------

    def _bring_up(self, config: Config) -> None:
        for name, section in config.leases.items():
            settings, rules = lease_settings(section), self._rules[name]
            if name in self.leases:
                self.leases[name].reconfigure(settings, rules)
            else:
                listeners = [each.on_lease_event for each in (self.metrics, self.ticket_log, self.feed, self.recorder)]
                residents = self._residents[name] = Residents(self.client)
                self.leases[name] = Lease(
                    name, settings, residency=rules, listeners=listeners, prepare=residents.prepare
                )
            self._residents[name].configure(
                rules,
                {upstream: server for upstream, server in config.upstreams.items() if server.lease == name},
                {backend: self.backends[backend] for backend, local in config.backends.items() if local.lease == name},
                places(config),
                self.leases[name],
            )
        for task in self._watching:
            task.cancel()
        self._watching = [
            asyncio.create_task(self._residents[name].watch())
            for name, rules in self._rules.items()
            if rules is not None
        ]
        upstreams: dict[str, Upstream] = {}
        children: dict[str, Child] = {}
        for name, server in config.upstreams.items():
            known = self.upstreams.get(name)
            same = known is not None and known.config == server
            upstreams[name] = known if known is not None and same else self._upstream(name, server)
            if server.command:
                child = self.children.get(name)
                if child is None or not same:
                    child = Child(name, _command(name, server), server.url, server.health, self.client)
                children[name] = child
        stale = [child for name, child in self.children.items() if children.get(name) is not child]
        new = [child for name, child in children.items() if self.children.get(name) is not child]
        self.upstreams, self.children = upstreams, children
        if stale:
            self._in_background(self._replace(stale, new))  # they may want the same port
        else:
            for child in new:
                child.start()

    async def _replace(self, stale: list[Child], new: list[Child]) -> None:
        await asyncio.gather(*(child.stop() for child in stale))
        for child in new:
            child.start()

    def _upstream(self, name: str, section: UpstreamConfig) -> Upstream:
        return Upstream(name, section, self.client, lambda kind: self.metrics.upstream_error(name, kind))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def create_backends(
    config: Config, keep: dict[str, SpeechBackend] | None = None, old: Config | None = None
) -> dict[str, SpeechBackend]:
    """The configuration's backends, not loaded; those of `keep` whose section is as in `old` stay the same objects.

    Raises ConfigError naming the option that is wrong.
    """
    made: dict[str, SpeechBackend] = {}
    for name, section in config.backends.items():
        if keep is not None and old is not None and name in keep and old.backends.get(name) == section:
            made[name] = keep[name]
            continue
        try:
            made[name] = backends.create(section.kind, name, dict(section.options), data_dir(config), config.resolve)
        except BackendError as error:
            param = getattr(error, "param", "")
            raise ConfigError(f"{config.path}: backends.{name}.{param}: {error}") from error
    return made


def data_dir(config: Config) -> Path:
    """Where voices and jobs are kept."""
    return config.resolve(config.data_dir)


def lease_settings(section: LeaseConfig) -> LeaseSettings:
    """The part of a lease's section that the lease itself needs."""
    names = {field.name for field in dataclasses.fields(LeaseSettings)}
    return LeaseSettings(**{name: value for name, value in section if name in names})


def known_names(config: Config) -> Known:
    """The names that may become label values."""

    def lease(group_name: str) -> str:
        group = config.groups[group_name]
        place = config.upstreams[group.upstream] if group.upstream else config.backends[group.backend or ""]
        return place.lease

    return Known(
        leases={name: section.max_hold for name, section in config.leases.items()},
        groups={name: (lease(name), str(group.mode)) for name, group in config.groups.items()},
        upstreams=frozenset(config.upstreams),
        backends=frozenset(config.backends),
        routes=ROUTES,
    )


def check_commands(config: Config) -> None:
    """Raises ConfigError for a command whose placeholders mean nothing here."""
    for name, upstream in config.upstreams.items():
        if upstream.command:
            _command(name, upstream)


def _command(name: str, section: UpstreamConfig) -> list[str]:
    try:
        return expand(section.command, section.url)
    except ConfigError as error:
        raise ConfigError(f"upstreams.{name}.{error.message}") from None

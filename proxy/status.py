"""What the proxy tells about itself: health, the lease, metrics, the models. The feed of events and the live page have
files of their own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from proxy import __version__, auth, events, forward, models
from proxy.config import Group
from proxy.errors import NotFound
from proxy.lease import Lease
from proxy.page import Page
from proxy.runtime import Runtime

Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LIMITS = ("max_wait", "max_waiting", "max_hold")


def routes(runtime: Runtime) -> Iterator[tuple[str, str, Endpoint]]:
    """(methods, path, endpoint) of the proxy's own pages."""
    status = Status(runtime)
    yield "GET HEAD", "/health", status.health
    yield "GET HEAD", "/ready", status.ready
    yield "GET HEAD", "/metrics", status.metrics
    yield "GET", "/metrics/upstream/{name}", status.upstream_metrics
    yield "GET HEAD", "/lease", status.lease
    yield "GET", "/lease/trace", status.trace
    yield "DELETE", "/lease/{id}", status.cancel
    yield "GET HEAD", "/v1/models", status.models
    yield "GET HEAD", "/models", status.models
    yield "GET HEAD", "/v1/models/{model:.+}", status.model
    yield from events.routes(runtime.feed)
    yield from Page().routes()


class Status:
    """The endpoints; each reads state and takes no lease."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def health(self, _: web.Request) -> web.StreamResponse:
        """The process is alive."""
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.StreamResponse:
        """Whether every upstream answers: 200 or 503, each by name."""
        runtime = self._runtime
        answers = await asyncio.gather(*(models.reachable(upstream) for upstream in runtime.upstreams.values()))
        upstreams = dict(zip(runtime.upstreams, answers, strict=True))
        ready = all(answers) and not runtime.stopping
        body = {
            "status": "ready" if ready else "not_ready",
            "upstreams": {name: "reachable" if up else "unreachable" for name, up in upstreams.items()},
            "backends": {
                name: "loaded" if backend.loaded else "unloaded" for name, backend in runtime.backends.items()
            },
        }
        return web.json_response(body, status=200 if ready else 503)

    async def lease(self, _: web.Request) -> web.StreamResponse:
        """Who holds each lease, who waits for it, since when and in which position; and which models there are.

        `events.last` is the id after which GET /lease/events goes on from exactly this state.
        """
        runtime = self._runtime
        body = {
            "now": runtime.feed.now,
            "version": __version__,
            "stopping": runtime.stopping,
            "events": {"last": runtime.feed.last_id, "since": runtime.feed.since},
            "leases": {name: self._describe(lease) for name, lease in runtime.leases.items()},
            "models": [
                {"id": model, "group": name, "mode": str(group.mode), "backend": group.backend, "lease": lease}
                for model, name, group in runtime.classifier.models()
                for lease in (self._lease_name(group),)
            ],
        }
        return web.json_response(body, headers={"Cache-Control": "no-store"})

    def _describe(self, lease: Lease) -> dict[str, Any]:
        # By hand: dataclasses.asdict takes ten times as long, and a thousand may wait.
        snapshot = lease.snapshot()
        limits = self._runtime.config.leases.get(lease.name)
        return {
            **_fields(snapshot),
            "holders": [_fields(holder) for holder in snapshot.holders],
            "waiting": [_fields(waiter) for waiter in snapshot.waiting],
            "rooms": [_fields(room) for room in snapshot.rooms],
            "limits": {} if limits is None else {name: getattr(limits, name) for name in _LIMITS},
        }

    def _lease_name(self, group: Group) -> str:
        config = self._runtime.config
        return config.upstreams[group.upstream].lease if group.upstream else config.backends[group.backend or ""].lease

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Take a waiting or running request out; for administrators."""
        auth.check_key(request.headers, self._runtime.config, admin=True)
        id = request.match_info["id"]
        if not any(lease.cancel(id) for lease in self._runtime.leases.values()):
            raise NotFound(f"no request '{id}' waits or runs", param="id")
        return web.json_response({"id": id, "cancelled": True})

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """The last requests under a lease as JSON lines for `llama-lease simulate`: models and times, nothing else."""
        leases = self._runtime.leases
        name = request.query.get("lease") or next(iter(leases))
        if name not in leases:
            raise NotFound(f"no lease is named '{name}'; there are: {', '.join(leases)}", param="lease")
        trace = self._runtime.recorder.trace(name, lambda one, other: self._runtime.excludes(name, one, other))
        return web.Response(text="".join(f"{line}\n" for line in trace.lines()), content_type="application/jsonl")

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Everything that Prometheus wants to know."""
        body, content_type = self._runtime.metrics.render()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def upstream_metrics(self, request: web.Request) -> web.StreamResponse:
        """An upstream's own /metrics, which our path hides."""
        upstream = self._runtime.upstreams.get(request.match_info["name"])
        if upstream is None:
            known = ", ".join(self._runtime.upstreams) or "none"
            raise NotFound(f"no upstream has that name; there are: {known}", param="name")
        status, headers, body = await forward.fetch(upstream, "/metrics")
        return web.Response(status=status, headers=headers, body=body)

    async def models(self, _: web.Request) -> web.StreamResponse:
        """The merged list; upstreams that could not be asked are named in a header."""
        listed, down = await self._merged()
        return web.json_response(listed, headers={"X-Unavailable-Upstreams": ", ".join(down)} if down else {})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """One entry of the list."""
        wanted = request.match_info["model"]
        listed, _ = await self._merged()
        for model in listed["data"]:
            if model["id"] == wanted:
                return web.json_response(model)
        raise NotFound(f"the model '{wanted}' does not exist here", param="model", code="model_not_found")

    async def _merged(self) -> tuple[dict[str, Any], list[str]]:
        runtime = self._runtime
        local = [(model, group.backend) for model, _, group in runtime.classifier.models() if group.backend is not None]
        return await models.merged(runtime.upstreams, local, runtime.config.aliases)


def _fields(of: Any) -> dict[str, Any]:
    """The fields of a dataclass with slots, as they are."""
    return {name: getattr(of, name) for name in of.__slots__}

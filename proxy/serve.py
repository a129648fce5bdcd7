"""Run the server until a signal ends it: listen, reload, drain."""

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from proxy import auth, config, logs
from proxy.app import RUNTIME, build_app, server_options
from proxy.classify import Classifier
from proxy.config import Config
from proxy.connections import listen, read_out
from proxy.errors import ConfigError, ProxyError
from proxy.line import Mode
from proxy.rooms import swap_files
from proxy.runtime import Runtime
from proxy.watch import watch

logger = logging.getLogger(__name__)

_LAST_MOMENT = 1.0  # seconds in which what is cut off at the end can still put its things in order


async def serve(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError and OSError (the port is taken) before it has begun."""
    app = build_app(settings)
    runtime = app[RUNTIME]
    host, port = settings.address
    runner = web.AppRunner(app, shutdown_timeout=_LAST_MOMENT, **server_options())
    stop = asyncio.Event()
    reload = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    await runner.setup()
    watching = [
        asyncio.create_task(watch(lambda: _files(runtime.config), reload.set)),
        asyncio.create_task(_reload(runtime, reload)),
    ]
    try:
        with contextlib.closing(await listen(runner, host, port, backlog=512)):
            watching.append(asyncio.create_task(_welcome(runtime)))  # not before its address answers
            _announce(runtime)
            _settle_heap()
            await stop.wait()
            logger.info("stopping: no new requests, those that run have %g s", runtime.config.drain_timeout)
            await finish(runtime, runner)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await runner.cleanup()
    logger.info("stopped")


async def finish(runtime: Runtime, runner: web.AppRunner) -> None:
    """Let the requests that run come to their end, and their clients read it; drain_timeout is for all of it.

    Nobody waits for connections that are idle, for readers of the feed, or for requests that never had the lease.
    """
    until = asyncio.get_running_loop().time() + runtime.config.drain_timeout
    await runtime.drain()
    runtime.feed.close()
    assert runner.server is not None
    if not await read_out(runner.server, until):
        logger.warning(
            "some clients had not read their answers after drain_timeout, %g s", runtime.config.drain_timeout
        )


def _settle_heap() -> None:
    """Take what was made until now out of the garbage collector's sight, and let it run less often.

    A request leaves no cycles behind, but its events and its place in the trace are kept, and that growth made the
    collector walk over every imported module again and again: a quarter of the time of a small request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _files(settings: Config) -> tuple[Path, ...]:
    """What a reload reads."""
    return (settings.path, *swap_files(settings))


async def _reload(runtime: Runtime, reload: asyncio.Event) -> None:
    while True:
        await reload.wait()
        reload.clear()
        reload_config(runtime)


def reload_config(runtime: Runtime) -> bool:
    """Read the file again and change to it; a bad one is refused, and what runs stays as it is."""
    try:
        fresh = config.load(runtime.config.path)
        runtime.apply(fresh)
    except ConfigError as error:
        logger.error("the configuration is refused, the old one stays: %s", error.message)
        runtime.metrics.config_reloaded(False)
        return False
    except Exception:  # the next change of the file must be noticed all the same
        logger.exception("a fault of this program: the configuration could not be changed")
        runtime.metrics.config_reloaded(False)
        return False
    logs.configure(fresh.log.format, level=fresh.log.level.upper())
    logger.info("configuration reloaded from %s", fresh.path)
    runtime.metrics.config_reloaded(True)
    return True


async def _welcome(runtime: Runtime) -> None:
    """Once the servers that we started are up: where to point a client, the models, and commands to try."""
    for name, child in runtime.children.items():
        with contextlib.suppress(ProxyError):
            await child.ready(runtime.upstreams[name].config.load_timeout)
    sys.stdout.write(welcome(runtime.config))
    sys.stdout.flush()


def welcome(settings: Config) -> str:
    """The address, the models and a curl line for each kind of model that the configuration names."""
    host, port = settings.address
    with contextlib.suppress(ValueError):
        host = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
    lines = ["", f"llama-lease serves {url}/v1", ""]
    curls: dict[str, str] = {}
    for model, name, group in Classifier(settings).models():
        place = group.backend or group.upstream
        lines.append(f"  {model:<20} {name:<12} {group.mode:<6} at {place}")
        speaks = group.mode is Mode.WRITE or "/v1/audio/speech" in group.endpoints
        kind = "speech" if speaks else "embeddings" if "/v1/embeddings" in group.endpoints else "chat"
        curls.setdefault(kind, _curl(kind, url, key, model))
    lines += ["", *(curls[kind] for kind in ("chat", "embeddings", "speech") if kind in curls)]
    return "\n".join([*lines, f"\nWho waits and who has the GPU: {url}/lease/ui", "", ""])


def _curl(kind: str, url: str, key: str, model: str) -> str:
    path, rest, body = {
        "chat": ("chat/completions", "", {"model": model, "messages": [{"role": "user", "content": "Say hello."}]}),
        "embeddings": ("embeddings", "", {"model": model, "input": "Hello."}),
        "speech": ("audio/speech", " -o hello.mp3", {"model": model, "input": "Hello. One GPU, shared fairly."}),
    }[kind]
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json'{rest} -d '{json.dumps(body)}'"


def _announce(runtime: Runtime) -> None:
    settings = runtime.config
    logger.info("listening on http://%s", settings.listen)
    host = settings.address[0]
    if not settings.api_keys and not auth.is_loopback(host):
        logger.warning("OPEN TO THE NETWORK: %s is not loopback and api_keys is empty; anybody can use the GPU", host)
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified and settings.allowed_hosts == ("loopback",):
            logger.warning("allowed_hosts has only loopback: other machines are refused until you add this one's name")

"""Run the server until a signal ends it: listen, reload, drain."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
from pathlib import Path

from aiohttp import web
from watchfiles import awatch

from proxy import auth, config, logs
from proxy.app import RUNTIME, build_app, server_options
from proxy.config import Config
from proxy.errors import ConfigError
from proxy.runtime import Runtime

logger = logging.getLogger(__name__)


async def serve(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError and OSError (the port is taken) before it has begun."""
    app = build_app(settings)
    runtime = app[RUNTIME]
    host, port = settings.address
    runner = web.AppRunner(app, shutdown_timeout=1.0, **server_options())
    stop = asyncio.Event()
    reload = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    await runner.setup()
    watching = [asyncio.create_task(_watch(settings.path, reload)), asyncio.create_task(_reload(runtime, reload))]
    try:
        site = web.TCPSite(runner, host, port, reuse_address=True, backlog=512)
        await site.start()
        _announce(runtime)
        await stop.wait()
        logger.info("stopping: no new requests, those that run have %g s", runtime.config.drain_timeout)
        await runtime.drain()
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await runner.cleanup()
    logger.info("stopped")


async def _watch(path: Path, reload: asyncio.Event) -> None:
    """Ask for a reload whenever the file has changed. Its folder is watched, since editors replace files."""
    async for changes in awatch(path.parent, recursive=False):
        if any(Path(changed).name == path.name for _, changed in changes):
            reload.set()


async def _reload(runtime: Runtime, reload: asyncio.Event) -> None:
    while True:
        await reload.wait()
        reload.clear()
        reload_config(runtime)


def reload_config(runtime: Runtime) -> bool:
    """Read the file again and change to it; a bad one is refused, and what runs stays as it is."""
    try:
        fresh = config.load(runtime.config.path)
        if fresh == runtime.config:
            return True
        runtime.apply(fresh)
    except ConfigError as error:
        logger.error("the configuration is refused, the old one stays: %s", error.message)
        runtime.metrics.config_reloaded(False)
        return False
    logs.configure(fresh.log.format, level=fresh.log.level.upper())
    logger.info("configuration reloaded from %s", fresh.path)
    runtime.metrics.config_reloaded(True)
    return True


def _announce(runtime: Runtime) -> None:
    settings = runtime.config
    logger.info("listening on http://%s", settings.listen)
    host = settings.address[0]
    if not settings.api_keys and not auth.is_loopback(host):
        logger.warning("OPEN TO THE NETWORK: %s is not loopback and api_keys is empty; anybody can use the GPU", host)
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified and settings.allowed_hosts == ("loopback",):
            logger.warning("allowed_hosts has only loopback: other machines are refused until you add this one's name")

"""GET /v1/models: what every upstream and every backend offers, in one list."""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from proxy.errors import UpstreamError
from proxy.forward import Upstream, fetch

logger = logging.getLogger(__name__)

_PATIENCE = 5.0


async def merged(
    upstreams: Mapping[str, Upstream], local: Iterable[tuple[str, str]], aliases: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The OpenAI list of models, and the names of the upstreams that could not be asked.

    `local`: (model, backend) pairs of models that live in this process. Of two models with one id the first counts:
    upstreams in the configuration's order, then backends, then aliases.
    """
    answers = await asyncio.gather(*(_ask(upstream) for upstream in upstreams.values()))
    models: dict[str, dict[str, Any]] = {}
    down = []
    for name, listed in zip(upstreams, answers, strict=True):
        if listed is None:
            down.append(name)
        for entry in listed or ():
            models.setdefault(entry["id"], entry)
    for model, backend in local:
        owner = f"llama-lease:{backend}"
        models.setdefault(model, {"id": model, "object": "model", "created": 0, "owned_by": owner})
    for alias, model in aliases.items():
        if model in models:
            models.setdefault(alias, {**models[model], "id": alias})
    return {"object": "list", "data": list(models.values())}, down


async def _ask(upstream: Upstream) -> list[dict[str, Any]] | None:
    """The upstream's own list; None when it cannot be had."""
    try:
        status, _, body = await fetch(upstream, "/v1/models", patience=_PATIENCE)
        if status != 200:
            return None
        return [m for m in json.loads(body)["data"] if isinstance(m, dict) and isinstance(m.get("id"), str)]
    except (UpstreamError, ValueError, KeyError, TypeError) as error:
        logger.debug("models of %s cannot be listed: %s", upstream.name, error)
        return None


async def reachable(upstream: Upstream) -> bool:
    """Whether the upstream answers its health path, whatever it says below 500."""
    try:
        async with upstream.client.get(
            upstream.config.url + upstream.config.health, timeout=aiohttp.ClientTimeout(total=_PATIENCE)
        ) as answer:
            return answer.status < 500
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False

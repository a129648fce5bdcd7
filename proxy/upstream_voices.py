"""The voices of speech models at upstreams: asked for rarely, remembered, never waited for long.

Asking a swapper for a model's voices loads the model. So it happens under the model's lease, in the background: a
list of voices waits for a moment, and shows what is known until then.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from backends.api import Voice
from proxy.errors import ProxyError
from proxy.places import SpeechModel

logger = logging.getLogger(__name__)

Fetch = Callable[[SpeechModel], Awaitable[Sequence[Voice]]]


class UpstreamVoices:
    """What upstreams have told, by model. `close` it before the event loop ends."""

    def __init__(
        self,
        fetch: Fetch,
        *,
        patience: float = 2.0,
        fresh: float = 3600.0,
        backoff: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: how long a list waits; `fresh`: how long an answer is used without asking again; `backoff`:
        how long after a failure nobody asks. Seconds."""
        self._fetch = fetch
        self._patience, self._fresh, self._backoff = patience, fresh, backoff
        self._clock = clock
        self._known: dict[str, Sequence[Voice]] = {}
        self._ask_again: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def of(self, models: Sequence[SpeechModel]) -> dict[str, Sequence[Voice]]:
        """Model id -> voices, of those models whose voices are known; old ones rather than none."""
        for model in models:
            if model.id not in self._asking and self._clock() >= self._ask_again.get(model.id, 0.0):
                self._asking[model.id] = asyncio.create_task(self._ask(model))
        first = [self._asking[model.id] for model in models if model.id not in self._known and model.id in self._asking]
        if first:
            await asyncio.wait(first, timeout=self._patience)
        return {model.id: self._known[model.id] for model in models if model.id in self._known}

    def forget(self, model: str) -> None:
        """Ask again at the next list: the model's voices have changed."""
        self._ask_again.pop(model, None)

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, model: SpeechModel) -> None:
        wait = self._backoff
        try:
            self._known[model.id] = await self._fetch(model)
            wait = self._fresh
        except ProxyError as error:
            logger.info("voices of %s at %s cannot be listed: %s", model.id, model.upstream, error)
        finally:
            self._ask_again[model.id] = self._clock() + wait
            del self._asking[model.id]


def read_voices(answer: bytes) -> list[Voice]:
    """The voices in a server's answer, in any of the shapes that speech servers use; [] where none is recognised.

    Objects with "voices" or "data", or a bare list; of strings or of objects with "id", "voice_id" or "name".
    """
    try:
        data = json.loads(answer)
    except ValueError:
        return []
    if isinstance(data, dict):
        data = data.get("voices") or data.get("data") or []
    if isinstance(data, dict):
        data = list(data)
    voices = (
        {voice.id: voice for entry in data if (voice := _voice(entry)) is not None} if isinstance(data, list) else {}
    )
    return list(voices.values())


def _voice(entry: Any) -> Voice | None:
    if isinstance(entry, str):
        entry = {"id": entry}
    if not isinstance(entry, dict):
        return None
    id = next((entry[key] for key in ("id", "voice_id", "name") if isinstance(entry.get(key), str)), "")
    name = entry.get("name")
    created = entry.get("created_at")
    return Voice(id, name if isinstance(name, str) else id, created if isinstance(created, int) else 0) if id else None

"""Speech models that run in the proxy's own process.

Reading order: api (what a backend is), errors, text, audio, then the kinds: hibari, cosyvoice.
A kind's packages are imported when a backend of that kind is created, never before.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backends.api import SpeechBackend
from backends.errors import InvalidInput


def kinds() -> tuple[str, ...]:
    """The values that `kind` of a backend may have in config.yaml."""
    return ("hibari", "cosyvoice")


def create(
    kind: str, name: str, options: Mapping[str, Any], data_dir: Path, resolve: Callable[[str], Path] = Path
) -> SpeechBackend:
    """Make a backend called `name`, not loaded yet. What it keeps on disk lies under `data_dir`.

    `resolve` makes an option that is a path absolute: it knows what the path is relative to.

    Raises InvalidInput (param "kind", or the option's name) and BackendUnavailable (a package is missing).
    """
    match kind:
        case "hibari":
            from backends import hibari

            return hibari.create(name, options)
        case "cosyvoice":
            from backends.cosyvoice import backend

            return backend.create(name, options, data_dir, resolve)
        case _:
            raise InvalidInput(f"unknown kind {kind!r}; kinds: {', '.join(kinds())}", param="kind")

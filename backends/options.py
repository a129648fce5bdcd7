"""Options of a backend, as config.yaml gave them: read by name and type, and nothing left over."""

import difflib
from collections.abc import Mapping
from typing import Any

from backends.errors import InvalidInput


class Options:
    """Takes options out one by one; `done` refuses those that nobody took.

    Every error is an InvalidInput whose `param` is the option's name.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._known: list[str] = []

    def text(self, key: str, default: str) -> str:
        value = self._take(key, default)
        if not isinstance(value, str) or not value:
            raise InvalidInput(f"{key} must be text, not {value!r}", param=key)
        return value

    def integer(self, key: str, default: int, *, low: int, high: int) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidInput(f"{key} must be a whole number from {low} to {high}, not {value!r}", param=key)
        return value

    def done(self) -> None:
        """Raises InvalidInput for the first option that was never taken."""
        for key in self._given:
            close = difflib.get_close_matches(key, self._known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f"; options: {', '.join(self._known)}"
            raise InvalidInput(f"unknown option {key!r}{hint}", param=key)

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        return self._given.pop(key, default)

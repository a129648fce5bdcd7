"""Voices whose prompt has been through the flow, within a budget of memory, the least recently used leaving first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from backends.cosyvoice.flow import VoicePrefix


class VoiceCache:
    """Safe to use from several threads. A budget of 0 keeps nothing; what is larger than the budget is not kept.

    A voice that leaves is still good for the requests that hold it: its memory is free when the last has ended.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._voices: OrderedDict[Hashable, VoicePrefix] = OrderedDict()
        self._removals = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of the voices that are kept."""
        with self._lock:
            return self._total()

    def __len__(self) -> int:
        return len(self._voices)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._voices

    def get(self, key: Hashable, make: Callable[[], VoicePrefix]) -> VoicePrefix:
        """The voice of that key; made, and kept if there is room, where it is not there. What `make` raises passes."""
        with self._lock:
            if key in self._voices:
                self._voices.move_to_end(key)
                return self._voices[key]
            removals = self._removals
        voice = make()
        with self._lock:
            # A voice that was deleted while it was made must not come back under its old name.
            if removals == self._removals and voice.nbytes <= self._budget:
                self._voices[key] = voice
                self._voices.move_to_end(key)
                while self._total() > self._budget:
                    self._voices.popitem(last=False)
        return voice

    def discard(self, key: Hashable) -> None:
        """Forget one voice, if it is there."""
        with self._lock:
            self._removals += 1
            self._voices.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._removals += 1
            self._voices.clear()

    def _total(self) -> int:
        return sum(voice.nbytes for voice in self._voices.values())

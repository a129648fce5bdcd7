"""Voices are kept within a budget, the least recently used leaving first."""

import pytest
import torch

from backends.cosyvoice.flow import VoicePrefix
from backends.cosyvoice.voice_cache import VoiceCache


def voice(nbytes: int) -> VoicePrefix:
    return VoicePrefix((), torch.zeros(nbytes, dtype=torch.uint8), torch.empty(0), (), 0)


def fail() -> VoicePrefix:
    raise AssertionError("made a voice that is kept")


def test_a_voice_is_made_once() -> None:
    cache = VoiceCache(100)
    first = cache.get("a", lambda: voice(10))
    assert cache.get("a", fail) is first
    assert cache.nbytes == 10


def test_the_least_recently_used_voice_leaves_first() -> None:
    cache = VoiceCache(100)
    for name in ("a", "b"):
        cache.get(name, lambda: voice(40))
    cache.get("a", fail)
    cache.get("c", lambda: voice(40))
    assert [name in cache for name in ("a", "b", "c")] == [True, False, True]
    assert cache.nbytes == 80


def test_a_voice_larger_than_the_budget_is_not_kept_and_drives_no_other_out() -> None:
    cache = VoiceCache(100)
    cache.get("a", lambda: voice(40))
    assert cache.get("b", lambda: voice(101)).nbytes == 101
    assert "a" in cache
    assert "b" not in cache


def test_a_forgotten_voice_is_made_anew() -> None:
    cache = VoiceCache(100)
    for forget in (lambda: cache.discard("a"), cache.clear):
        first = cache.get("a", lambda: voice(10))
        forget()
        assert len(cache) == 0
        assert cache.get("a", lambda: voice(10)) is not first


def test_a_voice_deleted_while_it_is_made_is_not_kept() -> None:
    cache = VoiceCache(100)

    def make() -> VoicePrefix:
        cache.discard("a")
        return voice(10)

    cache.get("a", make)
    assert "a" not in cache


def test_a_failure_to_make_a_voice_passes_and_keeps_nothing() -> None:
    cache = VoiceCache(100)

    def make() -> VoicePrefix:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cache.get("a", make)
    assert cache.get("a", lambda: voice(10)).nbytes == 10

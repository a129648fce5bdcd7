import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends import create, kinds
from backends.api import Samples, SpeechBackend, Utterance
from backends.errors import BackendUnavailable, Cancelled, InvalidInput, UnknownVoice, Unsupported


@pytest.fixture(scope="module")
def voice() -> Iterator[SpeechBackend]:
    backend = create("hibari", "voice", {}, Path())
    backend.load()
    yield backend
    backend.close()


def say(backend: SpeechBackend, text: str, speed: float = 1.0, seed: int | None = None) -> Samples:
    utterance = Utterance(text, "heart", speed=speed, seed=seed)
    return np.concatenate([chunk.samples for chunk in backend.synthesize(utterance, threading.Event())])


def test_it_speaks_at_24_khz_within_bounds(voice: SpeechBackend) -> None:
    audio = say(voice, "Hello there, how are you?")
    assert audio.dtype == np.float32
    assert 1.0 < audio.size / voice.sample_rate < 4.0
    assert 0.05 < np.abs(audio).max() <= 1.0


def test_the_same_text_sounds_the_same_and_another_seed_does_not(voice: SpeechBackend) -> None:
    assert np.array_equal(say(voice, "Hello."), say(voice, "Hello."))
    assert not np.array_equal(say(voice, "Hello."), say(voice, "Hello.", seed=7))


def test_speed_changes_the_duration(voice: SpeechBackend) -> None:
    text = "This sentence is long enough to be measured."
    normal = say(voice, text).size
    assert say(voice, text, 2.0).size == pytest.approx(normal / 2, rel=0.15)
    assert say(voice, text, 0.5).size == pytest.approx(normal * 2, rel=0.15)


def test_a_speed_out_of_its_range_is_refused(voice: SpeechBackend) -> None:
    with pytest.raises(InvalidInput) as caught:
        say(voice, "Hello.", 4.0)
    assert caught.value.param == "speed"


def test_pieces_begin_and_end_in_silence_so_that_their_joints_do_not_click(voice: SpeechBackend) -> None:
    for text in ("Hello there.", "and then", "He paid five dollars", "zoom"):
        audio = say(voice, text)
        assert np.abs(audio[:24]).max() < 0.01
        assert np.abs(audio[-24:]).max() < 0.01


@pytest.mark.parametrize("text", ["9" * 40, "①②③ x² ½", "१२३", "a" * 300, "$9.99 & 50%", "[a](/b/)"])
def test_odd_text_is_spoken(voice: SpeechBackend, text: str) -> None:
    assert say(voice, text).size > 0


def test_a_set_cancel_flag_stops_it_before_the_next_part(voice: SpeechBackend) -> None:
    cancel = threading.Event()
    parts = voice.synthesize(Utterance("First part. Second part.", "heart"), cancel)
    next(parts)
    cancel.set()
    with pytest.raises(Cancelled):
        next(parts)


def test_closing_the_generator_lets_the_next_one_in(voice: SpeechBackend) -> None:
    parts = voice.synthesize(Utterance("First part. Second part.", "heart"), threading.Event())
    next(parts)
    parts.close()
    assert say(voice, "Next.").size > 0


def test_it_is_usable_only_while_loaded() -> None:
    backend = create("hibari", "voice", {}, Path())
    assert not backend.loaded
    with pytest.raises(BackendUnavailable):
        say(backend, "Hello.")
    backend.load()
    assert backend.loaded
    backend.unload()
    with pytest.raises(BackendUnavailable):
        say(backend, "Hello.")


def test_voices_are_those_on_this_machine(
    voice: SpeechBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIBARI_HOME", str(tmp_path))
    (tmp_path / "bf_emma.int8.onnx").write_bytes(b"cut off")
    assert [entry.id for entry in voice.voices()] == ["heart"]
    with pytest.raises(UnknownVoice, match="heart"):
        list(voice.synthesize(Utterance("Hello.", "emma"), threading.Event()))
    with pytest.raises(UnknownVoice):
        create("hibari", "voice", {"voice": "emma"}, Path())


def test_it_cannot_learn_or_forget_voices(voice: SpeechBackend) -> None:
    assert not voice.can_clone
    with pytest.raises(Unsupported):
        voice.add_voice("me", "Me", np.zeros(48000, np.float32), 24000, "")
    with pytest.raises(Unsupported):
        voice.delete_voice("heart")
    with pytest.raises(UnknownVoice):
        voice.delete_voice("nobody")


def test_tokens_are_words_and_marks(voice: SpeechBackend) -> None:
    assert voice.count_tokens("Hello there, you.") == 5


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"thread": 1}, "thread", "did you mean 'threads'"),
        ({"zzz": 1}, "zzz", "options: voice, threads, seed"),
        ({"threads": 0}, "threads", "from 1 to 64"),
        ({"threads": True}, "threads", "whole number"),
        ({"voice": ""}, "voice", "must be text"),
    ],
)
def test_options_are_strict(options: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        create("hibari", "voice", options, Path())
    assert caught.value.param == param


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="hibari") as caught:
        create("espeak", "voice", {}, Path())
    assert caught.value.param == "kind"
    assert "hibari" in kinds()

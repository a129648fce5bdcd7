"""The whole backend on the tiny model: three modes, both layouts, streaming and not, and everything that can go wrong."""

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.api import AudioChunk, SpeechBackend, Utterance
from backends.cosyvoice.backend import CosyVoice, find_llm
from backends.cosyvoice.options import CosyVoiceOptions
from backends.cosyvoice.speech_lm import open_speech_lm
from backends.errors import BackendUnavailable, Cancelled, InvalidInput, SynthesisFailed, UnknownVoice
from tests.backends.cosyvoice.doubles import Gate, Wrapped
from tests.tiny_cosyvoice import DATA

DOCUMENT = Path(__file__).parents[3] / "docs" / "cosyvoice.md"
TEXT = "Hello there, this is the thing."
MODES = {"zero_shot": ("anna", ""), "cross_lingual": ("bea", ""), "instruct2": ("anna", "Please whisper.")}


def recording(seconds: float = 2.0) -> np.ndarray:
    with np.load(DATA / "golden/g_frontend.npz") as frontend:
        return frontend["wave_24k"][: round(seconds * 24000)]


@pytest.fixture(scope="session")
def library(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two voices: anna, whose transcript is known, and bea. Copy it before you change it."""
    folder: Path = tmp_path_factory.mktemp("data")
    backend = backends.create("cosyvoice", "cv", {"model_dir": str(tiny_model)}, folder)
    backend.add_voice("anna", "Anna", recording(), 24000, "the words of the prompt")
    backend.add_voice("bea", "Bea", recording(1.2), 24000, "")
    return folder


def settings(tiny_model: Path, **options: Any) -> dict[str, Any]:
    return {"model_dir": str(tiny_model), "device": "cpu", "threads": 1, "context": 2048, **options}


@pytest.fixture(scope="module")
def make(tiny_model: Path, library: Path) -> Iterator[Callable[..., SpeechBackend]]:
    """Gives loaded backends, one for each set of options: requests share nothing, so tests may share a backend."""
    made: dict[str, SpeechBackend] = {}

    def give(**options: Any) -> SpeechBackend:
        if repr(options) not in made:
            backend = backends.create("cosyvoice", "cv", settings(tiny_model, **options), library)
            backend.load()
            made[repr(options)] = backend
        return made[repr(options)]

    yield give
    for backend in made.values():
        backend.close()


@pytest.fixture
def wrapped(tiny_model: Path, library: Path) -> Iterator[Callable[..., tuple[CosyVoice, Wrapped]]]:
    """Makes a loaded backend whose language model calls `before(token)` before each token."""
    made = []

    def create(before: Callable[[int], None], **options: Any) -> tuple[CosyVoice, Wrapped]:
        lms = []

        def open_lm(path: Path, **arguments: Any) -> Wrapped:
            lms.append(Wrapped(open_speech_lm(path, **arguments), before))
            return lms[0]

        parsed = CosyVoiceOptions.model_validate(settings(tiny_model, **options))
        backend = CosyVoice("cv", parsed, library, open_lm=open_lm)
        made.append(backend)
        backend.load()
        return backend, lms[0]

    yield create
    for backend in made:
        backend.close()


def spoken(backend: SpeechBackend, voice: str = "anna", instructions: str = "", text: str = TEXT) -> np.ndarray:
    chunks = backend.synthesize(Utterance(text, voice, instructions, seed=4), threading.Event())
    return np.concatenate([chunk.samples for chunk in chunks])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streaming", [True, False])
def test_each_mode_speaks(make, mode: str, streaming: bool) -> None:
    backend = make(streaming=streaming)
    voice, instructions = MODES[mode]
    chunks = list(backend.synthesize(Utterance(TEXT, voice, instructions, seed=4), threading.Event()))
    samples = np.concatenate([chunk.samples for chunk in chunks])
    assert samples.dtype == np.float32
    assert abs(samples).max() > 0.01
    assert len(samples) == 960 * sum(chunk.tokens for chunk in chunks)
    assert (len(chunks) == 1) == (not streaming)


def test_modes_and_voices_sound_different_from_each_other(make) -> None:
    backend = make()
    every = [spoken(backend, *MODES[mode]) for mode in MODES]
    assert all(len(left) != len(right) or (left != right).any() for left, right in itertools.combinations(every, 2))


def test_both_layouts_say_the_same(make, tiny_model: Path) -> None:
    speech, merged = (make(llm=str(tiny_model / f"cosyvoice3-{name}-f16.gguf")) for name in ("speech", "merged"))
    np.testing.assert_array_equal(spoken(speech), spoken(merged))


def test_a_seed_makes_it_reproducible_whatever_was_said_before(make) -> None:
    warm, cold = make(), make(prefix_cache_mb=0, voice_cache_mb=0)
    expected = spoken(warm)
    spoken(warm, "bea")
    np.testing.assert_array_equal(spoken(warm), expected)
    np.testing.assert_array_equal(spoken(cold), expected)


def test_requests_without_a_seed_take_the_configured_one(make) -> None:
    backend = make(seed=4)
    chunks = backend.synthesize(Utterance(TEXT, "anna"), threading.Event())
    np.testing.assert_array_equal(np.concatenate([chunk.samples for chunk in chunks]), spoken(backend))


def test_an_early_first_hop_says_the_same_in_other_chunks(make) -> None:
    early, normal = make(first_hop="early"), make()
    firsts = []
    for backend in (early, normal):
        with closing(backend.synthesize(Utterance(TEXT, "bea", seed=4), threading.Event())) as chunks:
            firsts.append(len(next(chunks).samples))
    assert firsts[1] - firsts[0] == 25 * 960
    np.testing.assert_allclose(spoken(early, "bea"), spoken(normal, "bea"), atol=1e-2)


def test_the_last_chunk_can_be_computed_as_the_published_model_does(make) -> None:
    full, causal = spoken(make(final_chunk="full")), spoken(make())
    assert len(full) == len(causal)
    np.testing.assert_array_equal(full[:20000], causal[:20000])
    assert (full != causal).any()


@pytest.mark.parametrize("text", ["", "...", " ?! ", "<|endofprompt|>", "🙂"])
def test_a_text_with_nothing_to_say_is_a_short_silence(make, text: str) -> None:
    samples = spoken(make(), text=text)
    assert len(samples) == 4800
    assert not samples.any()


def test_the_first_audio_is_there_before_the_last_token_is_made(wrapped) -> None:
    gate = Gate()

    def before(token: int) -> None:
        if token == 50:
            gate.wait()

    backend, lm = wrapped(before)
    text = "This is the text that has to be long enough for more than one hop of the schedule."
    with closing(backend.synthesize(Utterance(text, "anna", seed=1), threading.Event())) as chunks:
        assert len(next(chunks).samples) > 0
        assert lm.events == ["warmed", "began 1"]
        gate.open()
        assert sum(chunk.tokens for chunk in chunks) > 0
    assert lm.events == ["warmed", "began 1", "ended 1"]


def test_a_request_after_a_cancelled_one_begins_when_its_thread_has_ended(wrapped) -> None:
    gate = Gate()

    def before(token: int) -> None:
        if token == 3 and not cancel.is_set():
            gate.wait()  # a decode that takes its time: it does not look at the flag

    backend, lm = wrapped(before)
    cancel = threading.Event()
    with ThreadPoolExecutor(max_workers=2) as pool:
        first = pool.submit(list, backend.synthesize(Utterance(TEXT, "anna", seed=1), cancel))
        gate.reached()
        cancel.set()
        second = pool.submit(spoken, backend)
        gate.open()
        with pytest.raises(Cancelled):
            first.result()
        assert len(second.result()) > 0
    assert lm.events == ["warmed", "began 1", "ended 1", "began 2", "ended 2"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_cancelled_while_the_prompt_is_read_and_fit_for_the_next(make, mode: str, streaming: bool) -> None:
    class Flag(threading.Event):
        """Set the second time that the thread of the tokens looks: inside the reading of the prompt."""

        looks = 0

        def is_set(self) -> bool:
            if threading.current_thread().name == "speech tokens":
                self.looks += 1
                if self.looks == 2:
                    self.set()
            return super().is_set()

    backend = make(streaming=streaming)
    voice, instructions = MODES[mode]
    expected = spoken(backend, voice, instructions)
    with pytest.raises(Cancelled, match="prompt was read"):
        list(backend.synthesize(Utterance("Another text.", voice, instructions, seed=1), Flag()))
    np.testing.assert_array_equal(spoken(backend, voice, instructions), expected)


@pytest.mark.parametrize("mode", MODES)
def test_cancelled_while_tokens_are_made_and_fit_for_the_next(wrapped, mode: str) -> None:
    cancel = threading.Event()
    backend, lm = wrapped(lambda token: cancel.set() if token == 7 else None)
    voice, instructions = MODES[mode]
    with pytest.raises(Cancelled, match="tokens were made"):
        list(backend.synthesize(Utterance(TEXT, voice, instructions, seed=1), cancel))
    assert lm.events == ["warmed", "began 1", "ended 1"]
    cancel.clear()


def test_a_listener_who_leaves_stops_the_work(wrapped) -> None:
    backend, lm = wrapped(lambda token: None)
    chunks = backend.synthesize(Utterance(TEXT, "anna", seed=1), threading.Event())
    next(chunks)
    chunks.close()
    assert lm.events == ["warmed", "began 1", "ended 1"]
    assert len(spoken(backend)) > 0


def test_a_failing_decode_is_raised_and_the_next_request_is_served(wrapped) -> None:
    broken = [True]

    def before(token: int) -> None:
        if broken and token == 45:
            raise OSError("the card fell out")

    backend, _ = wrapped(before)
    text = "This is the text that has to be long enough for more than one hop of the schedule."
    chunks: list[AudioChunk] = []
    with pytest.raises(SynthesisFailed, match="the card fell out"):
        chunks.extend(backend.synthesize(Utterance(text, "anna", seed=1), threading.Event()))
    broken.clear()
    assert len(spoken(backend)) > 0


def test_loading_warms_the_default_voice(wrapped) -> None:
    backend, lm = wrapped(lambda token: None, voice="bea")
    assert [voice.id for voice in backend.voices()] == ["bea", "anna"]
    assert lm.events == ["warmed"]


def test_a_broken_default_voice_does_not_keep_the_others_from_being_used(
    tiny_model: Path, library: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(library, tmp_path / "data"))
    for name in ("audio.wav", "features.npz"):
        (data / "voices" / "cv" / "anna" / name).unlink()
    backend = backends.create("cosyvoice", "cv", settings(tiny_model, voice="anna"), data)
    backend.load()
    with pytest.raises(BackendUnavailable, match=r"anna/audio.wav"):
        spoken(backend, "anna")
    assert len(spoken(backend, "bea")) > 0
    backend.close()


def test_load_and_unload_may_be_repeated(wrapped) -> None:
    backend, lm = wrapped(lambda token: None)
    backend.load()
    assert backend.loaded
    backend.unload()
    backend.unload()
    assert not backend.loaded
    assert lm.events == ["warmed", "closed"]
    with pytest.raises(BackendUnavailable, match="cv is not loaded"):
        spoken(backend)


def test_unload_waits_for_an_utterance_to_end(wrapped) -> None:
    gate = Gate()
    backend, lm = wrapped(lambda token: gate.wait() if token == 3 else None)
    with ThreadPoolExecutor(max_workers=2) as pool:
        speech = pool.submit(spoken, backend)
        gate.reached()
        unload = pool.submit(backend.unload)
        gate.open()
        assert len(speech.result()) > 0
        unload.result()
    assert lm.events == ["warmed", "began 1", "ended 1", "closed"]


def test_a_backend_without_voices_can_be_loaded_and_learns_one(tiny_model: Path, tmp_path: Path) -> None:
    backend = backends.create("cosyvoice", "cv", settings(tiny_model), tmp_path)
    backend.load()
    assert backend.voices() == []
    with pytest.raises(UnknownVoice):
        spoken(backend)
    added = backend.add_voice("carl", "Carl", recording(), 24000, " some words ")
    assert backend.voices() == [added]
    assert len(spoken(backend, "carl")) > 0
    backend.delete_voice("carl")
    with pytest.raises(UnknownVoice, match="carl"):
        spoken(backend, "carl")
    backend.close()


def test_a_voice_with_the_name_of_a_deleted_one_is_the_new_one(tiny_model: Path, tmp_path: Path) -> None:
    backend = backends.create("cosyvoice", "cv", settings(tiny_model), tmp_path)
    backend.load()
    heard = []
    for seconds in (2.0, 1.2):
        backend.add_voice("carl", "Carl", recording(seconds), 24000, "words")
        heard.append(spoken(backend, "carl"))
        backend.delete_voice("carl")
    assert len(heard[0]) != len(heard[1]) or (heard[0] != heard[1]).any()
    backend.close()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("../up", "Name", recording(), 24000, ""), "name"),
        (("dora", "Name", recording(0.5), 24000, ""), "file"),
        (("dora", "Name", np.tile(recording(), 16)[: 31 * 24000], 24000, ""), "file"),
        (("dora", "Name", recording(), 24000, "word " * 900), "transcript"),
        (("anna", "Name", recording(), 24000, ""), "name"),
    ],
)
def test_a_voice_that_cannot_be_learned_names_the_field(make, arguments: tuple, param: str) -> None:
    backend = make()
    with pytest.raises(InvalidInput) as caught:
        backend.add_voice(*arguments)
    assert caught.value.param == param
    assert {voice.id for voice in backend.voices()} == {"anna", "bea"}


@pytest.mark.parametrize(
    ("utterance", "param"),
    [
        (Utterance(TEXT, "nobody"), "voice"),
        (Utterance(TEXT, "anna", speed=1.5), "speed"),
        (Utterance(TEXT, "anna", instructions="shout " * 800), "instructions"),
        (Utterance("word " * 2000, "anna"), "input"),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(make, utterance: Utterance, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        list(make().synthesize(utterance, threading.Event()))
    assert caught.value.param == param


def test_speed_is_the_model_s_own_where_it_does_not_stream(make) -> None:
    backend = make(streaming=False)
    assert backend.speed_range == (0.5, 2.0)
    slow, fast = (
        next(iter(backend.synthesize(Utterance(TEXT, "anna", speed=speed, seed=4), threading.Event())))
        for speed in (0.5, 2.0)
    )
    assert len(slow.samples) == 4 * len(fast.samples)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "model_dir"),
        ({"model_dir": "m", "colour": "red"}, "colour"),
        ({"model_dir": "m", "threads": "4"}, "threads"),
        ({"model_dir": "m", "device": "gpu"}, "device"),
        ({"model_dir": "m", "first_hop": "late"}, "first_hop"),
        ({"model_dir": "m", "context": 10}, "context"),
        ({"model_dir": "m", "device": "cpu", "dtype": "float16"}, "dtype"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput, match=param) as caught:
        backends.create("cosyvoice", "cv", options, tmp_path)
    assert caught.value.param == param


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("llm.pt", "*merged*")))


@pytest.mark.parametrize(
    "name",
    [
        "cosyvoice3.yaml",
        "flow.pt",
        "hift.pt",
        "campplus.onnx",
        "speech_tokenizer_v3.onnx",
        "CosyVoice-BlankEN",
        "cosyvoice3-speech-f16.embeddings.npy",
    ],
)
def test_a_missing_file_is_named_and_nothing_stays_loaded(model_copy: Path, tmp_path: Path, name: str) -> None:
    backend = backends.create("cosyvoice", "cv", settings(model_copy), tmp_path)
    (model_copy / name).rename(tmp_path / "away")
    with pytest.raises(BackendUnavailable, match=name):
        backend.load()
    assert not backend.loaded
    (tmp_path / "away").rename(model_copy / name)
    backend.load()
    backend.close()


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt", "cosyvoice3-speech-f16.gguf"])
def test_a_truncated_file_is_named(model_copy: Path, tmp_path: Path, name: str) -> None:
    content = (model_copy / name).read_bytes()
    (model_copy / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(BackendUnavailable, match=name):
        backends.create("cosyvoice", "cv", settings(model_copy), tmp_path).load()


def test_a_missing_language_model_says_how_to_make_one(model_copy: Path) -> None:
    (model_copy / "cosyvoice3-speech-f16.gguf").unlink()
    with pytest.raises(BackendUnavailable, match="llama-lease convert"):
        find_llm(model_copy)


def test_the_speech_layout_is_preferred_and_a_doubt_is_an_error(model_copy: Path) -> None:
    (model_copy / "other.gguf").touch()
    assert find_llm(model_copy).name == "cosyvoice3-speech-f16.gguf"
    (model_copy / "cosyvoice3-speech-q8_0.gguf").touch()
    with pytest.raises(BackendUnavailable, match=r"several language models .*option llm"):
        find_llm(model_copy)


def test_a_tokenizer_with_more_ids_than_the_language_model_has_rows_is_refused(
    model_copy: Path, tmp_path: Path
) -> None:
    config = model_copy / "CosyVoice-BlankEN" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"151643"', '"152000"'))
    with pytest.raises(BackendUnavailable, match=r"knows 151936 text ids"):
        backends.create("cosyvoice", "cv", settings(model_copy), tmp_path).load()


def test_the_document_shows_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    shown = {name: default.strip("`") for name, default in rows}
    expected = {}
    for name, option in CosyVoiceOptions.model_fields.items():
        default = "required" if option.is_required() else option.default
        expected[name] = {None: "none", True: "true", False: "false", "": '""'}.get(default, str(default))
    assert shown == expected

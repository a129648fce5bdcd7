"""The speech backend: a folder of model files and a library of voices behind the interface of backends/api.py.

A request becomes one of the model's three modes: with instructions instruct2, else zero_shot for a voice with a
transcript, and cross_lingual for one without.
"""

import gc
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from backends.api import AudioChunk, Samples, Utterance, Voice
from backends.cosyvoice.checkpoint import check_yaml, find, load_flow, load_vocoder
from backends.cosyvoice.features import resample
from backends.cosyvoice.flow import VoicePrefix
from backends.cosyvoice.hift import SAMPLE_RATE
from backends.cosyvoice.ids import END_OF_PROMPT
from backends.cosyvoice.options import CosyVoiceOptions, parse
from backends.cosyvoice.prompt import Prompts, wetext_normalizer
from backends.cosyvoice.speaking import silence, speak
from backends.cosyvoice.speech_lm import LanguageModel, LMPrompt, open_speech_lm
from backends.cosyvoice.stream import TokenStream
from backends.cosyvoice.tokenizer import FOLDER, Tokenizer, read_vocabulary
from backends.cosyvoice.tokens_to_audio import TokensToAudio
from backends.cosyvoice.vocoder import Vocoder
from backends.cosyvoice.voice_cache import VoiceCache
from backends.cosyvoice.voice_encoder import VoiceEncoder, VoiceFeatures, check_recording
from backends.cosyvoice.voices import VoiceLibrary, check_id
from backends.errors import BackendError, BackendUnavailable, Cancelled, InvalidInput, SynthesisFailed
from backends.text import speakable

logger = logging.getLogger(__name__)

_MEGABYTE = 1 << 20
_LOOK_UP = 0.1  # seconds between two looks at the cancel flag while another request still stops

OpenLM = Callable[..., LanguageModel]
"""Called as `open_speech_lm` is."""

OpenVocoder = Callable[..., Vocoder]
"""Called as `load_vocoder` is."""


def create(name: str, options: Mapping[str, Any], data_dir: Path, resolve: Callable[[str], Path] = Path) -> "CosyVoice":
    """Raises InvalidInput (param: the option's name). Voices are kept under `data_dir`/voices/`name`."""
    return CosyVoice(name, parse(options, resolve), data_dir)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What exists between load and unload."""

    lm: LanguageModel
    to_audio: TokensToAudio
    voices: VoiceCache


class CosyVoice:
    """A `SpeechBackend`. One utterance at a time; `unload` and the next utterance wait for the one that runs."""

    sample_rate = SAMPLE_RATE
    can_clone = True

    def __init__(
        self,
        name: str,
        options: CosyVoiceOptions,
        data_dir: Path,
        *,
        open_lm: OpenLM = open_speech_lm,
        open_vocoder: OpenVocoder = load_vocoder,
    ) -> None:
        """Reads no weights. `open_lm` and `open_vocoder` make those parts when the backend is loaded."""
        self.name = name
        # Without streaming the mel is stretched, which keeps the pitch; with it the caller changes the tempo.
        self.speed_range = (1.0, 1.0) if options.streaming else (0.5, 2.0)
        self._options = options
        self._open_lm = open_lm
        self._open_vocoder = open_vocoder
        self._threads = options.threads or min(8, _cores())
        self._library = VoiceLibrary(data_dir / "voices" / name)
        self._encoder = VoiceEncoder(options.model_dir, threads=self._threads)
        self._loaded: _Loaded | None = None
        self._busy = threading.Lock()

    @property
    def loaded(self) -> bool:
        return self._loaded is not None

    def load(self) -> None:
        with self._alone():
            if self._loaded is not None:
                return
            loaded = self._load()
            try:
                with _device_errors(BackendUnavailable, f"{self.name} cannot be warmed"):
                    self._warm(loaded)
            except BaseException:
                loaded.lm.close()
                raise
            self._loaded = loaded

    def unload(self) -> None:
        with self._alone():
            if self._loaded is not None:
                self._loaded.lm.close()
                self._loaded = None
                gc.collect()  # what still hangs in a cycle would keep its part of the card
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def close(self) -> None:
        self.unload()

    def voices(self) -> Sequence[Voice]:
        known = self._library.list()
        return sorted(known, key=lambda voice: voice.id != self._options.voice)  # the order stays otherwise

    def split(self, text: str) -> Sequence[str]:
        """Pieces of at most 80 text tokens, numbers and dates made words. Raises BackendUnavailable: no tokenizer."""
        return self._prompts.split(text)

    def count_tokens(self, text: str) -> int:
        return self._prompts.count(text)

    def synthesize(self, utterance: Utterance, cancel: threading.Event) -> Generator[AudioChunk, None, None]:
        low, high = self.speed_range
        if not low <= utterance.speed <= high:
            raise InvalidInput(f"speed must be from {low} to {high}, not {utterance.speed}", param="speed")
        voice_id = utterance.voice
        self._library.get(voice_id)
        with self._alone(cancel):
            loaded = self._loaded
            if loaded is None:
                raise BackendUnavailable(f"{self.name} is not loaded")
            if not speakable(utterance.text.replace(END_OF_PROMPT, "")):
                yield silence()
                return
            features = self._features(voice_id)
            prompt = self._prompt(utterance, features)
            yield from speak(
                loaded.lm,
                loaded.to_audio,
                prompt,
                self._prefix(loaded, voice_id, features, cancel),
                cancel,
                seed=self._options.seed if utterance.seed is None else utterance.seed,
                streaming=self._options.streaming,
                speed=utterance.speed,
            )

    def add_voice(self, voice_id: str, name: str, audio: Samples, sample_rate: int, transcript: str) -> Voice:
        check_id(voice_id)
        check_recording(audio, sample_rate)
        transcript = transcript.strip()
        if len(self._prompts.zero_shot("", transcript, ()).text) > self._options.context // 4:
            raise InvalidInput("the transcript is longer than 30 s of speech can be", param="transcript")
        features = self._encoder.encode(audio, sample_rate)
        audio = resample(audio, sample_rate, SAMPLE_RATE)
        return self._library.add(voice_id, name, transcript, audio, features, self._encoder.fingerprint)

    def delete_voice(self, voice_id: str) -> None:
        self._library.delete(voice_id)
        if self._loaded is not None:
            self._loaded.voices.discard(voice_id)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(read_vocabulary(self._options.model_dir / FOLDER))

    @cached_property
    def _prompts(self) -> Prompts:
        return Prompts(self._tokenizer, wetext_normalizer() if self._options.normalize else None)

    def _load(self) -> _Loaded:
        options, folder = self._options, self._options.model_dir
        wanted = ("cosyvoice3.yaml", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v3.onnx", FOLDER)
        paths = find(folder, wanted)
        check_yaml(paths["cosyvoice3.yaml"])
        tokenizer_size = self._tokenizer.size
        self._prompts.split("Once, so that its grammars are read now.")
        device = _device(options)
        dtype = torch.float16 if options.dtype == "float16" else torch.float32
        with _device_errors(BackendUnavailable, f"{self.name} cannot be loaded to {device}"):
            flow = load_flow(
                paths["flow.pt"],
                device=device,
                dtype=dtype,
                cache_dtype=torch.float16 if options.cache_dtype == "float16" else None,
                max_cached_seconds=options.max_cached_seconds,
            )
            # The vocoder stays in float32: its phases grow to a hundred thousand, where float16 ends at 65504.
            vocoder = self._open_vocoder(paths["hift.pt"], device=device)
        gpu_layers = options.gpu_layers if options.gpu_layers is not None else 0 if device.type == "cpu" else -1
        llm = options.llm or find_llm(folder)
        lm = self._open_lm(
            llm,
            context=options.context,
            threads=self._threads,
            gpu_layers=gpu_layers,
            kept_bytes=options.prefix_cache_mb * _MEGABYTE,
        )
        if tokenizer_size > lm.text_rows:
            lm.close()
            raise BackendUnavailable(
                f"{llm}: knows {lm.text_rows} text ids, the tokenizer in {folder} has {tokenizer_size}"
            )
        to_audio = TokensToAudio(flow, vocoder, first_hop=options.first_hop, final_chunk=options.final_chunk)
        return _Loaded(lm, to_audio, VoiceCache(options.voice_cache_mb * _MEGABYTE))

    def _warm(self, loaded: _Loaded) -> None:
        """Prepare the default voice, if there is one, and say three tokens of its prompt into nowhere, so that the
        first request is not slower than the next."""
        known = self.voices()
        if not known:
            return
        voice_id = known[0].id
        try:
            features = self._features(voice_id)
        except BackendError as error:  # one broken voice is no reason to refuse the others
            logger.warning("the default voice %s cannot be prepared: %s", voice_id, error)
            return
        loaded.lm.warm(self._prompt(Utterance(text="", voice=voice_id), features))
        voice = self._prefix(loaded, voice_id, features, threading.Event())
        tokens = TokenStream()
        for token in features.tokens[:3].tolist():
            tokens.put(token)
        tokens.close()
        for _ in loaded.to_audio.run(tokens, voice, threading.Event()):
            pass

    def _features(self, voice_id: str) -> VoiceFeatures:
        return self._library.features(voice_id, self._encoder.fingerprint, self._encoder.encode)

    def _prefix(self, loaded: _Loaded, voice_id: str, features: VoiceFeatures, cancel: threading.Event) -> VoicePrefix:
        def check() -> None:
            if cancel.is_set():
                raise Cancelled("cancelled while a voice was prepared")

        def make() -> VoicePrefix:
            mel, embedding = torch.from_numpy(features.mel), torch.from_numpy(features.embedding)
            with _device_errors(SynthesisFailed, f"voice {voice_id} cannot be prepared"):
                return loaded.to_audio.flow.prepare_voice(features.tokens.tolist(), mel, embedding, check)

        return loaded.voices.get(voice_id, make)

    def _prompt(self, utterance: Utterance, features: VoiceFeatures) -> LMPrompt:
        """1. Instructions: instruct2.  2. A voice with a transcript: zero_shot.  3. One without: cross_lingual."""
        transcript = self._library.get(utterance.voice).transcript
        if utterance.instructions.strip():  # (1)
            prompt = self._prompts.instruct2(utterance.text, utterance.instructions)
            if prompt.constant > self._options.context // 2:
                raise InvalidInput(
                    f"the instructions are {prompt.constant} tokens long, too many", param="instructions"
                )
            return prompt
        if transcript:  # (2)
            return self._prompts.zero_shot(utterance.text, transcript, features.tokens.tolist())
        return self._prompts.cross_lingual(utterance.text)  # (3)

    @contextmanager
    def _alone(self, cancel: threading.Event | None = None) -> Iterator[None]:
        # Under a lease this waits for a request that is just stopping, or for a load.
        while not self._busy.acquire(timeout=_LOOK_UP):
            if cancel is not None and cancel.is_set():
                raise Cancelled("cancelled while another request was running")
        try:
            yield
        finally:
            self._busy.release()


def find_llm(folder: Path) -> Path:
    """The GGUF in a model folder: the one of the speech layout, else the only one. Raises BackendUnavailable."""
    every = sorted(folder.glob("*.gguf"))
    for candidates in ([path for path in every if "-speech-" in path.name], every):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            names = ", ".join(path.name for path in candidates)
            raise BackendUnavailable(f"{folder}: several language models ({names}); name one with the option llm")
    raise BackendUnavailable(
        f"{folder}: no .gguf of the language model; make one: llama-lease convert {folder} --out {folder}"
    )


@contextmanager
def _device_errors(kind: type[BackendError], what: str) -> Iterator[None]:
    """Torch's own errors, such as a full card, as `kind`."""
    try:
        yield
    except RuntimeError as error:
        raise kind(f"{what}: {error}") from error


def _cores() -> int:
    """The cores that this process may use; not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(options: CosyVoiceOptions) -> torch.device:
    """Raises BackendUnavailable for a device that this machine, or this torch, does not have."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = options.device
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    device = torch.device(name)
    if (device.type == "cuda" and not cuda) or (device.type == "mps" and not mps):
        raise BackendUnavailable(f"device {name}: this torch ({torch.__version__}) finds none here")
    if options.dtype == "float16" and device.type != "cuda":
        raise BackendUnavailable(f"dtype float16 needs device cuda, this machine has {name}")
    return device

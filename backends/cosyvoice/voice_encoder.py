"""A recording of a voice to what the model takes of it: speech tokens, mel and speaker embedding.

The two ONNX models run on the CPU, once per voice; they are opened for it and closed again, because the larger one
takes about a gigabyte that is of no use to anyone who only speaks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.api import Samples
from backends.cosyvoice.checkpoint import find
from backends.cosyvoice.features import MEL_RATE, SPEECH_RATE, kaldi_fbank, prompt_mel, resample, whisper_log_mel
from backends.cosyvoice.ids import SPEECH_CODES
from backends.errors import BackendUnavailable, InvalidInput

SPEAKER_MODEL, TOKEN_MODEL = "campplus.onnx", "speech_tokenizer_v3.onnx"
SHORTEST, LONGEST = 1.0, 30.0
FRAMES_PER_TOKEN = 2
SPEAKER_DIM = 192


@dataclass(frozen=True, slots=True)
class VoiceFeatures:
    """`tokens` (P,) int32, `mel` (80, 2P) float32, `embedding` (192,) float32, not normalised."""

    tokens: NDArray[np.int32]
    mel: NDArray[np.float32]
    embedding: NDArray[np.float32]


class VoiceEncoder:
    """Computes features with the ONNX models of a model folder."""

    def __init__(self, model_dir: Path, *, threads: int) -> None:
        self._model_dir = model_dir
        self._threads = threads

    @property
    def fingerprint(self) -> str:
        """Changes when the models do, so that features of other models are not used. Raises BackendUnavailable."""
        paths = find(self._model_dir, (SPEAKER_MODEL, TOKEN_MODEL))
        return " ".join(f"{name}:{path.stat().st_size}" for name, path in paths.items())

    def encode(self, audio: Samples, rate: int) -> VoiceFeatures:
        """Features of mono audio, shape (samples,). Raises as `check_recording` does, and BackendUnavailable."""
        check_recording(audio, rate)
        paths = find(self._model_dir, (SPEAKER_MODEL, TOKEN_MODEL))
        slow = resample(audio, rate, SPEECH_RATE)
        log_mel = whisper_log_mel(slow)[None]  # (1, 128, T)
        length = np.array([log_mel.shape[2]], np.int32)
        tokens = self._run(paths[TOKEN_MODEL], log_mel, length).reshape(-1).astype(np.int32)
        fbank = kaldi_fbank(slow)
        embedding = self._run(paths[SPEAKER_MODEL], (fbank - fbank.mean(axis=0))[None]).reshape(-1).astype(np.float32)
        if embedding.shape != (SPEAKER_DIM,) or not np.isfinite(embedding).all():
            raise BackendUnavailable(
                f"{paths[SPEAKER_MODEL]}: gave {embedding.shape}, expected ({SPEAKER_DIM},) numbers"
            )
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= SPEECH_CODES:
            raise BackendUnavailable(f"{paths[TOKEN_MODEL]}: gave no speech tokens from 0 to {SPEECH_CODES - 1}")
        mel = prompt_mel(resample(audio, rate, MEL_RATE))  # (80, F)
        count = min(mel.shape[1] // FRAMES_PER_TOKEN, len(tokens))
        return VoiceFeatures(tokens[:count], np.ascontiguousarray(mel[:, : FRAMES_PER_TOKEN * count]), embedding)

    def _run(self, path: Path, *inputs: NDArray[Any]) -> NDArray[Any]:
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendUnavailable(f"the package onnxruntime is needed to learn a voice: {error}") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = [each.name for each in session.get_inputs()]
            output: NDArray[Any] = session.run(None, dict(zip(names, inputs, strict=True)))[0]
        except Exception as error:  # its own exceptions have no common base
            raise BackendUnavailable(f"{path}: truncated, or not the model of that name: {error}") from error
        return output


def check_recording(audio: Samples, rate: int) -> None:
    """Raises InvalidInput (param "file") for audio that no voice can be learned from."""
    if rate < SPEECH_RATE:
        raise InvalidInput(
            f"the recording has {rate} samples a second, at least {SPEECH_RATE} are needed", param="file"
        )
    if audio.ndim != 1 or not np.isfinite(audio).all():
        raise InvalidInput("the recording is not one channel of numbers", param="file")
    seconds = len(audio) / rate
    if not SHORTEST <= seconds <= LONGEST:
        raise InvalidInput(
            f"the recording lasts {seconds:.1f} s, it must last {SHORTEST:.0f} to {LONGEST:.0f} s", param="file"
        )
    if not np.abs(audio).max() > 0:
        raise InvalidInput("the recording is silent", param="file")

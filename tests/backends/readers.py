"""Audio files read again by programs that did not write them."""

import io
import shutil
import subprocess
import wave

import av
import numpy as np
import soundfile  # type: ignore[import-untyped]
from numpy.typing import NDArray

Audio = NDArray[np.float32]


def all_readers(format: str, data: bytes) -> dict[str, tuple[Audio, int]]:
    """Reader -> (samples, rate), of every reader that knows the format; sox where it is installed."""
    readers: dict[str, tuple[Audio, int]] = {}
    if format == "pcm":
        return {"numpy": (_floats(data), 24000)}
    readers["av"] = read_with_av(data)
    if format == "wav":
        readers["wave"] = _read_with_wave(data)
    if format not in ("aac", "flac"):  # it wants to know the length of a FLAC, which a stream does not tell
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        readers["libsndfile"] = (samples, rate)
    if format in ("mp3", "flac", "wav") and (sox := shutil.which("sox")):
        readers["sox"] = _read_with_sox(sox, format, data)
    return readers


def read_with_av(data: bytes) -> tuple[Audio, int]:
    with av.open(io.BytesIO(data), "r") as file:
        stream = file.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono")
        frames = [part for frame in file.decode(stream) for part in resampler.resample(frame)]
        return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]), stream.rate


def _read_with_wave(data: bytes) -> tuple[Audio, int]:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        pcm = file.readframes(file.getnframes())
        return _floats(pcm), file.getframerate()


def _floats(pcm: bytes) -> Audio:
    return (np.frombuffer(pcm, "<i2") / 32768).astype(np.float32)


def _read_with_sox(sox: str, format: str, data: bytes) -> tuple[Audio, int]:
    command = [sox, "-t", format, "-", "-t", "wav", "-b", "16", "-"]
    return read_with_av(subprocess.run(command, input=data, capture_output=True, check=True).stdout)

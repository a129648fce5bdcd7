"""Audio out: float32 chunks into bytes of a format, while the audio is being made.

    encoder = Encoder("mp3", rate=24000)
    for chunk in chunks:
        send(encoder.encode(chunk))
    send(encoder.finish())

All formats are 24 kHz mono. WAV and PCM are written by hand, the rest by FFmpeg through PyAV. An encoder holds a
frame or two, never the audio, so its memory does not grow with the length.
"""

import struct
from fractions import Fraction
from typing import Protocol

import numpy as np

from backends.api import Samples
from backends.errors import SynthesisFailed
from backends.tempo import Reshaper

OUT_RATE = 24000
"""Hz, of everything that is sent."""

BYTES_PER_SECOND = 2 * OUT_RATE
"""Of `pcm`: mono, 16 bits."""

_UNKNOWN = 0xFFFFFFFF  # the size fields of a WAV whose length nobody knows yet


def formats() -> tuple[str, ...]:
    """The values of `response_format`, the default first."""
    return ("mp3", "opus", "aac", "flac", "wav", "pcm")


def content_type(format: str) -> str:
    """The Content-Type of a format of `formats`."""
    match format:
        case "mp3":
            return "audio/mpeg"
        case "opus":
            return "audio/ogg"
        case _:
            return f"audio/{format}"


def to_pcm(samples: Samples) -> bytes:
    """Float32 in [-1, 1] to little-endian 16-bit. Louder samples are clipped, so that they do not wrap around.

    Raises SynthesisFailed for NaN and infinity, which no listener should hear as noise.
    """
    if not np.isfinite(samples).all():
        raise SynthesisFailed("the model made audio that is not a number")
    return (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2").tobytes()


def wav_header(data_bytes: int | None) -> bytes:
    """The 44 bytes before 24 kHz mono 16-bit data; None: sizes of 0xFFFFFFFF, for a stream.

    Layout: RIFF size WAVE, fmt chunk (PCM, channels, rate, bytes per second, block, bits), data chunk.
    """
    riff, data = (_UNKNOWN, _UNKNOWN) if data_bytes is None else (36 + data_bytes, data_bytes)
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, OUT_RATE, BYTES_PER_SECOND, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + fmt + struct.pack("<4sI", b"data", data)


class Encoder:
    """Audio at `rate` Hz, its tempo changed by `tempo`, as one file of `format`."""

    def __init__(self, format: str, rate: int, *, tempo: float = 1.0) -> None:
        """`format`: one of `formats()`. `tempo`: 2.0 halves the duration, the pitch stays."""
        self.format = format
        self.samples = 0
        """Samples written so far, at OUT_RATE."""
        self._reshaper = Reshaper(rate, out_rate=OUT_RATE, tempo=tempo)
        self._writer = _writer(format)

    @property
    def seconds(self) -> float:
        """Length of the audio written so far."""
        return self.samples / OUT_RATE

    def encode(self, samples: Samples) -> bytes:
        """The bytes that are ready after these samples, the file's header first; may be empty."""
        return self._write(self._reshaper.push(samples))

    def finish(self) -> bytes:
        """The rest of the file. Nothing may be encoded afterwards."""
        return self._write(self._reshaper.finish()) + self._writer.finish()

    def _write(self, samples: Samples) -> bytes:
        if not samples.size:
            return b""
        self.samples += samples.size
        return self._writer.write(to_pcm(samples))


class _Writer(Protocol):
    def write(self, pcm: bytes) -> bytes: ...
    def finish(self) -> bytes: ...


def _writer(format: str) -> _Writer:
    match format:
        case "pcm":
            return _Plain(b"")
        case "wav":
            return _Plain(wav_header(None))
        case "mp3":
            # Without the Xing frame: it holds the length, which is not known, and cannot be filled in later.
            return _Coded("mp3", "libmp3lame", 96_000, {"write_xing": "0", "id3v2_version": "0"})
        case "opus":
            # Pages of 0.1 s: the usual second would hold back the first sentence.
            return _Coded("ogg", "libopus", 64_000, {"page_duration": "100000"})
        case "aac":
            return _Coded("adts", "aac", 96_000, {})
        case "flac":
            return _Coded("flac", "flac", None, {})
        case _:
            raise ValueError(f"unknown format {format!r}; formats: {', '.join(formats())}")


class _Plain:
    """Samples as they are, after a header."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def write(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return b""


class _Pipe:
    """What FFmpeg writes into. It has no `seek`, so that the formats are written as streams."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _Coded:
    """An FFmpeg encoder and container."""

    def __init__(self, container: str, codec: str, bit_rate: int | None, options: dict[str, str]) -> None:
        import av

        self._av = av
        self._pipe = _Pipe()
        # flush_packets: else up to 32 KiB, seconds of speech, would wait in FFmpeg's buffer.
        self._container = av.open(self._pipe, "w", format=container, options={**options, "flush_packets": "1"})
        stream = self._container.add_stream(codec, rate=OUT_RATE, layout="mono")
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        if bit_rate is not None:
            self._stream.bit_rate = bit_rate
        self._written = 0  # samples, the time base of the stream

    def write(self, pcm: bytes) -> bytes:
        samples = np.frombuffer(pcm, dtype="<i2")[np.newaxis]
        frame = self._av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = OUT_RATE
        frame.time_base = Fraction(1, OUT_RATE)
        frame.pts = self._written
        self._written += samples.shape[1]
        self._container.mux(self._stream.encode(frame))
        return self._pipe.take()

    def finish(self) -> bytes:
        if self._written:
            self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._pipe.take()

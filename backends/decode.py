"""Audio in: whatever FFmpeg reads, as mono samples."""

import io

import numpy as np

from backends.api import Samples
from backends.errors import InvalidInput

# Formats that hold their audio themselves. FFmpeg also knows lists (HLS, concat) that name other files and
# addresses, which a client must never make this process open.
_CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,eac3,flac,flv,m4v,matroska,mov,mp3,mp4,mpeg,mpegts,ogg,"
    "rm,rso,sox,tta,voc,w64,wav,webm,wv"
)
_LOWEST_RATE, _HIGHEST_RATE = 8000, 192_000


def read_audio(data: bytes, *, longest: float, param: str = "file") -> tuple[Samples, int]:
    """The first audio stream of a file: samples (the mean of its channels) and their rate in Hz.

    Raises InvalidInput (with `param`) if it is no audio, breaks off, has an unusual rate, or lasts for more than
    `longest` seconds; decoding stops there, so that a small file cannot fill the memory.
    """
    import av

    try:
        with av.open(io.BytesIO(data), "r", options={"format_whitelist": _CONTAINERS}) as file:
            if not file.streams.audio:
                raise InvalidInput(f"{param} has no audio in it", param=param)
            stream = file.streams.audio[0]
            rate = stream.rate
            if not rate or not _LOWEST_RATE <= rate <= _HIGHEST_RATE:
                message = f"{param} has {rate} samples a second; {_LOWEST_RATE} to {_HIGHEST_RATE} can be used"
                raise InvalidInput(message, param=param)
            planes = av.AudioResampler(format="fltp", rate=rate)
            parts: list[Samples] = []
            size = 0
            for decoded in file.decode(stream):
                for frame in planes.resample(decoded):
                    parts.append(frame.to_ndarray().mean(axis=0, dtype=np.float32))
                    size += parts[-1].size
                if size > longest * rate:
                    raise InvalidInput(f"{param} is longer than {longest:g} s", param=param)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise InvalidInput(f"{param} is not audio that can be read: {_reason(error)}", param=param) from error
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not np.isfinite(samples).all():
        raise InvalidInput(f"{param} has samples that are not numbers", param=param)
    return samples, rate


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

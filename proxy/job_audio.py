"""The audio of a speech job as it is sent: encoded from the job's samples, while more of them are made."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import IO

import numpy as np

from backends.audio import BYTES_PER_SECOND, OUT_RATE, Encoder, wav_header
from proxy.job_store import Job

_LONGEST_WAV = 0xFFFFFFFF - 36  # bytes of samples: a day of audio; beyond it the header cannot say how many
_STEP = 10 * BYTES_PER_SECOND  # bytes of samples that are encoded at a time


async def follow(job: Job, path: Path, stopping: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """The file in the job's format as it comes into being; ends when the job is over, however it ended.

    `stopping`: nobody works on it any more in this process; looked at after each change of the job. The caller looks at `job.status` then: only "done" makes the bytes a whole file.
    """
    encoder = Encoder(job.spec.response_format, OUT_RATE, tempo=job.spec.tempo)
    position = 0
    while True:
        change = job.change
        over = job.over or stopping()
        while position < 2 * job.samples:
            size = min(_STEP, 2 * job.samples - position)
            data = await asyncio.to_thread(_encode, encoder, path, position, size)
            position += size
            if data:
                yield data
        if over:
            break
        await change.wait()
    if rest := await asyncio.to_thread(encoder.finish):
        yield rest


async def whole_wav(job: Job, path: Path) -> tuple[int, AsyncGenerator[bytes, None]]:
    """A finished job as WAV with exact sizes: the length in bytes, and the bytes."""
    if job.spec.tempo == 1.0:
        length = 2 * job.samples
        return 44 + length, _plain(path, length)
    file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=1 << 20)  # noqa: SIM115 closed by _spooled
    length = await asyncio.to_thread(_retime, job, path, file)
    return 44 + length, _spooled(file, length)


def _encode(encoder: Encoder, path: Path, position: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        samples = np.frombuffer(file.read(size), "<i2")
    return encoder.encode(samples.astype(np.float32) / 32767.0)


def _header(length: int) -> bytes:
    return wav_header(length if length < _LONGEST_WAV else None)


async def _plain(path: Path, length: int) -> AsyncGenerator[bytes, None]:
    yield _header(length)
    with await asyncio.to_thread(path.open, "rb") as file:
        while length > 0 and (data := await asyncio.to_thread(file.read, min(_STEP, length))):
            length -= len(data)
            yield data


def _retime(job: Job, path: Path, file: IO[bytes]) -> int:
    encoder = Encoder("pcm", OUT_RATE, tempo=job.spec.tempo)
    length = 0
    for position in range(0, 2 * job.samples, _STEP):
        length += file.write(_encode(encoder, path, position, min(_STEP, 2 * job.samples - position)))
    return length + file.write(encoder.finish())


async def _spooled(file: IO[bytes], length: int) -> AsyncGenerator[bytes, None]:
    with file:
        yield _header(length)
        file.seek(0)
        while data := await asyncio.to_thread(file.read, _STEP):
            yield data

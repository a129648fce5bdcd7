"""Tempo without a change of pitch, and sample rates: one FFmpeg filter chain whose state lives as long as a stream.

Because the chain keeps its state between chunks, chunks join without a click, and memory does not grow.
"""

import math
from fractions import Fraction

import av
import av.filter
import numpy as np

from backends.api import Samples

# Beyond these, FFmpeg's atempo skips samples instead of blending them.
_SLOWEST, _FASTEST = 0.5, 2.0

# Samples a frame. Each filter keeps the frame that it looks at, so a frame of a whole sentence would hold the
# sentence back until the next one.
_FRAME = 1024


def share_speed(speed: float, own: tuple[float, float]) -> tuple[float, float]:
    """Split a speed into what the backend does itself (inside its range `own`) and the rest for a `Reshaper`.

    The product of the two is `speed`. The backend's part comes first, because it sounds better.
    """
    native = min(max(speed, own[0]), own[1])
    return native, speed / native


def tempo_factors(tempo: float) -> list[float]:
    """Equal steps inside atempo's blending range whose product is `tempo`; [] for 1."""
    if math.isclose(tempo, 1.0, abs_tol=1e-9):
        return []
    bound = _FASTEST if tempo > 1 else _SLOWEST
    steps = max(1, math.ceil(math.log(tempo) / math.log(bound) - 1e-9))
    return [tempo ** (1 / steps)] * steps


class Reshaper:
    """Changes tempo, then sample rate, of float32 mono audio that comes in chunks: push ... push, finish."""

    def __init__(self, rate: int, *, out_rate: int, tempo: float = 1.0) -> None:
        """`tempo` 2.0 halves the duration. Rates in Hz."""
        self._rate = rate
        self._pushed = 0  # samples, the time base of the chain
        self._graph: av.filter.Graph | None = None
        factors = tempo_factors(tempo)
        if factors or rate != out_rate:
            self._graph = _chain(rate, factors, out_rate)

    def push(self, samples: Samples) -> Samples:
        """The audio that is ready after these samples; may be empty, as the chain looks ahead."""
        if self._graph is None or not samples.size:
            return samples
        ready = [self._push(samples[start : start + _FRAME]) for start in range(0, samples.size, _FRAME)]
        return np.concatenate(ready)

    def _push(self, samples: Samples) -> Samples:
        assert self._graph is not None
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[np.newaxis], format="flt", layout="mono")
        frame.sample_rate = self._rate
        frame.time_base = Fraction(1, self._rate)
        frame.pts = self._pushed
        self._pushed += samples.size
        self._graph.push(frame)
        return self._pull()

    def finish(self) -> Samples:
        """What the chain still held. Nothing may be pushed afterwards."""
        if self._graph is None or not self._pushed:
            return np.zeros(0, dtype=np.float32)
        self._graph.push(None)
        return self._pull()

    def _pull(self) -> Samples:
        assert self._graph is not None
        parts: list[Samples] = []
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                break
            assert isinstance(frame, av.AudioFrame)
            parts.append(frame.to_ndarray().reshape(-1).astype(np.float32, copy=False))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _chain(rate: int, factors: list[float], out_rate: int) -> av.filter.Graph:
    graph = av.filter.Graph()
    links = [graph.add_abuffer(sample_rate=rate, format="flt", layout="mono", time_base=Fraction(1, rate))]
    links += [graph.add("atempo", f"{factor:.9f}") for factor in factors]
    if rate != out_rate:
        links.append(graph.add("aresample", str(out_rate)))
    links.append(graph.add("aformat", "sample_fmts=flt:channel_layouts=mono"))
    links.append(graph.add("abuffersink"))
    graph.link_nodes(*links).configure()
    return graph

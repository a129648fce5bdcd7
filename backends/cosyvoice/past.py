"""What the transformer keeps of finished frames: keys, values and the tails of its two convolutions.

A `Past` belongs to one step of the solver. Its first part, `shared`, was computed for a voice's prompt and is only read;
its second part grows with the speech of one request. Since attention does not care about the order of keys (their
positions are in the keys), a bounded second part is a ring of chunks: when it is full, a new chunk takes the place of
the oldest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_FRAMES = 50
GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Prefix:
    """The finished frames of a prompt for one step of the solver; never written to.

    `layers`: per layer keys and values, (2, B, heads, frames, dim_head). `tails`: two of (B, dim, 30).
    """

    layers: tuple[Tensor, ...]
    tails: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.layers, *self.tails))


class Past:
    """Grows by whole chunks. `window`: how many frames its own part may hold, a multiple of 50; None: all.

    A block of frames goes through the network once for each step; the network calls `tail`, `keep_tail` and `attend`
    while it does, and `commit` then makes the block part of the past. A block that is not committed leaves no trace.
    """

    def __init__(self, depth: int, dtype: torch.dtype, shared: Prefix | None = None, window: int | None = None) -> None:
        self._dtype = dtype
        self._shared = shared
        self._window = window
        self._own: list[Tensor | None] = [None] * depth  # each (2, B, heads, capacity, dim_head)
        self._frames = 0
        self._chunks_seen = 0
        self._tails: list[Tensor | None] = list(shared.tails) if shared else [None, None]
        self._new_tails: list[Tensor | None] = [None, None]

    @property
    def nbytes(self) -> int:
        """Memory of this request's own part."""
        return sum(layer.nbytes for layer in self._own if layer is not None)

    def tail(self, index: int) -> Tensor | None:
        """The last 30 inputs of position convolution `index`, (B, dim, 30); None before the first frame."""
        return self._tails[index]

    def keep_tail(self, index: int, tail: Tensor) -> None:
        self._new_tails[index] = tail.clone()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a block, (B, heads, T, d) each, over the past and itself -> (B, heads, T, d).

        The block begins with a chunk. Each frame sees the past and the block's chunks up to its own.
        """
        begin, end = self._frames, self._frames + k.shape[2]
        own = self._room(layer, end, k)
        own[0, :, :, begin:end], own[1, :, :, begin:end] = k, v
        if begin == 0 and self._shared is None:
            keys, values = k, v
        else:
            seen = own[:, :, :, :end].to(q.dtype)
            if self._shared is not None:
                # One copy for a fast kernel: cheaper than attending to both parts and putting the results together.
                seen = torch.cat([self._shared.layers[layer].to(q.dtype), seen], dim=3)
            keys, values = seen  # (B, heads, past + T, d)
        parts, after = [], q.shape[2]
        for chunk in torch.split(q, CHUNK_FRAMES, dim=2):  # by chunk, there is nothing to mask and nothing in vain
            after -= chunk.shape[2]
            visible = keys.shape[2] - after
            parts.append(F.scaled_dot_product_attention(chunk, keys[:, :, :visible], values[:, :, :visible]))
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def commit(self, frames: int) -> None:
        """The block of `frames` frames, a multiple of 50, that went through last is finished."""
        begin = self._frames
        slots = None if self._window is None else self._window // CHUNK_FRAMES
        for chunk in range(frames // CHUNK_FRAMES):
            source = begin + chunk * CHUNK_FRAMES
            target = self._chunks_seen * CHUNK_FRAMES if slots is None else self._chunks_seen % slots * CHUNK_FRAMES
            self._chunks_seen += 1
            if target != source:
                for own in self._own:
                    if own is not None:
                        own[:, :, :, target : target + CHUNK_FRAMES] = own[:, :, :, source : source + CHUNK_FRAMES]
        self._frames = begin + frames if self._window is None else min(begin + frames, self._window)
        self._tails = self._new_tails
        self._new_tails = [None, None]

    def freeze(self) -> Prefix:
        """The own part as a prefix for others; this object is not to be used again."""
        layers = tuple(own[:, :, :, : self._frames].contiguous() for own in self._own if own is not None)
        return Prefix(layers, tuple(tail for tail in self._tails if tail is not None))

    def _room(self, layer: int, frames: int, like: Tensor) -> Tensor:
        own = self._own[layer]
        if own is None:
            own = like.new_empty(2, *like.shape[:2], frames, like.shape[3], dtype=self._dtype)
        elif own.shape[3] < frames:
            grown = int(own.shape[3] * GROWTH)
            capacity = max(frames, grown if self._window is None else min(grown, self._window + CHUNK_FRAMES))
            wider = own.new_empty(*own.shape[:3], capacity, own.shape[4])
            wider[:, :, :, : self._frames] = own[:, :, :, : self._frames]
            own = wider
        self._own[layer] = own
        return own

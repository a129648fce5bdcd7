"""The flow's network: a diffusion transformer over mel frames, causal but for its attention mask.

It maps (noisy mel x, token features mu, prompt mel cond, speaker, time) to a velocity. All that depends on the time is
a `Modulation`, which can be computed once for each step of the solver. Frames that nothing later can change may leave
their keys, values and convolution tails in a `Past`, so that the next frames are computed without them.

Attribute names are those of the published checkpoint.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.cosyvoice.past import Past

MELS = 80
TIME_FREQUENCIES = 128
POSITION_KERNEL = 31
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class DiTDims:
    """The sizes that differ between a published and a tiny network."""

    dim: int
    depth: int
    heads: int
    dim_head: int
    ff_dim: int
    position_groups: int


class Modulation(NamedTuple):
    """What the time does to each block and to the tail: `blocks` (depth, 6, dim) in the order shift, scale and gate
    of the attention, then of the feed-forward; `out` (2, dim) in the order scale, shift."""

    blocks: Tensor
    out: Tensor


class TimeEmbedding(nn.Module):
    """A time in [0, 1], () -> (dim,)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, time: Tensor) -> Tensor:
        rate = -math.log(10000) / (TIME_FREQUENCIES - 1)
        frequencies = torch.exp(torch.arange(TIME_FREQUENCIES, device=time.device, dtype=time.dtype) * rate)
        angles = 1000 * time * frequencies  # (128,)
        out: Tensor = self.time_mlp(torch.cat([angles.sin(), angles.cos()]))  # (256,) -> (dim,)
        return out


class PositionConv(nn.Module):
    """Tells frames where they stand: two grouped causal convolutions over (B, T, dim)."""

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv1d(dim, dim, POSITION_KERNEL, groups=groups), nn.Mish())
        self.conv2 = nn.Sequential(nn.Conv1d(dim, dim, POSITION_KERNEL, groups=groups), nn.Mish())

    def forward(self, h: Tensor, past: Past | None) -> Tensor:
        x = h.transpose(1, 2)  # (B, dim, T)
        for index, conv in enumerate((self.conv1, self.conv2)):
            tail = past.tail(index) if past else None
            if tail is None:
                tail = x.new_zeros(x.shape[0], x.shape[1], POSITION_KERNEL - 1)
            x = torch.cat([tail, x], dim=-1)  # (B, dim, 30 + T)
            if past:
                past.keep_tail(index, x[..., -(POSITION_KERNEL - 1) :])
            x = conv(x)  # (B, dim, T)
        return x.transpose(1, 2)


class InputEmbedding(nn.Module):
    """Mixes what is known of each frame, (B, T, 80) each -> (B, T, dim)."""

    def __init__(self, dims: DiTDims) -> None:
        super().__init__()
        self.proj = nn.Linear(4 * MELS, dims.dim)
        self.conv_pos_embed = PositionConv(dims.dim, dims.position_groups)

    def forward(self, x: Tensor, cond: Tensor, mu: Tensor, spks: Tensor, past: Past | None = None) -> Tensor:
        h = self.proj(torch.cat([x, cond, mu, spks], dim=-1))  # (B, T, 320) -> (B, T, dim)
        return h + self.conv_pos_embed(h, past)  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """The frequencies of the rotary embedding, stored in the checkpoint: always float32."""

    def __init__(self, dim_head: int) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", torch.empty(dim_head // 2))

    def forward(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Cosines and sines of the positions [start, stop): (2, stop - start, dim_head / 2)."""
        precise = like.dtype if like.dtype == torch.float64 else torch.float32
        positions = torch.arange(start, stop, device=like.device, dtype=precise)
        angles = positions[:, None] * self.inv_freq.to(precise)  # (T, dim_head / 2)
        return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn the interleaved pairs of the last axis, (B, T, dim_head) -> the same."""
    cos, sin = rope
    even, odd = x[..., 0::2].to(rope.dtype), x[..., 1::2].to(rope.dtype)  # (B, T, dim_head / 2)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Softmax attention whose rotary embedding reaches the first head only, as the published weights expect."""

    def __init__(self, dims: DiTDims) -> None:
        super().__init__()
        inner = dims.heads * dims.dim_head
        self.heads, self.dim_head = dims.heads, dims.dim_head
        self.to_q = nn.Linear(dims.dim, inner)
        self.to_k = nn.Linear(dims.dim, inner)
        self.to_v = nn.Linear(dims.dim, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, dims.dim)])

    def forward(self, h: Tensor, rope: Tensor, mask: Tensor | None, past: Past | None, layer: int) -> Tensor:
        q, k, v = self.to_q(h), self.to_k(h), self.to_v(h)  # (B, T, heads * dim_head)
        for x in (q, k):
            x[..., : self.dim_head] = rotate(x[..., : self.dim_head], rope)
        split = (*h.shape[:2], self.heads, self.dim_head)
        q, k, v = (x.view(split).transpose(1, 2) for x in (q, k, v))  # (B, heads, T, dim_head)
        if past is None:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            x = past.attend(layer, q, k, v)
        out: Tensor = self.to_out[0](x.transpose(1, 2).flatten(-2))  # (B, T, heads * dim_head) -> (B, T, dim)
        return out


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), Linear."""

    def __init__(self, dims: DiTDims) -> None:
        super().__init__()
        widen = nn.Sequential(nn.Linear(dims.dim, dims.ff_dim), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(widen, nn.Identity(), nn.Linear(dims.ff_dim, dims.dim))

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.ff(h)
        return out


class TimeNorm(nn.Module):
    """Holds the layer that turns the time into `parts` vectors of a modulation."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, parts * dim)
        self.parts = parts

    def forward(self, time: Tensor) -> Tensor:
        out: Tensor = self.linear(F.silu(time))  # (dim,) -> (parts * dim,)
        return out.view(self.parts, -1)


def modulate(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """LayerNorm without weights, then scaled and shifted: (B, T, dim) -> the same."""
    return F.layer_norm(h, h.shape[-1:], eps=NORM_EPSILON) * (1 + scale) + shift


class Block(nn.Module):
    """Attention and feed-forward, each gated by the time."""

    def __init__(self, dims: DiTDims) -> None:
        super().__init__()
        self.attn_norm = TimeNorm(dims.dim, 6)
        self.attn = Attention(dims)
        self.ff = FeedForward(dims)

    def forward(
        self, h: Tensor, modulation: Tensor, rope: Tensor, mask: Tensor | None, past: Past | None, layer: int
    ) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation
        h = h + gate_a * self.attn(modulate(h, scale_a, shift_a), rope, mask, past, layer)
        return h + gate_m * self.ff(modulate(h, scale_m, shift_m))  # type: ignore[no-any-return]


class DiT(nn.Module):
    """The whole network."""

    def __init__(self, dims: DiTDims) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(dims.dim)
        self.input_embed = InputEmbedding(dims)
        self.rotary_embed = Rotary(dims.dim_head)
        self.transformer_blocks = nn.ModuleList(Block(dims) for _ in range(dims.depth))
        self.norm_out = TimeNorm(dims.dim, 2)
        self.proj_out = nn.Linear(dims.dim, MELS)

    def blocks(self) -> Iterator[Block]:
        """The transformer blocks in order."""
        return iter(cast("Iterable[Block]", self.transformer_blocks))

    def modulation(self, time: Tensor) -> Modulation:
        """All that the network needs to know of a time, a scalar in [0, 1]."""
        embedded = self.time_embed(time)  # () -> (dim,)
        blocks = torch.stack([block.attn_norm(embedded) for block in self.blocks()])  # (depth, 6, dim)
        return Modulation(blocks, self.norm_out(embedded))

    def drop_time_weights(self) -> None:
        """Free the layers that only `modulation` uses (140 M of the published 332 M parameters)."""
        del self.time_embed, self.norm_out
        for block in self.blocks():
            del block.attn_norm

    def forward(
        self,
        x: Tensor,
        mu: Tensor,
        cond: Tensor,
        spks: Tensor,
        modulation: Modulation,
        *,
        start: int = 0,
        mask: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """The velocity of frames [start, start + T): x, mu, cond (B, 80, T), spks (B, 80) -> (B, 80, T).

        Without a `past`, `mask` (T, T) says which of these frames (columns) each of them (rows) may see; None means
        all. With one, these frames begin with a chunk, each sees the past and the chunks up to its own, and their
        keys and values are written behind those of the past.
        """
        frames = x.shape[-1]
        speaker = spks[:, None].expand(-1, frames, -1)  # (B, 80) -> (B, T, 80)
        h = self.input_embed(x.mT, cond.mT, mu.mT, speaker, past)  # (B, T, dim)
        rope = self.rotary_embed(start, start + frames, h)
        for layer, block in enumerate(self.blocks()):
            h = block(h, modulation.blocks[layer], rope, mask, past, layer)
        scale, shift = modulation.out
        out: Tensor = self.proj_out(modulate(h, scale, shift))  # (B, T, dim) -> (B, T, 80)
        return out.mT

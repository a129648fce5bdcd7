"""What the transformer keeps of finished chunks: the prompt for ever, of the speech the last few."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from backends.cosyvoice.flow import chunk_mask
from backends.cosyvoice.past import CHUNK_FRAMES, Past, Prefix
from tests.golden import largest_difference

HEADS, DIM = 2, 4


def random_block(frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, HEADS, frames, DIM, generator=generator, dtype=torch.float64)
    return q, k, v


def prefix(frames: int, generator: torch.Generator) -> Prefix:
    _, k, v = random_block(frames, generator)
    return Prefix((torch.stack([k, v]),), (torch.zeros(2, 3, 30), torch.zeros(2, 3, 30)))


@settings(deadline=None, max_examples=50)
@given(
    prompt_chunks=st.integers(0, 2),
    blocks=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    window_chunks=st.none() | st.integers(1, 5),
)
def test_a_block_sees_the_prompt_the_window_and_itself(
    prompt_chunks: int, blocks: list[int], window_chunks: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    shared = prefix(prompt_chunks * CHUNK_FRAMES, generator) if prompt_chunks else None
    window = None if window_chunks is None else window_chunks * CHUNK_FRAMES
    past = Past(1, torch.float64, shared, window)
    keys = values = torch.empty(2, HEADS, 0, DIM, dtype=torch.float64)
    for chunks in blocks:
        q, k, v = random_block(chunks * CHUNK_FRAMES, generator)
        mask = chunk_mask(q.shape[2], q.device)
        if window is not None:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        seen = [(keys, values), (k, v)]
        if shared is not None:
            seen.insert(0, (shared.layers[0][0], shared.layers[0][1]))
        every_key, every_value = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
        free = torch.ones(q.shape[2], every_key.shape[2] - q.shape[2], dtype=torch.bool)
        wanted = F.scaled_dot_product_attention(q, every_key, every_value, attn_mask=torch.cat([free, mask], dim=1))
        assert largest_difference(past.attend(0, q, k, v), wanted) < 1e-12
        past.commit(q.shape[2])
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)


def test_a_block_that_is_not_committed_leaves_no_trace() -> None:
    generator = torch.Generator().manual_seed(1)
    past = Past(1, torch.float64)
    first, lost, second = (random_block(CHUNK_FRAMES, generator) for _ in range(3))
    past.attend(0, *first)
    past.keep_tail(0, torch.ones(2, 3, 30))
    past.commit(CHUNK_FRAMES)
    past.attend(0, *lost)
    past.keep_tail(0, torch.zeros(2, 3, 30))
    found = past.attend(0, *second)
    keys, values = (torch.cat([first[i], second[i]], dim=2) for i in (1, 2))
    assert largest_difference(found, F.scaled_dot_product_attention(second[0], keys, values)) < 1e-12
    tail = past.tail(0)
    assert tail is not None
    assert bool((tail == 1).all())

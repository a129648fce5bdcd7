"""Speech tokens to mel frames, at constant cost per chunk.

25 tokens make a chunk of 50 mel frames. A frame sees all chunks up to its own, counted from the start of the voice's
prompt, and everything else in the network looks back only: a complete chunk never changes again. So `step` computes
complete chunks alone and keeps of them what later ones need; the last step computes the rest as well. The result is
that of computing everything at once, which `whole` does, as the reference.

The solver is Euler's, ten steps on a cosine grid, with classifier-free guidance: row 0 of each batch knows the tokens,
the speaker and the prompt's mel, row 1 knows nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.cosyvoice.dit import MELS, DiT, DiTDims, Modulation
from backends.cosyvoice.noise import FlowNoise, SeededFlowNoise
from backends.cosyvoice.past import CHUNK_FRAMES, Past, Prefix
from backends.cosyvoice.schedule import LOOK_AHEAD

FRAMES_PER_TOKEN = 2
FRAMES_PER_SECOND = 50
EULER_STEPS = 10
GUIDANCE = 0.7
SPEAKER_DIM = 192
LEAKY_SLOPE = 0.01

Check = Callable[[], None]
"""Called before each step of the solver, so that a caller can stop a long call by raising."""


@dataclass(frozen=True, slots=True)
class FlowDims:
    """The sizes of the flow around the transformer."""

    vocabulary: int
    look_ahead_channels: int
    dit: DiTDims


class PreLookahead(nn.Module):
    """Mixes each token with the three behind it and the two before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, channels, LOOK_AHEAD + 1)
        self.conv2 = nn.Conv1d(channels, MELS, 3)

    def forward(self, rows: Tensor, ahead: Tensor, before: Tensor) -> Tensor:
        """rows (n, 80), ahead (3, 80), before (0 to 2, 80): (n, 80). Missing rows before are zeros of the second
        convolution's input, not of the first's."""
        x = torch.cat([before, rows, ahead]).mT[None]  # (1, 80, b + n + 3)
        x = F.leaky_relu(self.conv1(x), LEAKY_SLOPE)  # (1, channels, b + n)
        x = F.pad(x, (2 - before.shape[0], 0))  # (1, channels, 2 + n)
        out: Tensor = self.conv2(x)[0].mT + rows  # (n, 80)
        return out


class Decoder(nn.Module):
    """A level of the checkpoint's names."""

    def __init__(self, dims: DiTDims) -> None:
        super().__init__()
        self.estimator = DiT(dims)


class FlowNetwork(nn.Module):
    """All weights of flow.pt under their published names."""

    def __init__(self, dims: FlowDims) -> None:
        super().__init__()
        # The layer's own normal draw makes torch import its compiler when the device is "meta": seconds for nothing.
        self.input_embedding = nn.Embedding(
            dims.vocabulary, MELS, _weight=torch.empty(dims.vocabulary, MELS).uniform_(-1, 1)
        )
        self.spk_embed_affine_layer = nn.Linear(SPEAKER_DIM, MELS)
        self.pre_lookahead_layer = PreLookahead(dims.look_ahead_channels)
        self.decoder = Decoder(dims.dit)

    def speaker(self, embedding: Tensor) -> Tensor:
        """A speaker embedding of any length, (192,) -> (80,)."""
        out: Tensor = self.spk_embed_affine_layer(F.normalize(embedding, dim=0, eps=1e-12))
        return out


def time_grid(steps: int = EULER_STEPS) -> Tensor:
    """The times at which the solver looks, dense at the start: 1 - cos(i / steps * pi / 2), (steps + 1,) float32."""
    return 1 - torch.cos(torch.linspace(0, 1, steps + 1) * 0.5 * math.pi)


def chunk_mask(frames: int, device: torch.device) -> Tensor:
    """(frames, frames) bool: row i sees column j if j's chunk is not after i's. The first frame begins a chunk."""
    chunk = torch.arange(frames, device=device) // CHUNK_FRAMES
    return chunk[:, None] >= chunk


def solve(
    estimator: DiT,
    modulation_at: Callable[[int], Modulation],
    x: Tensor,
    mu: Tensor,
    cond: Tensor,
    spks: Tensor,
    *,
    start: int = 0,
    mask: Tensor | None = None,
    pasts: Sequence[Past] | None = None,
    check: Check | None = None,
) -> Tensor:
    """From noise to mel for frames [start, start + T): x, mu, cond (80, T), spks (80,) -> (80, T).

    x stays in its own precision; mu, cond and spks have the network's.
    """
    rows = [torch.stack([known, torch.zeros_like(known)]) for known in (mu, cond, spks)]  # (2, ...)
    grid = time_grid()
    time = grid[0]
    step_size = grid[1] - grid[0]
    for step in range(EULER_STEPS):
        if check:
            check()
        both = x.to(mu.dtype).expand(2, -1, -1)  # (2, 80, T)
        past = pasts[step] if pasts else None
        velocity = estimator(both, *rows, modulation_at(step), start=start, mask=mask, past=past).to(x.dtype)
        guided = (1 + GUIDANCE) * velocity[0] - GUIDANCE * velocity[1]  # (80, T)
        x = x + step_size.to(x.dtype) * guided
        time = time + step_size
        if step + 2 <= EULER_STEPS:
            step_size = grid[step + 2] - time
    return x


@dataclass(frozen=True, slots=True)
class VoicePrefix:
    """A voice as the flow needs it, with the finished frames of its prompt. Read-only: requests share it.

    `tokens` (P,), `mel` (80, 2P), `speaker` (80,); `prefixes`: one per step of the solver, or none where the prompt
    is too short to have a finished chunk; `frames`: how many frames they hold.
    """

    tokens: tuple[int, ...]
    mel: Tensor
    speaker: Tensor
    prefixes: tuple[Prefix, ...]
    frames: int

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self.mel.nbytes + self.speaker.nbytes + sum(prefix.nbytes for prefix in self.prefixes)


@dataclass(slots=True)
class FlowState:
    """What one utterance has so far. `frames`: finished frames, the prompt's included."""

    voice: VoicePrefix
    pasts: list[Past]
    frames: int
    tokens: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def nbytes(self) -> int:
        """Memory on the device of this utterance's own keys and values."""
        return sum(past.nbytes for past in self.pasts)


class Flow:
    """Owns the weights, on one device and in one precision; takes the network over (and drops the time's layers).

    `cache_dtype` is the precision of keys and values of finished frames, of voices and of speech; None: the network's.
    `max_cached_seconds` bounds the finished speech that a chunk still sees; older chunks then leave, the prompt never
    does. That is an approximation: the published model sees everything.
    """

    def __init__(
        self,
        network: FlowNetwork,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        max_cached_seconds: float | None = None,
        noise: FlowNoise | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._cache_dtype = cache_dtype or dtype
        self._noise = noise or SeededFlowNoise()
        self._window: int | None = None
        if max_cached_seconds is not None:
            self._window = max(1, round(max_cached_seconds * FRAMES_PER_SECOND / CHUNK_FRAMES)) * CHUNK_FRAMES
        estimator = network.decoder.estimator
        with torch.inference_mode():
            precise = dtype if dtype == torch.float64 else torch.float32
            estimator.to(precise)
            weight = estimator.proj_out.weight
            tables = [estimator.modulation(time.to(weight)) for time in time_grid()[:EULER_STEPS]]
        self._modulations = [Modulation(*(part.to(self.device, dtype) for part in table)) for table in tables]
        estimator.drop_time_weights()
        frequencies = estimator.rotary_embed.inv_freq
        self._depth = len(estimator.transformer_blocks)
        self._network = network.to(self.device, dtype).requires_grad_(False)
        # Rounded to float16, the frequencies would be wrong by whole turns at the end of a long utterance.
        estimator.rotary_embed.inv_freq = frequencies.to(self.device)

    @torch.inference_mode()
    def prepare_voice(
        self, prompt_token: Sequence[int] | Tensor, prompt_mel: Tensor, embedding: Tensor, check: Check | None = None
    ) -> VoicePrefix:
        """Compute what all utterances of a voice have in common.

        `prompt_token` (P,), `prompt_mel` (80, 2P), `embedding` (192,), of any length. The last three prompt tokens look
        ahead into the speech, and with them their whole chunk: 50 * floor((P - 3) / 25) frames are finished.
        Raises ValueError for shapes that do not fit.
        """
        tokens = tuple(int(token) for token in prompt_token)
        if prompt_mel.shape != (MELS, FRAMES_PER_TOKEN * len(tokens)):
            wanted = (MELS, FRAMES_PER_TOKEN * len(tokens))
            raise ValueError(f"prompt_mel is {tuple(prompt_mel.shape)}; {len(tokens)} prompt tokens need {wanted}")
        if embedding.shape != (SPEAKER_DIM,):
            raise ValueError(f"embedding is {tuple(embedding.shape)}, not ({SPEAKER_DIM},)")
        self._check_ids(tokens)
        speaker = self._network.speaker(embedding.to(self.device, self.dtype))
        mel = prompt_mel.to(self.device, self.dtype)
        voice = VoicePrefix(tokens, mel, speaker, (), 0)
        frames = self._finished_frames(len(tokens), final=False)
        if not frames:
            return voice
        pasts = [Past(self._depth, self._cache_dtype) for _ in range(EULER_STEPS)]
        self._block(voice, tokens, 0, frames, final=False, pasts=pasts, check=check)
        prefixes = []
        for past in pasts:
            past.commit(frames)
            prefixes.append(past.freeze())
        return VoicePrefix(tokens, mel, speaker, tuple(prefixes), frames)

    def start(self, voice: VoicePrefix) -> FlowState:
        """The state of an utterance without speech yet."""
        shared: Sequence[Prefix | None] = voice.prefixes or [None] * EULER_STEPS
        pasts = [Past(self._depth, self._cache_dtype, prefix, self._window) for prefix in shared]
        return FlowState(voice, pasts, voice.frames)

    @torch.inference_mode()
    def step(
        self, tokens: Sequence[int], state: FlowState, *, final: bool = False, check: Check | None = None
    ) -> tuple[Tensor, FlowState]:
        """Add tokens to the utterance: the mel frames that can no longer change, (80, T) float32.

        `final` says that these are the last tokens: then all frames come out. T is 0 where no chunk was completed.
        The state that was passed in is used up, also by a call that raised. Raises ValueError after the final step.
        """
        if state.finished:
            raise ValueError("this utterance has had its final step")
        self._check_ids(tokens)
        state.tokens += [int(token) for token in tokens]
        every = (*state.voice.tokens, *state.tokens)
        stop = self._finished_frames(len(every), final)
        begin, state.finished = state.frames, final
        if stop <= begin:
            return torch.empty(MELS, 0, device=self.device), state
        mel = self._block(state.voice, every, begin, stop, final=final, pasts=state.pasts, check=check)
        if not final:
            for past in state.pasts:
                past.commit(stop - begin)
            state.frames = stop
        return mel[:, max(0, state.voice.mel.shape[1] - begin) :], state

    @torch.inference_mode()
    def whole(
        self,
        tokens: Sequence[int],
        voice: VoicePrefix,
        *,
        streaming: bool,
        final: bool = True,
        check: Check | None = None,
    ) -> Tensor:
        """The mel of an utterance from nothing, (80, T) float32: T = 2 * tokens, less 6 if not final.

        `streaming` true hides later chunks, as `step` does; false lets every frame see every other, as the published
        model does where it does not stream and in the last chunk where it does. Raises ValueError for fewer than three
        tokens that are not the last.
        """
        self._check_ids(tokens)
        if not final and len(tokens) < LOOK_AHEAD:
            raise ValueError(f"{len(tokens)} tokens; {LOOK_AHEAD} are needed to look ahead")
        if not tokens:
            return torch.empty(MELS, 0, device=self.device)
        every = (*voice.tokens, *tokens)
        stop = FRAMES_PER_TOKEN * (len(every) - (0 if final else LOOK_AHEAD))
        mel = self._block(voice, every, 0, stop, final=final, masked=streaming, check=check)
        return mel[:, voice.mel.shape[1] :]

    def _finished_frames(self, tokens: int, final: bool) -> int:
        """How many frames of so many tokens (prompt included) can no longer change."""
        if final:
            return FRAMES_PER_TOKEN * tokens
        return max(0, tokens - LOOK_AHEAD) * FRAMES_PER_TOKEN // CHUNK_FRAMES * CHUNK_FRAMES

    def _block(
        self,
        voice: VoicePrefix,
        tokens: Sequence[int],
        begin: int,
        stop: int,
        *,
        final: bool,
        pasts: Sequence[Past] | None = None,
        masked: bool = True,
        check: Check | None = None,
    ) -> Tensor:
        """Frames [begin, stop) of prompt and speech, (80, stop - begin) float32 (float64 in a float64 network)."""
        mu = self._features(tokens, begin // FRAMES_PER_TOKEN, stop // FRAMES_PER_TOKEN, final)  # (80, T)
        cond = torch.zeros_like(mu)
        known = voice.mel[:, begin:stop]
        cond[:, : known.shape[1]] = known
        precise = self.dtype if self.dtype == torch.float64 else torch.float32
        x = self._noise.columns(begin, stop).to(self.device, precise)  # (80, T)
        mask = chunk_mask(stop - begin, self.device) if masked and not pasts else None
        estimator = self._network.decoder.estimator
        return solve(
            estimator,
            self._modulations.__getitem__,
            x,
            mu,
            cond,
            voice.speaker,
            start=begin,
            mask=mask,
            pasts=pasts,
            check=check,
        )

    def _features(self, tokens: Sequence[int], begin: int, stop: int, final: bool) -> Tensor:
        """mu for tokens [begin, stop): (80, 2 * (stop - begin))."""
        first = max(0, begin - 2)
        ids = torch.tensor(tokens[first : stop + LOOK_AHEAD], device=self.device).clamp(min=0)
        rows = self._network.input_embedding(ids)  # (n, 80)
        if final:
            rows = F.pad(rows, (0, 0, 0, LOOK_AHEAD))
        before, rows, ahead = rows.split([begin - first, stop - begin, LOOK_AHEAD])
        mu = self._network.pre_lookahead_layer(rows, ahead, before)  # (stop - begin, 80)
        out: Tensor = mu.repeat_interleave(FRAMES_PER_TOKEN, dim=0).mT
        return out

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self._network.input_embedding.num_embeddings
        worst = max(tokens, default=0)
        if worst >= size:
            raise ValueError(f"speech token {worst}; this flow knows 0 to {size - 1}")

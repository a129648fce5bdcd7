"""A stream of speech tokens to a stream of audio: schedule, flow and vocoder put together for one utterance at a time.

Runs in the caller's thread. The audio of a piece is handed out before the next tokens are waited for.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, get_args

from torch import Tensor

from backends.api import Samples
from backends.cosyvoice.features import stretch_mel
from backends.cosyvoice.flow import FRAMES_PER_TOKEN, Flow, VoicePrefix
from backends.cosyvoice.schedule import FirstHop, Schedule
from backends.cosyvoice.vocoder import Vocoder
from backends.errors import Cancelled, SynthesisFailed

FinalChunk = Literal["causal", "full"]


class Tokens(Protocol):
    """The reading side of a token stream."""

    def wait(self, at_least: int) -> tuple[Sequence[int], bool]:
        """All tokens so far and whether no more will come; blocks until there are enough or the stream has ended."""
        ...


class TokensToAudio:
    """Owns the choices, shares the networks.

    `first_hop`: see `Schedule`. `final_chunk` "causal" continues the speech as every piece before; "full" computes the
    last piece with everything in sight, as the published model does: from nothing, and not continuous with the rest.
    """

    def __init__(
        self, flow: Flow, vocoder: Vocoder, *, first_hop: FirstHop = "normal", final_chunk: FinalChunk = "causal"
    ) -> None:
        if final_chunk not in get_args(FinalChunk):
            raise ValueError(f"final_chunk is {final_chunk!r}; it can be {' or '.join(get_args(FinalChunk))}")
        Schedule(0, first_hop)  # refuses an unknown value now, not at the first request
        self.flow = flow
        self.vocoder = vocoder
        self._first_hop = first_hop
        self._final_chunk = final_chunk

    def run(self, tokens: Tokens, voice: VoicePrefix, cancel: threading.Event) -> Iterator[Samples]:
        """Audio as the tokens come, float32 at 24 kHz: 960 samples for each token in all; nothing for no tokens.

        `cancel` is looked at before each step of the flow's solver and each vocoder call: raises Cancelled. What the
        stream raises passes through; a failure of the networks is SynthesisFailed.
        """
        schedule = Schedule(len(voice.tokens), self._first_hop)
        flow_state, vocoder_state = self.flow.start(voice), self.vocoder.start()
        check = _checker(cancel)
        while not schedule.finished:
            every, done = tokens.wait(schedule.needed)
            step = schedule.next_ready(len(every), done)
            if step is None:
                continue
            with _network_errors():
                if step.final and self._final_chunk == "full":
                    whole = self.flow.whole(every[: step.num_tokens], voice, streaming=False, check=check)
                    mel = whole[:, FRAMES_PER_TOKEN * step.token_offset :]
                else:
                    new = every[len(flow_state.tokens) : step.num_tokens]
                    mel, flow_state = self.flow.step(new, flow_state, final=step.final, check=check)
                check()
                audio, vocoder_state = self.vocoder.step(mel, vocoder_state, final=step.final)
                samples = _samples(audio)
            if len(samples):
                yield samples

    def whole(
        self, tokens: Sequence[int], voice: VoicePrefix, cancel: threading.Event, *, speed: float = 1.0
    ) -> Samples:
        """Audio of a complete utterance, every frame having seen all others, as the published model does it where it
        does not stream. `speed` stretches the mel. Raises as `run` does."""
        check = _checker(cancel)
        with _network_errors():
            mel = self.flow.whole(tokens, voice, streaming=False, check=check)
            if speed != 1.0:
                mel = stretch_mel(mel, speed)
            check()
            return _samples(self.vocoder.whole(mel))


def _checker(cancel: threading.Event) -> Callable[[], None]:
    def check() -> None:
        if cancel.is_set():
            raise Cancelled("cancelled while tokens were turned into audio")

    return check


@contextmanager
def _network_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch: out of memory, a device lost; ours: a token out of range
        raise SynthesisFailed(f"tokens could not be turned into audio: {error}") from error


def _samples(audio: Tensor) -> Samples:
    out: Samples = audio.float().cpu().numpy()
    return out

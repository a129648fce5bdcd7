"""Language models and vocoders with gates, around the real one or none: what a test needs to stop time at a token."""

import itertools
import threading
import time
from collections.abc import Callable, Generator

from torch import Tensor

from backends.cosyvoice.speech_lm import LanguageModel, LMPrompt
from backends.cosyvoice.vocoder import Vocoder, VocoderState


class Gate:
    """A place where a thread waits. The test first learns that the thread has come, and then lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self._reached.set()
        assert self._open.wait(30), "nobody opened the gate"

    def reached(self) -> None:
        assert self._reached.wait(30), "nobody came to the gate"

    def open(self) -> None:
        self._open.set()


class Wrapped:
    """A language model that does what it wraps does, and something before each token."""

    def __init__(self, inner: LanguageModel, before: Callable[[int], None]) -> None:
        """`before(n)` is called before token n (counted from 0) of each generation, in the thread that makes it."""
        self._inner, self._before = inner, before
        self.events: list[str] = []
        self.stopped: Callable[[], bool] = lambda: False
        self._runs = itertools.count(1)

    @property
    def text_rows(self) -> int:
        return self._inner.text_rows

    @property
    def context(self) -> int:
        return self._inner.context

    def warm(self, prompt: LMPrompt) -> None:
        self.events.append("warmed")
        self._inner.warm(prompt)

    def close(self) -> None:
        self.events.append("closed")
        self._inner.close()

    def until_stopped(self) -> None:
        """For `before`: do not go on until the request that this generation is for has been stopped."""
        deadline = time.monotonic() + 30
        while not self.stopped():
            assert time.monotonic() < deadline, "nobody stopped the request"
            time.sleep(0.005)

    def generate(
        self, prompt: LMPrompt, *, seed: int | None, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        run = next(self._runs)
        self.stopped = stopped
        self.events.append(f"began {run}")
        tokens = self._inner.generate(prompt, seed=seed, stopped=stopped)
        try:
            for count in itertools.count():
                self._before(count)
                try:
                    token = next(tokens)
                except StopIteration:
                    return
                yield token
        finally:
            tokens.close()
            self.events.append(f"ended {run}")


class WrappedVocoder:
    """A vocoder that does what it wraps does, and something before each call, in the thread that calls."""

    def __init__(self, inner: Vocoder, before: Callable[[], None]) -> None:
        self._inner, self._before = inner, before

    def start(self) -> VocoderState:
        return self._inner.start()

    def step(self, mel: Tensor, state: VocoderState, *, final: bool = False) -> tuple[Tensor, VocoderState]:
        self._before()
        return self._inner.step(mel, state, final=final)

    def whole(self, mel: Tensor, *, final: bool = True) -> Tensor:
        self._before()
        return self._inner.whole(mel, final=final)


class Scripted:
    """A language model without weights: `count` different codes, as far as `before` lets it."""

    text_rows = 151936
    context = 4096

    def __init__(self, count: int) -> None:
        self._count = count

    def warm(self, prompt: LMPrompt) -> None:
        pass

    def close(self) -> None:
        pass

    def generate(
        self, prompt: LMPrompt, *, seed: int | None, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        yield from (100 + token * 7 for token in range(self._count))

"""How long a listener waits for the first sound: tokens streamed one by one, against generating first.

The tiny model with a language model that is slowed down to a fixed time for each token, so that the share of the
whole generation is what counts and not this machine. Streamed, the first audio needs the tokens of the first hop and
its look-ahead (38 at this voice's prompt of 40); generated first, as the fault was that this project cures, it needs all of them.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.api import Utterance
from backends.cosyvoice.backend import CosyVoice
from backends.cosyvoice.options import CosyVoiceOptions
from backends.cosyvoice.schedule import Schedule
from backends.cosyvoice.speech_lm import LanguageModel, LMPrompt, open_speech_lm
from bench._common import Report, Target, median, options
from tests.tiny_cosyvoice import DATA, build

PROMPT_SECONDS = 1.6
TEXT = "This is a text that takes some seconds to say, so that the first sound is far from the last one."


class Slowed:
    """A language model that takes `delay` seconds for each token, and says when each came."""

    def __init__(self, inner: LanguageModel, delay: float) -> None:
        self._inner, self._delay = inner, delay
        self.moments: list[float] = []

    @property
    def text_rows(self) -> int:
        return self._inner.text_rows

    @property
    def context(self) -> int:
        return self._inner.context

    def warm(self, prompt: LMPrompt) -> None:
        self._inner.warm(prompt)

    def close(self) -> None:
        self._inner.close()

    def generate(
        self, prompt: LMPrompt, *, seed: int | None, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        self.moments = []
        due = time.monotonic()
        with closing(self._inner.generate(prompt, seed=seed, stopped=stopped)) as tokens:
            for token in tokens:
                due += self._delay
                time.sleep(max(0.0, due - time.monotonic()))
                self.moments.append(time.monotonic())
                yield token


def one_round(backend: CosyVoice, lm: Slowed, seed: int) -> dict[str, float]:
    """Seconds from the request's start: first audio, last audio, last token; and the number of tokens."""
    began = time.monotonic()
    arrivals = []
    for _ in backend.synthesize(Utterance(TEXT, "voice", seed=seed), threading.Event()):
        arrivals.append(time.monotonic() - began)
    return {
        "first audio": arrivals[0],
        "last audio": arrivals[-1],
        "last token": lm.moments[-1] - began,
        "tokens": float(len(lm.moments)),
        "38th token": lm.moments[min(37, len(lm.moments) - 1)] - began,
    }


def make_backend(folder: Path, name: str, delay: float, **more: Any) -> tuple[CosyVoice, Slowed]:
    lms: list[Slowed] = []

    def open_lm(path: Path, **arguments: Any) -> Slowed:
        lms.append(Slowed(open_speech_lm(path, **arguments), delay))
        return lms[0]

    chosen = CosyVoiceOptions.model_validate({"model_dir": folder, "device": "cpu", "threads": 1, **more})
    backend = CosyVoice(name, chosen, folder / "data", open_lm=open_lm)
    if not backend.voices():
        with np.load(DATA / "golden" / "g_frontend.npz") as recording:
            audio = recording["wave_24k"][: round(PROMPT_SECONDS * 24000)]
        backend.add_voice("voice", "Voice", audio, 24000, "the words of the prompt")
    backend.load()
    return backend, lms[0]


def main() -> None:
    chosen = options(__doc__ or "")
    delay, rounds = (0.005, 1) if chosen.quick else (0.04, 3)
    torch.set_num_threads(1)  # the tiny networks are not worth a second one, which would wait for a core more than help
    with tempfile.TemporaryDirectory() as name:
        folder = build(Path(name))
        ways = {
            "streamed": make_backend(folder, "streamed", delay),
            "generated first": make_backend(folder, "generated first", delay, streaming=False),
        }
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                found[way].append(one_round(*ways[way], seed=number))
        for backend, _ in ways.values():
            backend.close()

    needed = Schedule(round(PROMPT_SECONDS * 25)).needed
    report = Report("first_audio", "The first sound of an utterance", quick=chosen.quick)
    columns = ("tokens", "first audio", "38th token", "last token", "last audio")
    rows = [[way, *(median(one[column] for one in each) for column in columns)] for way, each in found.items()]
    report.add_table(f"{rounds} rounds, {delay * 1000:.0f} ms a token; seconds", ["way", *columns], rows)
    shares = {way: median(one["first audio"] / one["last token"] for one in each) for way, each in found.items()}
    report.add_table(
        "first audio as a share of the whole generation",
        ["way", "share"],
        [[way, share] for way, share in shares.items()],
    )
    report.data = {"rounds": found, "tokens_of_first_step": needed, "delay": delay}
    over = median(one["first audio"] / (needed * delay) for one in found["streamed"])
    report.targets.append(Target(f"first audio streamed, of the time of {needed} tokens", over, 1.2, unit="x"))
    report.notes.append(
        "The networks are tiny: on a real card the first piece also costs the flow's time, which streaming.py measures."
    )
    report.finish(chosen.json)


if __name__ == "__main__":
    main()

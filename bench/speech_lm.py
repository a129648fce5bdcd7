"""What a speech token costs: CosyVoice3's language model on llama.cpp in three ways.

The published sizes with random weights, on two CPU threads: (a) the usual loop of llama-cpp-python, `eval` and
`sample` on a merged vocabulary with the logits of all positions; (b) ours on the same file; (c) ours on the speech
layout. A round reads a new prompt of 110 positions and makes tokens; rounds take the contenders in turns, and a
ratio is the median of the rounds' own ratios. Memory is the peak of a process that does one round and nothing else.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from backends.cosyvoice.ids import SOS, TASK, TEXT_ROWS
from backends.cosyvoice.layout import read_layout
from backends.cosyvoice.llama import Llama
from backends.cosyvoice.speech_lm import LMPrompt, open_speech_lm
from bench._common import Report, Target, median, options

THREADS, CONTEXT = 2, 1024
TEXT, CONSTANT, SPEECH = 58, 30, 50  # with sos and task: 110 positions
TYPES = ("f16", "q8_0")
USUAL, MERGED, OURS = "(a) the usual loop, merged", "(b) ours, merged", "(c) ours, speech"


class Contender(Protocol):
    """Reads a prompt and makes tokens."""

    def round(self, prompt: LMPrompt, tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and seconds for each of the `tokens` after it."""
        ...


class UsualLoop:
    """llama-cpp-python as its users run it."""

    def __init__(self, path: Path) -> None:
        from llama_cpp import Llama as Binding

        self._llama = Binding(
            str(path), n_ctx=CONTEXT, n_threads=THREADS, n_threads_batch=THREADS, logits_all=True, verbose=False
        )

    def round(self, prompt: LMPrompt, tokens: int) -> tuple[float, float]:
        ids = [TEXT_ROWS + SOS, *prompt.text, TEXT_ROWS + TASK, *(TEXT_ROWS + code for code in prompt.speech)]
        began = time.perf_counter()
        self._llama.reset()
        self._llama.eval(ids)
        token = self._llama.sample()
        first = time.perf_counter()
        for _ in range(tokens):
            self._llama.eval([token])
            token = self._llama.sample()
        return first - began, (time.perf_counter() - first) / tokens


class Ours:
    """The product's own language model, nothing kept of earlier prompts."""

    def __init__(self, path: Path) -> None:
        self._lm = open_speech_lm(path, context=CONTEXT, threads=THREADS, gpu_layers=0, kept_bytes=0)

    def round(self, prompt: LMPrompt, tokens: int) -> tuple[float, float]:
        began = time.perf_counter()
        generation = self._lm.generate(prompt, seed=0, stopped=lambda: False)
        next(generation)
        first = time.perf_counter()
        made = sum(1 for _ in islice(generation, tokens))
        ended = time.perf_counter()
        generation.close()
        return first - began, (ended - first) / made


def open_contender(name: str, folder: Path, type: str) -> Contender:
    layout = "speech" if name == OURS else "merged"
    path = folder / f"cosyvoice3-{layout}-{type}.gguf"
    return UsualLoop(path) if name == USUAL else Ours(path)


def prompt(number: int, tokens: int) -> LMPrompt:
    """A prompt that no other round has; long enough for `tokens` tokens that may not end before."""
    random = np.random.default_rng(number)
    text, speech = random.integers(0, 250, TEXT), random.integers(0, 6561, SPEECH)
    return LMPrompt(tuple(text.tolist()), CONSTANT, spoken=tokens, speech=tuple(speech.tolist()))


def build(folder: Path, *, quick: bool) -> None:
    """Both layouts in all types, unless they are there already."""
    # Here, so that a process that measures its memory is not full of them.
    import torch

    from backends.cosyvoice.checkpoint import official
    from backends.cosyvoice.convert import convert
    from backends.cosyvoice.tokenizer import FOLDER
    from tests.tiny_cosyvoice import tiny_shapes, write_tokenizer

    shapes = tiny_shapes() if quick else official("llm")
    missing = [type for type in TYPES if not (folder / f"cosyvoice3-merged-{type}.gguf").exists()]
    if not missing:
        return
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / FOLDER)
    if not quick:
        config = folder / FOLDER / "config.json"
        config.write_text(json.dumps({"num_attention_heads": 14, "num_key_value_heads": 2}))
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        random = torch.randn(shape, generator=generator) * 0.02
        weights[name] = (random + 1 if name.endswith("norm.weight") else random).half()
    weights["llm.model.lm_head.weight"] = weights["llm.model.model.embed_tokens.weight"]
    torch.save(weights, folder / "llm.pt")
    del weights
    for type in missing:
        convert(folder, folder, type, expected=shapes)
    (folder / "llm.pt").unlink()
    print(f"random model of {'tiny' if quick else 'full'} size made in {time.monotonic() - began:.0f} s")


def largest_difference(folder: Path, type: str) -> float:
    """How far the scores of the two layouts are apart after the same prompt."""
    one = prompt(0, 1)
    scores = []
    for name in ("merged", "speech"):
        path = folder / f"cosyvoice3-{name}-{type}.gguf"
        layout = read_layout(path)
        ids = [layout.text_rows + SOS, *one.text, layout.text_rows + TASK]
        with Llama(path, context=CONTEXT, batch=512, threads=THREADS, gpu_layers=0) as llama:
            if layout.embeddings is None:
                logits = llama.decode_tokens(ids, lambda: False)
            else:
                logits = llama.decode_embeddings(layout.embeddings[ids].astype(np.float32), lambda: False)
            scores.append(logits[layout.first_row : layout.first_row + layout.speech_rows].copy())
    return float(np.abs(scores[0] - scores[1]).max())


def peak_memory(name: str, folder: Path, type: str) -> float:
    """MB at the peak of a process of its own."""
    command = [sys.executable, "-m", "bench.speech_lm", "--child", name, "--workdir", str(folder), "--type", type]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(answer.stdout.split()[-1])


def child(name: str, folder: Path, type: str) -> None:
    open_contender(name, folder, type).round(prompt(0, 10), 10)
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1000)


def measure(report: Report, folder: Path, type: str, rounds: int, tokens: int) -> None:
    names = (USUAL, MERGED, OURS)
    contenders = {name: open_contender(name, folder, type) for name in names}
    for contender in contenders.values():
        contender.round(prompt(10**6, 5), 5)  # the weights come into memory here
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(contenders[name].round(prompt(number, tokens), tokens))
    del contenders
    rows = []
    ratios: dict[str, tuple[float, float]] = {}
    for name in names:
        pairs = list(zip(taken[name], taken[USUAL], strict=True))
        ratios[name] = (
            median(one[0] / usual[0] for one, usual in pairs),
            median(one[1] / usual[1] for one, usual in pairs),
        )
        first, each = (median(one[index] for one in taken[name]) for index in (0, 1))
        rows.append([name, each * 1000, ratios[name][1], first, ratios[name][0], peak_memory(name, folder, type)])
    report.add_table(
        f"{type.upper()}, {THREADS} threads, {rounds} rounds",
        ["way", "ms a token", "of (a)", "s for 110 positions", "of (a)", "peak MB"],
        rows,
    )
    report.data[type] = {name: taken[name] for name in names}
    report.targets.append(Target(f"speech token, {type.upper()}: (c) of (a)", ratios[OURS][1], 0.72, unit="x"))
    report.targets.append(Target(f"prompt of 110, {type.upper()}: (c) of (a)", ratios[OURS][0], 0.5, unit="x"))
    difference = largest_difference(folder, type)
    report.notes.append(f"{type.upper()}: the scores of the two layouts differ by at most {difference:.2g}.")


def main() -> None:
    chosen = options(
        __doc__ or "",
        ("--workdir", {"type": Path, "help": "keep the random model (4 GB) there and use it again"}),
        ("--child", {"choices": (USUAL, MERGED, OURS), "help": "one round in this process; prints its peak memory"}),
        ("--type", {"choices": TYPES, "default": TYPES[0], "help": "with --child"}),
    )
    if chosen.child:
        child(chosen.child, chosen.workdir, chosen.type)
        return
    place: AbstractContextManager[Any] = (
        nullcontext(chosen.workdir) if chosen.workdir else tempfile.TemporaryDirectory()
    )
    with place as name:
        folder = Path(name)
        build(folder, quick=chosen.quick)
        report = Report("speech_lm", "A speech token of CosyVoice3's language model", quick=chosen.quick)
        for type in TYPES:
            measure(report, folder, type, rounds=2 if chosen.quick else 5, tokens=5 if chosen.quick else 24)
        report.notes.append("Random weights: speed and memory are those of the real model, what it says is noise.")
        report.notes.append("Peak memory counts the pages of the model file that were read, shared or not.")
        report.finish(chosen.json)


if __name__ == "__main__":
    main()

"""What a chunk of CosyVoice speech costs: recomputed from the start each time, or continued.

The published sizes with random weights, float32, one thread. Three ways to make the same mel: recomputed (the published
code's way: prompt and all tokens so far for each chunk), continued with a cold voice (the prompt goes through the flow
first), continued with a warm one. Two ways to make the same audio. FLOPs are counted at the published depth of 22, on
shapes alone; times at --depth, 2 unless told: ratios hardly depend on it, but seconds do.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from backends.cosyvoice.dit import MELS, DiT, DiTDims
from backends.cosyvoice.flow import SPEAKER_DIM, Flow, FlowDims, FlowNetwork, VoicePrefix, time_grid
from backends.cosyvoice.hift import HiFT, HiFTDims, Snake
from backends.cosyvoice.schedule import LOOK_AHEAD, Schedule, Step
from backends.cosyvoice.vocoder import FRAME_SAMPLES, Vocoder
from bench._common import Report, Target, options

Calls = Iterable[Callable[[], Tensor]]
"""One call for each chunk."""

PUBLISHED_DEPTH = 22
TOKENS_PER_SECOND = 25
HELD_BACK = 8
AGAIN = 2


@dataclass
class Way:
    """One way to make the chunks: seconds and FLOPs of each."""

    name: str
    seconds: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True)
class Plan:
    """What is measured: the width of the networks, the layers that are timed, tokens of prompt and speech.

    FLOPs are counted on shapes alone ("meta"), or by doing the work ("cpu") where that takes less time."""

    width: int
    depth: int
    prompt: int
    tokens: int
    count_on: str
    rounds: int

    def flow_dims(self, depth: int) -> FlowDims:
        dit = DiTDims(self.width, depth, heads=self.width // 64, dim_head=64, ff_dim=2 * self.width, position_groups=16)
        return FlowDims(6561, self.width, dit)

    def hift_dims(self) -> HiFTDims:
        return HiFTDims(self.width // 2, self.width // 2)

    def steps(self) -> list[Step]:
        """All pieces of the utterance, its tokens having come."""
        schedule, steps = Schedule(self.prompt), []
        while step := schedule.next_ready(self.tokens, done=True):
            steps.append(step)
        return steps


def randomised(network: nn.Module) -> nn.Module:
    """The parts of a network that torch leaves uninitialised; the pitch about that of a voice."""
    for module in network.modules():
        if isinstance(module, Snake):
            nn.init.ones_(module.alpha)
    if isinstance(network, HiFT):
        nn.init.constant_(network.f0_predictor.classifier.bias, 200.0)
    if isinstance(network, FlowNetwork):
        inverse = network.decoder.estimator.rotary_embed.inv_freq
        inverse.copy_(10000.0 ** -(torch.arange(len(inverse), device=inverse.device) / len(inverse)))
    return network


class FlowBench:
    """The flow on one device: "cpu" to measure time, "meta" to count FLOPs."""

    def __init__(self, plan: Plan, depth: int, device: str) -> None:
        dims = plan.flow_dims(depth)
        with torch.device(device):
            network = FlowNetwork(dims)
            self.clock = DiT(dims.dit)  # its layers of the time: `Flow` drops its own
            self.embedding = torch.randn(SPEAKER_DIM)
            self.prompt_mel = torch.randn(MELS, 2 * plan.prompt)
        randomised(network)
        self.flow = Flow(network, device=device)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 6561, (plan.prompt + plan.tokens,), generator=generator).tolist()
        self.prompt, self.tokens = ids[: plan.prompt], ids[plan.prompt :]
        self.steps = plan.steps()
        self.grid = [moment.to(device) for moment in time_grid()[:-1]]

    def prepare(self) -> VoicePrefix:
        return self.flow.prepare_voice(self.prompt, self.prompt_mel, self.embedding)

    def recomputed(self, voice: VoicePrefix) -> Calls:
        """One call for each chunk."""

        def chunk(step: Step) -> Tensor:
            with torch.inference_mode():
                for moment in self.grid:
                    self.clock.modulation(moment)
            mel = self.flow.whole(self.tokens[: step.num_tokens], voice, streaming=True, final=step.final)
            return mel[:, 2 * step.token_offset :]

        return [partial(chunk, step) for step in self.steps]

    def continued(self, voice: VoicePrefix | None) -> Calls:
        """One call for each chunk; without a voice the first one prepares it."""
        state: Any = None

        def chunk(step: Step, new: list[int]) -> Tensor:
            nonlocal state
            if state is None:
                state = self.flow.start(voice or self.prepare())
            mel, state = self.flow.step(new, state, final=step.final)
            return mel

        ends = [0, *(step.num_tokens for step in self.steps)]
        pieces = [self.tokens[begin:end] for begin, end in itertools.pairwise(ends)]
        return [partial(chunk, step, new) for step, new in zip(self.steps, pieces, strict=True)]


class VocoderBench:
    """The vocoder on one device, over the mel of the same chunks."""

    def __init__(self, plan: Plan, device: str) -> None:
        with torch.device(device):
            network = HiFT(plan.hift_dims())
            self.mel = torch.randn(MELS, 2 * plan.tokens)
        randomised(network)
        self.vocoder = Vocoder(network, device=device)
        self.ends = [2 * (step.num_tokens - (0 if step.final else LOOK_AHEAD)) for step in plan.steps()]

    def recomputed(self) -> Calls:
        def chunk(begin: int, end: int) -> Tensor:
            final = end == self.mel.shape[1]
            audio = self.vocoder.whole(self.mel[:, :end], final=final)
            return audio[FRAME_SAMPLES * max(0, begin - HELD_BACK) :]

        return [partial(chunk, begin, end) for begin, end in self._pieces()]

    def continued(self) -> Calls:
        state = self.vocoder.start()

        def chunk(begin: int, end: int) -> Tensor:
            nonlocal state
            audio, state = self.vocoder.step(self.mel[:, begin:end], state, final=end == self.mel.shape[1])
            return audio

        return [partial(chunk, begin, end) for begin, end in self._pieces()]

    def _pieces(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise([0, *self.ends]))


def timed(ways: dict[str, Callable[[], Calls]], rounds: int) -> Iterator[tuple[Way, Tensor]]:
    """Each way's times, the best of all rounds for each chunk, and its result. Chunk by chunk, one way after the
    other: what else the machine does meanwhile then meets all of them."""
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    results: dict[str, Tensor] = {}
    for _ in range(rounds):
        parts: dict[str, list[Tensor]] = {name: [] for name in ways}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for chunk in zip(*(calls() for calls in ways.values()), strict=True):
            for name, call in zip(ways, chunk, strict=True):
                begin = time.thread_time()
                parts[name].append(call())
                seconds[name].append(time.thread_time() - begin)
        for name in ways:
            times[name].append(seconds[name])
            results[name] = torch.cat(parts[name], dim=-1)
    return ((Way(name, [min(of_chunk) for of_chunk in zip(*times[name], strict=True)]), results[name]) for name in ways)


def counted(calls: Calls) -> list[float]:
    """FLOPs of each call."""
    counts = []
    for call in calls:
        # The counter knows the products that attention is made of, and not every kernel that does them at once.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            call()
        counts.append(float(counter.get_total_flops()))
    return counts


def at_published_depth(one: list[float], two: list[float]) -> list[float]:
    """What something costs at depth 22 that is known at depths 1 and 2: every layer costs the same."""
    return [first + (PUBLISHED_DEPTH - 1) * (second - first) for first, second in zip(one, two, strict=True)]


def measure_flow(report: Report, plan: Plan) -> None:
    bench = FlowBench(plan, plan.depth, "cpu")
    voice = bench.prepare()  # also warms up caches and memory
    continued: dict[str, Callable[[], Calls]] = {
        "continued, cold voice": partial(bench.continued, None),
        "continued, warm voice": partial(bench.continued, voice),
    }
    (recomputed, wanted), (cold, cold_mel), (warm, warm_mel) = timed(
        {"recomputed": partial(bench.recomputed, voice), **continued}, plan.rounds
    )
    # A chunk on its own is at the mercy of the machine's moods; the chunks that are cheap are made again.
    (cold_again, _), (warm_again, _) = timed(continued, AGAIN)
    [(recomputed_again, _)] = timed({"recomputed": lambda: list(bench.recomputed(voice))[:1]}, AGAIN)
    one, two = (FlowBench(plan, depth, plan.count_on) for depth in (1, 2))
    first, second = one.prepare(), two.prepare()
    recomputed.flops = at_published_depth(counted(one.recomputed(first)), counted(two.recomputed(second)))
    cold.flops = at_published_depth(counted(one.continued(None)), counted(two.continued(None)))
    warm.flops = at_published_depth(counted(one.continued(first)), counted(two.continued(second)))
    ways = [recomputed, cold, warm]
    add_tables(report, f"Flow, depth {plan.depth}", ways, f"FLOPs, depth {PUBLISHED_DEPTH}")
    first_recomputed = best(0, recomputed, recomputed_again)
    warm_last, cold_last = best(-1, warm, warm_again), best(-1, cold, cold_again)
    report.targets += [
        Target("flow, warm: last chunk / second chunk", warm_last / best(1, warm, warm_again), 1.2, unit="x"),
        Target("flow, cold: last chunk / second chunk", cold_last / best(1, cold, cold_again), 1.2, unit="x"),
        Target("flow, warm: all chunks / recomputed", warm.total / recomputed.total, 0.17, unit="x"),
        Target("flow, cold: all chunks / recomputed", cold.total / recomputed.total, 0.22, unit="x"),
        Target("flow, warm: first chunk / recomputed", best(0, warm, warm_again) / first_recomputed, 0.42, unit="x"),
        Target("flow, cold: first chunk / recomputed", best(0, cold, cold_again) / first_recomputed, 1.0, unit="x"),
    ]
    scale = float(wanted.std())
    worst = max(float((mel - wanted).abs().max()) for mel in (cold_mel, warm_mel)) / scale
    report.notes.append(f"flow: largest difference of any frame to the recomputed one: {worst:.1e} of the mel's std")
    per_second, per_voice = at_published_depth(memory(one, first), memory(two, second))
    report.add_table(
        f"Keys and values at depth {PUBLISHED_DEPTH}, MB",
        ["", "float32", "float16"],
        [
            ["a second of speech", per_second / 1e6, per_second / 2e6],
            [f"a voice of {plan.prompt / TOKENS_PER_SECOND:g} s", per_voice / 1e6, per_voice / 2e6],
        ],
    )
    report.data["flow"] = {way.name: {"seconds": way.seconds, "flops": way.flops} for way in ways}
    report.data["flow again"] = {way.name: way.seconds for way in (recomputed_again, cold_again, warm_again)}


def best(chunk: int, *runs: Way) -> float:
    """Seconds of one chunk, of all runs the least."""
    return min(way.seconds[chunk] for way in runs)


def memory(bench: FlowBench, voice: VoicePrefix) -> list[float]:
    """Bytes of a second of speech, and of a voice."""
    nobody = bench.flow.prepare_voice([], bench.prompt_mel[:, :0], bench.embedding)
    _, state = bench.flow.step([0] * (TOKENS_PER_SECOND + LOOK_AHEAD), bench.flow.start(nobody))
    return [float(state.nbytes), float(voice.nbytes)]


def measure_vocoder(report: Report, plan: Plan) -> None:
    bench = VocoderBench(plan, "cpu")
    bench.vocoder.whole(bench.mel[:, :60])  # warms up
    (recomputed, wanted), (steps, audio) = timed(
        {"recomputed": bench.recomputed, "continued": bench.continued}, plan.rounds
    )
    shapes = VocoderBench(plan, plan.count_on)
    recomputed.flops, steps.flops = counted(shapes.recomputed()), counted(shapes.continued())
    add_tables(report, "Vocoder", [recomputed, steps], "FLOPs")
    report.targets.append(Target("vocoder: all chunks / recomputed", steps.total / recomputed.total, 0.3, unit="x"))
    worst = float((audio - wanted).abs().max()) / float(wanted.std())
    report.notes.append(f"vocoder: largest difference of any sample: {worst:.1e} of the audio's std")
    report.data["vocoder"] = {way.name: {"seconds": way.seconds, "flops": way.flops} for way in (recomputed, steps)}


def add_tables(report: Report, title: str, ways: list[Way], flops_title: str) -> None:
    chunks = [str(index + 1) for index in range(len(ways[0].seconds))]
    report.add_table(
        f"{title}, seconds for each chunk",
        ["", *chunks, "total", "ratio"],
        [[way.name, *way.seconds, way.total, way.total / ways[0].total] for way in ways],
    )
    rows = [[way.name, *(count / 1e9 for count in way.flops), sum(way.flops) / 1e9] for way in ways]
    base = sum(ways[0].flops)
    report.add_table(
        f"{title.partition(',')[0]}, {flops_title}, in 1e9 for each chunk",
        ["", *chunks, "total", "ratio"],
        [[*row, sum(way.flops) / base] for row, way in zip(rows, ways, strict=True)],
    )


def main() -> None:
    arguments = options(
        __doc__.partition("\n")[0],
        (
            "--depth",
            {"type": int, "default": 2, "help": "transformer layers that are timed; 22 is the published depth"},
        ),
        ("--rounds", {"type": int, "default": 1, "help": "the best of so many runs, on a machine that is not idle"}),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan = (
        Plan(64, 1, 40, 45, "cpu", 1)
        if arguments.quick
        else Plan(1024, arguments.depth, 125, 200, "meta", arguments.rounds)
    )
    spoken, prompt = plan.tokens // TOKENS_PER_SECOND, plan.prompt // TOKENS_PER_SECOND
    report = Report("streaming", f"CosyVoice streaming: {spoken} s of speech, {prompt} s of prompt", arguments.quick)
    measure_flow(report, plan)
    measure_vocoder(report, plan)
    widths = "published widths" if plan.width == 1024 else "a sixteenth of the published widths"
    runs = "one run" if plan.rounds == 1 else f"best of {plan.rounds} runs for each chunk"
    report.notes.append(f"seconds are processor time of the one thread; random weights, {widths}, float32, {runs}")
    report.notes.append(f"first, second and last chunk: the best of {AGAIN} more runs, too")
    report.data["plan"] = asdict(plan)
    if arguments.quick:
        report.targets.clear()
        report.notes.append("targets are judged at the published widths only: run without --quick")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()

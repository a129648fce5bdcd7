"""Tokens to mel: the golden cases (a) to (d), and that speech in steps equals speech at once."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends.cosyvoice.checkpoint import load_flow, load_flow_network
from backends.cosyvoice.dit import DiT
from backends.cosyvoice.flow import Flow, FlowNetwork, VoicePrefix, chunk_mask, solve, time_grid
from backends.cosyvoice.schedule import FirstHop, Schedule
from tests.golden import FLOW, PROMPT_TOKENS, golden, largest_difference, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 1e-4


@pytest.fixture(scope="module")
def network() -> FlowNetwork:
    """The weights as they are in the file, the layers of the time among them."""
    return load_flow_network(FLOW).requires_grad_(False)


@pytest.fixture(scope="module")
def flow() -> Flow:
    return load_flow(FLOW)


@pytest.fixture(scope="module")
def precise() -> Flow:
    return load_flow(FLOW, dtype=torch.float64)


@pytest.fixture(scope="module")
def voice(flow: Flow) -> VoicePrefix:
    return prepare(flow)


def prepare(flow: Flow, prompt_tokens: int = PROMPT_TOKENS) -> VoicePrefix:
    """The golden voice, or one with the first tokens of its prompt."""
    prompt = golden("inputs", "prompt_token")[0][:prompt_tokens]
    mel = golden("inputs", "prompt_feat")[0].mT[:, : 2 * prompt_tokens]
    return flow.prepare_voice(prompt, mel, golden("inputs", "embedding")[0])


def in_steps(flow: Flow, voice: VoicePrefix, every: list[int], pieces: list[int]) -> list[Tensor]:
    """The mel of the utterance in pieces that end after so many tokens each, the last one after all."""
    state, mels, done = flow.start(voice), [], 0
    for end in pieces:
        mel, state = flow.step(every[done:end], state)
        mels.append(mel)
        done = end
    mel, _ = flow.step(every[done:], state, final=True)
    return [*mels, mel]


# Against the published model


def test_look_ahead_layer_is_the_golden_one(network: FlowNetwork) -> None:
    x = golden("a_prelookahead", "x")[0]
    nothing = x[:0]
    layer = network.pre_lookahead_layer
    wanted = golden("a_prelookahead", "out_no_context")[0]
    assert largest_difference(layer(x, torch.zeros(3, 80), nothing), wanted) < 1e-5
    wanted = golden("a_prelookahead", "out_with_context")[0]
    assert largest_difference(layer(x[:20], x[20:], nothing), wanted) < 1e-5


def test_look_ahead_layer_in_two_parts_equals_one(network: FlowNetwork) -> None:
    x = golden("a_prelookahead", "x")[0]
    layer = network.pre_lookahead_layer
    first = layer(x[:11], x[11:14], x[:0])
    second = layer(x[11:20], x[20:], x[9:11])
    assert largest_difference(torch.cat([first, second]), golden("a_prelookahead", "out_with_context")[0]) < 1e-5


@pytest.mark.parametrize("kind", ["full", "chunk"])
def test_transformer_is_the_golden_one(network: FlowNetwork, kind: str) -> None:
    def case(name: str) -> Tensor:
        return golden("b_dit", name)

    dit: DiT = network.decoder.estimator
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda _module, _inputs, output: seen.update({name: output})

    hooks = [
        dit.time_embed.register_forward_hook(note("time_embed")),
        dit.input_embed.register_forward_hook(note("input_embed")),
        dit.transformer_blocks[0].register_forward_hook(note("block0")),
    ]
    mask = chunk_mask(110, torch.device("cpu")) if kind == "chunk" else None
    modulation = dit.modulation(case("t")[0])
    out = dit(case("x"), case("mu"), case("cond"), case("spks"), modulation, mask=mask)
    for hook in hooks:
        hook.remove()
    assert largest_difference(seen["time_embed"], case("time_embed")[0]) < LIMIT
    assert largest_difference(seen["input_embed"], case("input_embed")) < LIMIT
    assert largest_difference(seen["block0"], case(f"block0_{kind}")) < LIMIT
    assert largest_difference(out, case(f"out_{kind}")) < LIMIT


def test_time_grid_is_the_golden_one() -> None:
    assert largest_difference(time_grid(), golden("c_flow", "t_span")) < 1e-7


def test_solver_passes_the_golden_points(network: FlowNetwork) -> None:
    x = golden("noise", "rand_noise")[0][:, :354]
    mu, spks = golden("c_flow", "mu")[0], golden("c_flow", "spks")[0]
    cond = torch.zeros_like(mu)
    cond[:, :80] = golden("inputs", "prompt_feat")[0].mT
    dit = network.decoder.estimator
    inputs: list[Tensor] = []
    velocities: list[Tensor] = []

    def note(_module: Any, args: Any, output: Tensor) -> None:
        inputs.append(args[0][0])
        velocities.append(output)

    hook = dit.register_forward_hook(note)
    mel = solve(dit, lambda step: dit.modulation(time_grid()[step]), x, mu, cond, spks)
    hook.remove()
    assert largest_difference(velocities[0], golden("c_flow", "velocity_step1_cond_uncond")) < LIMIT
    assert largest_difference(inputs[1], golden("c_flow", "x_after_step1")[0]) < LIMIT
    assert largest_difference(inputs[5], golden("c_flow", "x_after_step5")[0]) < LIMIT
    assert largest_difference(mel[:, 80:], golden("c_flow", "mel")[0]) < LIMIT


def test_speaker_is_the_golden_one_whatever_the_length_of_its_embedding(flow: Flow, voice: VoicePrefix) -> None:
    assert largest_difference(voice.speaker, golden("c_flow", "spks")[0]) < 1e-5
    prompt, mel = golden("inputs", "prompt_token")[0], golden("inputs", "prompt_feat")[0].mT
    longer = flow.prepare_voice(prompt, mel, 7 * golden("inputs", "embedding")[0])
    assert largest_difference(longer.speaker, voice.speaker) < 1e-6


def test_whole_mel_is_the_golden_one(flow: Flow, voice: VoicePrefix) -> None:
    mel = flow.whole(tokens(), voice, streaming=False)
    assert largest_difference(mel, golden("c_flow", "mel")[0]) < LIMIT
    masked = flow.whole(tokens(), voice, streaming=True)
    assert largest_difference(masked, golden("d_flow_stream", "mel_final_streaming_true")[0]) < LIMIT


@pytest.mark.parametrize(("index", "count"), [(0, 38), (1, 63), (2, 88), (3, 113)])
def test_recomputed_prefixes_are_the_golden_ones(flow: Flow, voice: VoicePrefix, index: int, count: int) -> None:
    mel = flow.whole(tokens()[:count], voice, streaming=True, final=False)
    assert largest_difference(mel, golden("d_flow_stream", f"mel_prefix{index}_tokens{count}")[0]) < LIMIT


def test_mel_in_steps_is_the_golden_one_chunk_by_chunk(flow: Flow, voice: VoicePrefix) -> None:
    mels = in_steps(flow, voice, tokens(), [38, 63, 88, 113])
    assert [mel.shape[1] for mel in mels] == [70, 50, 50, 50, 54]
    wanted = golden("d_flow_stream", "mel_final_streaming_true")[0].split([70, 50, 50, 50, 54], dim=1)
    for mel, chunk in zip(mels, wanted, strict=True):
        assert largest_difference(mel, chunk) < LIMIT


# Steps against the whole


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_steps_of_the_schedule_equal_one_masked_pass(flow: Flow, data: st.DataObject) -> None:
    voice = prepare(flow, data.draw(st.integers(0, PROMPT_TOKENS), label="prompt tokens"))
    every = tokens()[: data.draw(st.integers(1, 90), label="tokens")]
    schedule = Schedule(len(voice.tokens), data.draw(st.sampled_from(FirstHop.__args__)))
    state, mels, done, available = flow.start(voice), [], 0, 0
    while not schedule.finished:
        available = min(len(every), available + data.draw(st.integers(1, 60), label="arrive"))
        while step := schedule.next_ready(available, done=available == len(every)):
            mel, state = flow.step(every[done : step.num_tokens], state, final=step.final)
            if not step.final:
                assert mel.shape[1] == 2 * (step.num_tokens - 3 - step.token_offset)
            mels.append(mel)
            done = step.num_tokens
    assert largest_difference(torch.cat(mels, dim=1), flow.whole(every, voice, streaming=True)) < 2e-5


@settings(deadline=None, max_examples=12)
@given(prompt_tokens=st.integers(0, PROMPT_TOKENS), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_any_other_cutting_equals_it_in_double_precision(precise: Flow, prompt_tokens: int, cuts: list[int]) -> None:
    voice = prepare(precise, prompt_tokens)
    every = tokens()[:80]
    mel = torch.cat(in_steps(precise, voice, every, sorted(cuts)), dim=1)
    assert largest_difference(mel, precise.whole(every, voice, streaming=True)) < 1e-9


def test_a_voice_keeps_the_chunks_that_no_speech_can_change(flow: Flow) -> None:
    assert [prepare(flow, count).frames for count in (0, 2, 27, 28, 40)] == [0, 0, 0, 50, 50]


def test_a_voice_serves_many_utterances_and_stays_as_it_was(flow: Flow, voice: VoicePrefix) -> None:
    before = [layer.clone() for prefix in voice.prefixes for layer in prefix.layers]
    first = torch.cat(in_steps(flow, voice, tokens()[:70], [38]), dim=1)
    in_steps(flow, voice, tokens()[60:], [38, 63])
    again = torch.cat(in_steps(flow, voice, tokens()[:70], [38]), dim=1)
    assert torch.equal(first, again)
    layers = [layer for prefix in voice.prefixes for layer in prefix.layers]
    assert all(torch.equal(one, other) for one, other in zip(before, layers, strict=True))


def test_a_step_that_completes_no_chunk_gives_no_frames(flow: Flow, voice: VoicePrefix) -> None:
    state = flow.start(voice)
    for token in tokens()[:12]:
        mel, state = flow.step([token], state)
        assert mel.shape == (80, 0)
    mel, state = flow.step(tokens()[12:13], state)
    assert mel.shape == (80, 20)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_an_utterance_shorter_than_the_look_ahead_is_spoken(flow: Flow, voice: VoicePrefix, count: int) -> None:
    mel = torch.cat(in_steps(flow, voice, tokens()[:count], []), dim=1)
    assert mel.shape == (80, 2 * count)
    if count:
        assert largest_difference(mel, flow.whole(tokens()[:count], voice, streaming=True)) < 2e-5
    assert flow.whole(tokens()[:count], voice, streaming=False).shape == (80, 2 * count)


def test_half_precision_keys_and_values_change_little_and_take_half_the_memory(flow: Flow, voice: VoicePrefix) -> None:
    halved = load_flow(FLOW, cache_dtype=torch.float16)
    small = prepare(halved)
    assert sum(prefix.layers[0].nbytes for prefix in small.prefixes) * 2 == sum(
        prefix.layers[0].nbytes for prefix in voice.prefixes
    )
    wanted = torch.cat(in_steps(flow, voice, tokens(), [38, 63, 88, 113]), dim=1)
    found = torch.cat(in_steps(halved, small, tokens(), [38, 63, 88, 113]), dim=1)
    assert (found - wanted).square().mean().sqrt() < 1e-2 * wanted.std()


def test_a_half_precision_network_changes_little(flow: Flow, voice: VoicePrefix) -> None:
    halved = load_flow(FLOW, dtype=torch.float16)
    wanted = torch.cat(in_steps(flow, voice, tokens(), [38, 63, 88, 113]), dim=1)
    found = torch.cat(in_steps(halved, prepare(halved), tokens(), [38, 63, 88, 113]), dim=1)
    assert found.dtype == torch.float32
    assert (found - wanted).square().mean().sqrt() < 1e-2 * wanted.std()


def test_a_window_bounds_the_memory_and_changes_nothing_before_it_is_full(flow: Flow, voice: VoicePrefix) -> None:
    windowed = load_flow(FLOW, max_cached_seconds=2)
    every = tokens() * 3
    pieces = list(range(38, len(every) - 25, 25))
    state, mels, sizes = windowed.start(prepare(windowed)), [], []
    for begin, end in zip([0, *pieces], [*pieces, len(every)], strict=True):
        mel, state = windowed.step(every[begin:end], state, final=end == len(every))
        mels.append(mel)
        sizes.append(state.nbytes)
    wanted = in_steps(flow, voice, every, pieces)
    assert largest_difference(torch.cat(mels[:2], dim=1), torch.cat(wanted[:2], dim=1)) < 2e-5
    assert largest_difference(mels[3], wanted[3]) > 1e-3
    assert len(set(sizes[4:-1])) == 1
    assert sizes[-1] <= sizes[4] * 2
    assert all(bool(mel.isfinite().all()) for mel in mels)


def test_a_window_that_is_never_full_changes_nothing(flow: Flow, voice: VoicePrefix) -> None:
    windowed = load_flow(FLOW, max_cached_seconds=60)
    found = torch.cat(in_steps(windowed, prepare(windowed), tokens(), [38, 63, 88, 113]), dim=1)
    assert torch.equal(found, torch.cat(in_steps(flow, voice, tokens(), [38, 63, 88, 113]), dim=1))


# What is refused, and what can be stopped


def test_a_check_that_raises_stops_a_step_between_two_of_the_solver(flow: Flow, voice: VoicePrefix) -> None:
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        flow.step(tokens()[:38], flow.start(voice), check=check)
    assert len(calls) == 4


def test_no_step_follows_the_final_one(flow: Flow, voice: VoicePrefix) -> None:
    _, state = flow.step(tokens()[:5], flow.start(voice), final=True)
    with pytest.raises(ValueError, match="final"):
        flow.step([1], state)


def test_a_prompt_mel_must_have_two_frames_for_each_token(flow: Flow) -> None:
    with pytest.raises(ValueError, match=r"prompt_mel is \(80, 79\); 40 prompt tokens need \(80, 80\)"):
        flow.prepare_voice([1] * 40, torch.zeros(80, 79), torch.zeros(192))


def test_an_embedding_of_another_model_is_refused(flow: Flow) -> None:
    with pytest.raises(ValueError, match=r"embedding is \(512,\)"):
        flow.prepare_voice([1], torch.zeros(80, 2), torch.zeros(512))


def test_a_token_beyond_the_codebook_is_refused(flow: Flow, voice: VoicePrefix) -> None:
    with pytest.raises(ValueError, match="speech token 6561; this flow knows 0 to 6560"):
        flow.step([6561], flow.start(voice))


def test_a_negative_token_counts_as_zero(flow: Flow, voice: VoicePrefix) -> None:
    found, _ = flow.step([-1, 5], flow.start(voice), final=True)
    wanted, _ = flow.step([0, 5], flow.start(voice), final=True)
    assert torch.equal(found, wanted)


def test_the_layers_of_the_time_do_not_stay() -> None:
    network = load_flow_network(FLOW)
    names_before = {name for name, _ in network.named_parameters()}
    Flow(network)
    gone = names_before - {name for name, _ in network.named_parameters()}
    assert {name.split(".")[-2] for name in gone} == {"0", "2", "linear"}
    assert all("norm" in name or "time" in name for name in gone)

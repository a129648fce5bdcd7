"""When a piece of speech is due. Prompt and emitted tokens end at a chunk of 25 together."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cosyvoice.schedule import CHUNK_TOKENS, LOOK_AHEAD, FirstHop, Schedule, Step
from tests.golden import golden


def run(schedule: Schedule, arrivals: list[int]) -> list[Step]:
    """All steps when the tokens come in groups of these sizes."""
    steps, available = [], 0
    for index, size in enumerate(arrivals):
        available += size
        while step := schedule.next_ready(available, done=index == len(arrivals) - 1):
            steps.append(step)
    return steps


def test_the_golden_schedule() -> None:
    wanted = golden("d_flow_stream", "schedule_num_tokens_and_offset").tolist()
    steps = run(Schedule(40), [1] * 137)
    assert [[step.num_tokens, step.token_offset] for step in steps] == wanted
    assert [step.final for step in steps] == [False] * 4 + [True]


def test_nothing_is_due_before_the_look_ahead_exists() -> None:
    schedule = Schedule(50)
    assert schedule.needed == 28
    assert schedule.next_ready(27, done=False) is None
    assert schedule.next_ready(28, done=False) == Step(28, 0, final=False)


def test_an_early_first_hop_is_the_padding_alone() -> None:
    schedule = Schedule(40, "early")
    assert schedule.next_ready(13, done=False) == Step(13, 0, final=False)
    assert schedule.next_ready(38, done=False) == Step(38, 10, final=False)


@pytest.mark.parametrize("prompt_tokens", [50, 41, 49])
def test_too_little_padding_makes_no_early_hop(prompt_tokens: int) -> None:
    assert Schedule(prompt_tokens, "early").needed == Schedule(prompt_tokens).needed


def test_a_stream_that_ends_early_has_one_final_step() -> None:
    assert run(Schedule(40), [2]) == [Step(2, 0, final=True)]


def test_a_stream_without_tokens_has_no_step() -> None:
    schedule = Schedule(40)
    assert schedule.next_ready(0, done=True) is None
    assert schedule.finished


def test_an_unknown_first_hop_is_refused() -> None:
    with pytest.raises(ValueError, match="normal or early"):
        Schedule(40, "soon")  # type: ignore[arg-type]


def test_a_schedule_does_not_change_the_next_one() -> None:
    run(Schedule(40), [137])
    assert Schedule(40).needed == 38


@given(
    prompt_tokens=st.integers(0, 200),
    first_hop=st.sampled_from(["normal", "early"]),
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=12),
)
def test_steps_meet_chunks_and_cover_every_token(prompt_tokens: int, first_hop: FirstHop, arrivals: list[int]) -> None:
    schedule = Schedule(prompt_tokens, first_hop)
    steps = run(schedule, arrivals)
    total = sum(arrivals)
    assert schedule.finished
    assert [step.final for step in steps] == [False] * (len(steps) - 1) + [True] * bool(total)
    assert not steps or steps[-1].num_tokens == total
    for step, after in itertools.pairwise(steps):
        assert (prompt_tokens + after.token_offset) % CHUNK_TOKENS == 0
        assert after.token_offset == step.num_tokens - LOOK_AHEAD


@given(arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_the_pace_of_the_tokens_does_not_change_the_steps(arrivals: list[int]) -> None:
    assert run(Schedule(40), arrivals) == run(Schedule(40), [sum(arrivals)])

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cosyvoice.ids import EOS, SOS, SPEECH_CODES, SPEECH_ROWS
from backends.cosyvoice.sampling import (
    Sampling,
    SilenceFilter,
    length_limits,
    nucleus,
    others,
    repeated,
    sample,
    softmax,
    without_stops,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "data/cosyvoice3/golden/h_sampling.json").read_text())
RAS_CASES = [pytest.param(case, id=case["name"]) for case in GOLDEN["ras_cases"]]


def settings(case: dict[str, Any]) -> tuple[np.ndarray, list[int], Sampling]:
    numbers = case["params"]
    sampling = Sampling(numbers["top_p"], numbers["top_k"], numbers["win_size"], numbers["tau_r"])
    return np.array(case["logits"], np.float32), case["decoded"], sampling


def exact_distribution(logits: np.ndarray, history: list[int], sampling: Sampling) -> np.ndarray:
    """The probability of each outcome, from the sampler's own parts."""
    outcome = np.zeros(len(logits))
    for token, weight in zip(*nucleus(softmax(logits), sampling), strict=True):
        if repeated(int(token), history, sampling):
            outcome += weight * others(logits, int(token))
        else:
            outcome[token] += weight
    return outcome


@pytest.mark.parametrize("case", RAS_CASES)
def test_the_nucleus_is_the_original_s(case: dict[str, Any]) -> None:
    logits, _, sampling = settings(case)
    ids, weights = nucleus(softmax(logits), sampling)
    assert ids.tolist() == case["nucleus_ids"]
    np.testing.assert_allclose(weights, case["nucleus_probs"], atol=1e-6)


@pytest.mark.parametrize("case", RAS_CASES)
def test_the_outcomes_have_exactly_the_original_s_probabilities(case: dict[str, Any]) -> None:
    logits, history, sampling = settings(case)
    expected = np.zeros(len(logits))
    for token, probability in case["final_distribution"]:
        expected[token] = probability
    np.testing.assert_allclose(exact_distribution(logits, history, sampling), expected, atol=1e-6)


@pytest.mark.parametrize("case", RAS_CASES)
def test_draws_follow_the_exact_probabilities(case: dict[str, Any]) -> None:
    logits, history, sampling = settings(case)
    random = np.random.default_rng(0)
    draws = [sample(logits, history, random, sampling) for _ in range(4000)]
    counted = np.bincount(draws, minlength=len(logits)) / len(draws)
    # Total variation; the sampling noise of 4000 draws over 25 equal outcomes is about 0.03.
    assert abs(counted - exact_distribution(logits, history, sampling)).sum() / 2 < 0.05


def test_the_caller_s_logits_are_left_alone() -> None:
    logits = np.arange(30, dtype=np.float32)
    kept = logits.copy()
    sample(logits, [29], np.random.default_rng(0))
    without_stops(logits)
    np.testing.assert_array_equal(logits, kept)


def test_the_same_seed_draws_the_same_tokens() -> None:
    logits = np.random.default_rng(5).normal(size=SPEECH_ROWS).astype(np.float32)
    first, second = ([sample(logits, [], random) for _ in range(20)] for random in map(np.random.default_rng, (3, 3)))
    assert first == second


def test_no_ending_token_can_be_drawn_before_the_least_length() -> None:
    logits = np.zeros(SPEECH_ROWS, np.float32)
    logits[[SOS, EOS, SPEECH_ROWS - 1]] = 50  # the original forbids the wrong one of these
    random = np.random.default_rng(0)
    assert all(sample(without_stops(logits), [], random) < SPEECH_CODES for _ in range(200))


def test_a_draw_that_falls_on_the_very_end_still_has_a_weight() -> None:
    class LastDraw(np.random.Generator):
        def random(self, *_: Any, **__: Any) -> float:  # type: ignore[override]
            return float(np.nextafter(1.0, 0.0))

    logits = np.array([5.0, 4.0, -np.inf, -np.inf], np.float32)
    assert sample(logits, [], LastDraw(np.random.PCG64(0))) == 1


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_scores_that_are_not_numbers_are_refused(broken: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[3] = broken
    with pytest.raises(ValueError, match="not finite"):
        sample(logits, [], np.random.default_rng(0))


@pytest.mark.parametrize("case", GOLDEN["silent_token_rule"]["cases"])
def test_long_silences_are_shortened(case: dict[str, list[int]]) -> None:
    rule = GOLDEN["silent_token_rule"]
    silence = SilenceFilter(rule["silent_tokens"], rule["max_run"])
    assert [token for token in case["generated"] if silence.keeps(token)] == case["kept"]


def test_the_silence_filter_knows_the_original_s_codes_by_itself() -> None:
    silence = SilenceFilter()
    assert [silence.keeps(token) for token in GOLDEN["silent_token_rule"]["silent_tokens"]] == [True] * 5 + [False] * 6


@pytest.mark.parametrize("case", GOLDEN["length_limits"]["cases"])
def test_the_length_follows_the_spoken_text(case: dict[str, int]) -> None:
    assert length_limits(case["text_len"]) == (case["min_len"], case["max_len"])

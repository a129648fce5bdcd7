"""The fakes keep the rules that they stand for: llama-swap's residency and scheduler, and the speech backend's."""

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from backends.api import SpeechBackend, Utterance
from backends.errors import Cancelled, SynthesisFailed
from tests.fakes import FakeSpeech, spoken
from tests.fakes.residency import all_sets, evictions
from tests.fakes.scheduler import Job, Scheduler, Swap, SwapperError

Q_V_T = "(q | v | t) & e"

# Residency


def test_a_set_is_one_choice_of_each_side_of_an_and() -> None:
    matrix = {"vars": {"q": "qwen"}, "sets": {"all": "(q | v | t) & e", "more": "+all & x"}}
    assert all_sets(matrix)[:3] == [{"qwen", "e"}, {"v", "e"}, {"t", "e"}]
    assert all_sets(matrix)[3] == {"qwen", "e", "x"}


@pytest.mark.parametrize("expression", ["q |", "(q", "& q", "q v", "+none", "+all", "q $ v"])
def test_a_set_that_cannot_be_read_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        all_sets({"sets": {"all": expression}})


@pytest.mark.parametrize(
    ("config", "model", "running", "stopped"),
    [
        ({}, "a", ["b", "c"], {"b", "c"}),
        ({"matrix": {"sets": {"all": Q_V_T}}}, "v", ["q", "e"], {"q"}),
        ({"matrix": {"sets": {"all": Q_V_T}}}, "e", ["q"], set()),
        ({"matrix": {"sets": {"all": Q_V_T}}}, "outside", ["q", "e"], {"q", "e"}),
        ({"matrix": {"sets": {"one": "a & b", "two": "a & c"}}}, "a", ["b", "c"], {"c"}),
        ({"matrix": {"sets": {"one": "a & b", "two": "a & c"}, "evict_costs": {"c": 5}}}, "a", ["b", "c"], {"b"}),
        ({"groups": {"g": {"members": ["a", "b"]}}}, "a", ["b", "c"], {"b", "c"}),
        ({"groups": {"g": {"members": ["a", "b"], "swap": False}}}, "a", ["b", "c"], {"c"}),
        ({"groups": {"g": {"members": ["a"], "exclusive": False}}}, "a", ["b", "c"], set()),
        ({"groups": {"g": {"members": ["a"], "exclusive": False}}}, "b", ["a", "c"], {"a", "c"}),
        ({"groups": {"g": {"members": ["a"], "persistent": True}}}, "b", ["a", "c"], {"c"}),
    ],
)
def test_loading_a_model_stops_those_that_may_not_stay(
    config: dict[str, object], model: str, running: Iterable[str], stopped: set[str]
) -> None:
    assert evictions(config)(model, running) == stopped


def test_groups_and_matrix_may_also_stand_under_routing() -> None:
    settings = {"matrix": {"sets": {"all": Q_V_T}}}
    config = {"routing": {"router": {"use": "matrix", "settings": settings}}}
    assert evictions(config)("v", ["q", "e"]) == {"q"}


# The scheduler, without a loop


class Desk:
    """A Scheduler with everything that it said."""

    def __init__(self, models: str, matrix: str, *, limit: int = 10, kills: bool = False) -> None:
        self.starts: list[Swap] = []
        self.said: list[str] = []
        evicted = evictions({"matrix": {"sets": {"all": matrix}}})
        self.rules = Scheduler(dict.fromkeys(models, limit), evicted, self.starts.append, kills=kills)

    def ask(self, model: str) -> Job:
        number = len(self.said) + len(self.rules.queue) + 1

        def decided(error: SwapperError | None) -> None:
            self.said.append(f"{model}:{error.status if error else 'served'}")

        job = Job(number, model, decided, lambda: self.said.append(f"{model}:killed"))
        self.rules.arrive(job)
        return job

    def load(self, model: str) -> Job:
        """Ask and finish the load."""
        job = self.ask(model)
        self.rules.loaded(self.starts[-1])
        return job


def test_rule_1_an_unknown_model_is_an_error() -> None:
    desk = Desk("qv", "q | v")
    desk.ask("x")
    assert desk.said == ["x:404"]


def test_rule_2_a_request_joins_the_load_of_its_model() -> None:
    desk = Desk("qv", "q | v")
    desk.ask("q")
    desk.ask("q")
    assert len(desk.starts) == 1
    desk.rules.loaded(desk.starts[0])
    assert desk.said == ["q:served", "q:served"]


def test_rule_3_a_resident_model_is_served_at_once_whoever_waits() -> None:
    desk = Desk("qv", "q | v")
    desk.load("q")
    desk.ask("v")
    desk.ask("q")
    assert desk.said == ["q:served", "q:served"]
    assert [job.model for job in desk.rules.queue] == ["v"]


def test_rule_4_a_load_in_progress_that_conflicts_is_waited_for() -> None:
    desk = Desk("qve", Q_V_T)
    desk.ask("q")
    desk.ask("v")
    assert [swap.model for swap in desk.starts] == ["q"]
    desk.ask("e")
    assert [swap.model for swap in desk.starts] == ["q", "e"], "a load that conflicts with nothing runs beside it"


def test_rule_5_a_model_with_requests_is_not_stopped_until_the_last_has_ended() -> None:
    desk = Desk("qv", "q | v")
    first = desk.load("q")
    second = desk.ask("q")
    desk.ask("v")
    desk.rules.leave(first)
    assert len(desk.starts) == 1
    desk.rules.leave(second)
    assert desk.starts[-1].evicted == {"q"}


def test_rule_6_a_swap_stops_the_one_and_serves_all_who_joined() -> None:
    desk = Desk("qv", "q | v")
    desk.rules.leave(desk.load("q"))
    desk.ask("v")
    desk.ask("v")
    assert desk.rules.ready == set()
    desk.rules.loaded(desk.starts[-1])
    assert desk.rules.ready == {"v"}
    assert desk.said == ["q:served", "v:served", "v:served"]


def test_requests_over_the_limit_are_refused_waiting_ones_included() -> None:
    desk = Desk("qv", "q | v", limit=2)
    desk.load("q")
    desk.ask("v")
    desk.ask("v")
    desk.ask("v")
    assert desk.said == ["q:served", "v:429"]


def test_a_request_that_leaves_gives_its_place_back_wherever_it_stood() -> None:
    desk = Desk("qv", "q | v", limit=1)
    served = desk.load("q")
    queued = desk.ask("v")
    desk.rules.leave(queued)
    joined = desk.ask("v")
    desk.rules.leave(served)
    desk.rules.leave(joined)
    assert desk.rules.reserved.total() == 0
    desk.rules.loaded(desk.starts[-1])
    assert desk.rules.ready == {"v"}, "the load goes on for nobody"


def test_unloading_kills_what_runs_and_refuses_what_waits_for_it() -> None:
    desk = Desk("qv", "q | v")
    desk.load("q")
    desk.ask("v")
    desk.rules.unload({"q", "v"})
    assert desk.said == ["q:served", "v:503", "q:killed"]
    assert desk.rules.reserved.total() == 0


def test_a_router_that_kills_does_not_wait() -> None:
    desk = Desk("qv", "q | v", kills=True)
    desk.load("q")
    desk.ask("v")
    assert desk.said == ["q:served", "q:killed"]


def test_a_b_a_a_c_a_b_c_within_one_load_takes_three_loads() -> None:
    desk = Desk("abc", "a | b | c")
    jobs = [desk.ask(model) for model in "abaacabc"]
    loads: list[str] = []
    while len(loads) < len(desk.starts):
        swap = desk.starts[len(loads)]
        loads.append(swap.model)
        desk.rules.loaded(swap)
        for job in [job for job in jobs if job.model == swap.model]:
            desk.rules.leave(job)
    assert loads == ["a", "b", "c"]


# FakeSpeech


def test_fake_speech_says_what_spoken_says() -> None:
    backend: SpeechBackend = FakeSpeech()
    backend.load()
    said = [chunk.samples for chunk in backend.synthesize(Utterance("Hi.", "alba"), threading.Event())]
    np.testing.assert_array_equal(np.concatenate(said), spoken("Hi."))
    assert backend.split("One. Two!  Three") == ["One.", "Two!", "Three"]


def test_fake_speech_is_cancelled_at_its_gate_and_leaves_nothing_running() -> None:
    backend = FakeSpeech()
    backend.load()
    gate, cancel = backend.hold(at=1), threading.Event()
    worker = threading.Thread(target=lambda: errors.append(_error_of(backend, cancel)))
    errors: list[type[BaseException] | None] = []
    worker.start()
    assert gate.reached.wait(10)
    assert backend.active == 1
    cancel.set()
    worker.join(10)
    assert errors == [Cancelled]
    assert (backend.active, backend.cancelled) == (0, 1)


def test_fake_speech_fails_in_the_piece_that_it_is_told() -> None:
    backend = FakeSpeech()
    backend.load()
    backend.fail_at = {2}
    assert _error_of(backend, threading.Event()) is None
    assert _error_of(backend, threading.Event()) is SynthesisFailed


def _error_of(backend: FakeSpeech, cancel: threading.Event) -> type[BaseException] | None:
    try:
        list(backend.synthesize(Utterance("Hello.", "alba"), cancel))
    except (Cancelled, SynthesisFailed) as error:
        return type(error)
    return None

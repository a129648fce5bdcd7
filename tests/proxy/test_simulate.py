"""Traces, and what the orders make of them. All times are virtual, so numbers may be asserted."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.make_traces import GAPS, trace
from proxy.config import Config
from proxy.errors import ConfigError
from proxy.lease import LeaseEvent
from proxy.line import Line, Mode, Policy, Ticket
from proxy.matrix import Matrix
from proxy.residency import Residency, Sets
from proxy.simulate import Machine, Outcome, Place, Row, policies, render, replay, replay_swapper, run, statistics
from proxy.trace import Model, Recorder, Request, Trace, read
from tests.proxy.lines import write

EXAMPLES = Path(__file__).parents[2] / "examples"
READ = {name: Model(Mode.READ, name, load=10.0) for name in "abc"}


def small(*requests: tuple[float, str, float], models: dict[str, Model] = READ) -> Trace:
    return Trace(models, ["abc"], [Request(*request) for request in requests])


def waits(outcome: Outcome) -> list[float]:
    return [seconds for _, seconds in outcome.waits]


def lines_of(name: str) -> Trace:
    with (EXAMPLES / f"{name}.jsonl").open() as file:
        return read(file, name)


def overall(name: str) -> dict[str, Row]:
    return {row.policy: row for row in run(lines_of(name)) if row.group == "all"}


# The three traces


@pytest.mark.parametrize("name", GAPS)
def test_the_examples_are_what_their_script_writes(name: str) -> None:
    assert lines_of(name) == trace(name)


def test_busy() -> None:
    rows = overall("busy")
    swapper, fifo, phases, patient = (rows[name] for name in ("llama-swap", "fifo", "phases", "phases + 45 s"))
    assert phases.p95 <= 1.25 * swapper.p95
    assert phases.longest <= 1.25 * swapper.longest
    assert phases.mean <= 0.15 * fifo.mean
    assert patient.longest <= 0.85 * swapper.longest


def test_heavy() -> None:
    rows = overall("heavy")
    assert rows["phases"].longest <= 0.4 * rows["llama-swap"].longest
    assert rows["phases"].given_up[120.0] <= 0.15 * rows["llama-swap"].given_up[120.0]


def test_light_loses_nobody_who_waits_a_minute() -> None:
    rows = overall("light")
    assert rows["phases"].given_up[60.0] == 0.0


# Replays of the line


def test_a_wait_is_the_queue_and_the_load() -> None:
    subject = small((0, "a", 5), (1, "a", 5), (2, "b", 5), (30, "b", 5))
    outcome = replay(subject, Machine.of(subject), Policy())
    assert waits(outcome) == [10, 9, 15 - 2 + 10, 0]
    assert outcome.swaps == 2
    assert outcome.makespan == 35


def test_a_b_a_a_c_a_b_c_takes_three_loads_and_seven_in_fifo() -> None:
    subject = small(*((0.1 * at, model, 1.0) for at, model in enumerate("abaacabc")))
    assert replay(subject, Machine.of(subject), Policy()).swaps == 3
    assert replay(subject, Machine.of(subject), Policy(order="fifo")).swaps == 7


def test_writers_work_one_after_the_other_and_readers_side_by_side() -> None:
    models = {"a": Model(Mode.READ, "a"), "b": Model(Mode.WRITE, "b")}
    readers = small((0, "a", 5), (0, "a", 5), models=models)
    writers = small((0, "b", 5), (0, "b", 5), models=models)
    assert replay(readers, Machine.of(readers), Policy()).makespan == 5
    assert replay(writers, Machine.of(writers), Policy()).makespan == 10


def test_limits_of_a_machine_hold() -> None:
    subject = small((0, "a", 5), (0, "a", 5), (0, "a", 5))
    machine = Machine({"a": Place(Mode.READ, "a", load=0.0, limit=2)}, Machine.of(subject).residency)
    assert waits(replay(subject, machine, Policy())) == [0, 0, 5]


def test_models_that_fit_together_are_loaded_once() -> None:
    subject = Trace(READ, [], [Request(at, model, 1.0) for at, model in enumerate("abab")])
    assert replay(subject, Machine.of(subject), Policy()).swaps == 2
    assert replay_swapper(subject, Machine.of(subject)).swaps == 2


# llama-swap's scheduler


def test_the_swapper_serves_what_is_resident_whoever_waits() -> None:
    subject = small((0, "a", 5), (11, "b", 5), *((12.0 + at, "a", 5.0) for at in range(50)))
    outcome = replay_swapper(subject, Machine.of(subject))
    assert waits(outcome)[2:] == [0.0] * 50
    assert waits(outcome)[1] == 12 + 49 + 5 - 11 + 10
    fair = waits(replay(subject, Machine.of(subject), Policy(slice=0.0)))
    assert fair[1] == 15 - 11 + 10


def test_requests_join_the_load_of_their_model() -> None:
    subject = small((0, "a", 5), (4, "a", 5))
    assert waits(replay_swapper(subject, Machine.of(subject))) == [10, 6]


def test_a_load_that_conflicts_is_waited_for_and_so_are_those_who_joined_it() -> None:
    subject = small((0, "a", 5), (4, "b", 5), (5, "a", 6))
    assert waits(replay_swapper(subject, Machine.of(subject))) == [10, 22, 5]


def test_the_oldest_in_the_queue_of_the_swapper_loads_first() -> None:
    subject = small((0, "a", 5), (1, "b", 5), (2, "c", 5), (3, "b", 5))
    outcome = replay_swapper(subject, Machine.of(subject))
    assert waits(outcome) == [10, 24, 38, 22]


def test_the_swapper_loads_side_by_side_what_fits() -> None:
    rules = Residency([Sets(Matrix({"all": "(a | b) & c"}, {}, {}), [])])
    subject = small((0, "a", 5), (1, "c", 5), (2, "b", 5))
    machine = Machine({name: Place(Mode.READ, name, load=10.0) for name in "abc"}, rules)
    assert waits(replay_swapper(subject, machine)) == [10, 10, 23]


# Numbers


def test_statistics_by_nearest_rank() -> None:
    outcome = Outcome([("g", float(seconds)) for seconds in range(1, 101)], swaps=3, makespan=200.0)
    (row,) = statistics("p", outcome)
    assert (row.count, row.mean, row.p50, row.p95, row.longest) == (100, 50.5, 50.0, 95.0, 100.0)
    assert row.given_up == {5.0: 0.95, 60.0: 0.4, 120.0: 0.0, 300.0: 0.0}


def test_an_empty_trace_has_no_waits() -> None:
    subject = small()
    assert [row.count for row in run(subject)] == [0, 0, 0, 0]
    assert "phases" in render(run(subject))


def test_each_group_has_a_row_where_there_are_several() -> None:
    rows = run(small((0, "a", 5), (1, "b", 5)))
    assert [(row.policy, row.group) for row in rows][:3] == [
        ("llama-swap", "all"),
        ("llama-swap", "a"),
        ("llama-swap", "b"),
    ]
    text = render(rows)
    assert text.splitlines()[0].split()[:4] == ["policy", "group", "requests", "mean"]


def test_the_line_up_keeps_the_settings_of_a_configuration() -> None:
    line_up = policies(Policy(slice=3.0, max_slice=7.0, patience=20.0))
    assert list(line_up) == ["llama-swap", "fifo", "phases", "phases + 20 s"]
    assert line_up["phases"] == Policy("phases", 3.0, 7.0, 0.0)
    assert line_up["phases + 20 s"] == Policy("phases", 3.0, 7.0, 20.0)


def config(**keys: Any) -> Config:
    base: dict[str, Any] = {
        "upstreams": {"swap": {"url": "http://127.0.0.1:1", "max_in_flight": 3, "exclusive": [["a", "b"]]}},
        "groups": {"chat": {"mode": "read", "upstream": "swap", "models": ["a"]}},
    }
    return Config.model_validate(base | keys)


def test_a_configuration_says_how_models_are_treated() -> None:
    models = {"a": Model(Mode.WRITE, "a", 4.0), "b": Model(Mode.WRITE, "b", 5.0)}
    machine = Machine.configured(small(models=models), config(), "gpu0")
    assert machine.places == {"a": Place(Mode.READ, "chat", 4.0, 3), "b": Place(Mode.WRITE, "b", 5.0, None)}
    assert not machine.residency.admits(frozenset("a"), "b")
    assert machine.residency.admits(frozenset("a"), "c")


def test_where_a_configuration_says_nothing_the_trace_does() -> None:
    machine = Machine.configured(small(), config(upstreams={"swap": {"url": "http://127.0.0.1:1"}}), "gpu0")
    assert not machine.residency.admits(frozenset("a"), "c")


# Files


def test_a_trace_survives_its_file() -> None:
    subject = small((0, "a", 5), (1.5, "b", 2.25))
    assert read(subject.lines()) == Trace(READ, [["a", "b", "c"]], subject.requests)


HEAD = '{"models": {"a": {"load": 1}}}'


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "trace: is empty"),
        (["{"], "trace:1: "),
        (["{}"], "trace:1: 'models' is missing"),
        (["[]"], "trace:1: "),
        (['{"models": {"a": {"mode": "loud"}}}'], "trace:1: 'loud' is not a valid Mode"),
        (['{"models": {"a": {"load": -1}}}'], "trace:1: models.a.load: must not be negative"),
        (['{"models": {"a": {"load": NaN}}}'], "trace:1: models.a.load: must not be negative"),
        ([HEAD, '{"at": 1, "model": "a"}'], "trace:2: 'work' is missing"),
        ([HEAD, '{"at": 1, "model": "b", "work": 1}'], "trace:2: model: the head does not name 'b'"),
        ([HEAD, '{"at": -1, "model": "a", "work": 1}'], "trace:2: at, work: must not be negative"),
        ([HEAD, '{"at": "x", "model": "a", "work": 1}'], "trace:2: "),
    ],
)
def test_a_bad_file_is_refused_with_its_line(lines: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(lines)
    assert complaint in str(caught.value)


# From a running server


def record(recorder: Recorder, ticket: Ticket, kind: Any = "released") -> None:
    recorder.on_lease_event(LeaseEvent(kind, "gpu0", ticket, ticket.released or 0.0))


def test_tickets_become_a_trace() -> None:
    recorder = Recorder()
    rules = Residency([Sets(Matrix({"all": "a | t"}, {}, {}), [])])
    line = Line(Policy(), rules)
    loads, beside, one_piece = (Ticket(str(n), "a", "chat", Mode.READ) for n in range(3))
    speech, gone, nameless = write("t"), write("t"), write("")
    line.join(loads, 100.0)
    line.join(beside, 101.0)
    line.opened(loads, 110.0)
    line.leave(loads, 118.0)
    line.opened(beside, 111.0)
    line.leave(beside, 114.0 + 5.0)
    line.join(speech, 120.0)
    line.opened(speech, 126.0)
    line.join(gone, 121.0)
    line.leave(gone, 122.0)
    line.leave(speech, 126.0)
    line.join(one_piece, 130.0)
    line.opened(one_piece, 133.0)
    line.leave(one_piece, 133.0)
    line.join(nameless, 140.0)
    line.leave(nameless, 141.0)
    for ticket in (loads, beside, speech, one_piece, nameless):
        record(recorder, ticket)
    record(recorder, gone, "cancelled")
    subject = recorder.trace("gpu0", rules.excludes)
    assert list(subject.requests) == [
        Request(0.0, "a", 8.0),
        Request(1.0, "a", 9.0),
        Request(20.0, "t", 0.0),  # nobody has seen one of these work
        Request(21.0, "t", 0.0),
        Request(30.0, "a", 8.5),  # in one piece, and loaded: as long as the others took
    ]
    assert subject.models == {"a": Model(Mode.READ, "chat", 6.5), "t": Model(Mode.WRITE, "g", 6.0)}
    assert list(subject.exclusive) == [("a", "t")]
    assert read(subject.lines()).requests == subject.requests


def test_a_trace_has_nothing_in_it_but_times_and_models() -> None:
    recorder = Recorder()
    ticket = Ticket("secret", "a", "chat", Mode.READ)
    line = Line(Policy())
    line.join(ticket, 0.0)
    line.leave(ticket, 1.0)
    record(recorder, ticket)
    assert [set(json.loads(text)) for text in recorder.trace("gpu0").lines()] == [
        {"models", "exclusive"},
        {"at", "model", "work"},
    ]


def test_a_recorder_of_a_lease_that_did_nothing_gives_an_empty_trace() -> None:
    assert list(Recorder().trace("gpu0").requests) == []

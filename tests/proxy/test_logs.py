import io
import json
import logging

import pytest

from proxy.lease import Kind, LeaseEvent
from proxy.line import Mode, Ticket
from proxy.logs import configure
from proxy.ticketlog import TicketLog

pytestmark = pytest.mark.usefixtures("root_logger")


def lines_of(style: str, *endings: tuple[Kind, Ticket, float, str], answered: int = 0) -> list[str]:
    """What the ticket log writes for these events, each (kind, ticket, at, reason)."""
    stream = io.StringIO()
    configure(style, stream=stream)  # type: ignore[arg-type]
    log = TicketLog()
    for kind, ticket, at, reason in endings:
        if kind == "granted":
            ticket.granted = at
        if kind == "released":
            log.answered(ticket.id, answered)
        log.on_lease_event(LeaseEvent(kind=kind, lease="gpu0", ticket=ticket, at=at, reason=reason))
    return stream.getvalue().splitlines()


def ticket(model: str = "qwen") -> Ticket:
    return Ticket(id="r1", model=model, group="chat", mode=Mode.READ, arrived=100.0)


def served(model: str = "qwen", reason: str = "done") -> list[tuple[Kind, Ticket, float, str]]:
    one = ticket(model)
    return [("queued", one, 100.0, ""), ("granted", one, 102.5, ""), ("opened", one, 103.0, ""),
            ("released", one, 112.5, reason)]  # fmt: skip


def test_a_served_ticket_is_one_json_line_with_its_facts() -> None:
    (line,) = lines_of("json", *served(), answered=4096)
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "INFO", "logger": "proxy.ticketlog", "message": "ticket ended",
        "id": "r1", "lease": "gpu0", "model": "qwen", "group": "chat", "mode": "read",
        "waited": 2.5, "ran": 10.0, "bytes": 4096, "outcome": "done", "reason": "",
    }  # fmt: skip


def test_the_same_as_text() -> None:
    (line,) = lines_of("text", *served(), answered=4096)
    assert line.endswith(
        'INFO proxy.ticketlog: ticket ended id=r1 lease=gpu0 model=qwen group=chat mode=read waited=2.500 ran=10.000 '
        'bytes=4096 outcome=done reason=""'
    )  # fmt: skip


@pytest.mark.parametrize("reason", ["error", "client", "max_hold", "admin"])
def test_a_hold_says_how_it_ended(reason: str) -> None:
    (line,) = lines_of("json", *served(reason=reason))
    assert json.loads(line)["outcome"] == reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("timeout", ""), ("cancelled", "client"), ("cancelled", "admin"), ("rejected", "shutdown")],
)
def test_a_ticket_that_was_never_granted_only_waited(kind: Kind, reason: str) -> None:
    one = ticket()
    (line,) = lines_of("json", ("queued", one, 100.0, ""), (kind, one, 107.0, reason))
    entry = json.loads(line)
    assert (entry["outcome"], entry["reason"], entry["waited"], entry["ran"], entry["bytes"]) == (kind, reason, 7, 0, 0)


def test_a_ticket_that_was_refused_at_once_has_its_line() -> None:
    (line,) = lines_of("json", ("rejected", ticket(), 100.0, "full"))
    assert (json.loads(line)["outcome"], json.loads(line)["reason"]) == ("rejected", "full")


def test_bytes_of_a_ticket_that_is_in_no_line_are_not_kept() -> None:
    log = TicketLog()
    one = ticket()
    log.answered(one.id, 10)
    stream = io.StringIO()
    configure("json", stream=stream)
    log.on_lease_event(LeaseEvent(kind="queued", lease="gpu0", ticket=one, at=100.0, reason=""))
    log.on_lease_event(LeaseEvent(kind="timeout", lease="gpu0", ticket=one, at=101.0, reason=""))
    assert json.loads(stream.getvalue())["bytes"] == 0


def test_a_models_name_cannot_forge_a_line_or_a_field() -> None:
    lines = lines_of("text", *served(model="x outcome=done\n2026 INFO forged"))
    assert len(lines) == 1
    assert 'model="x outcome=done\\n2026 INFO forged"' in lines[0]


def test_a_long_value_is_cut() -> None:
    (line,) = lines_of("text", *served(model="m" * 5000))
    assert len(line) < 600


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_traceback_belongs_to_its_record(style: str) -> None:
    stream = io.StringIO()
    configure(style, stream=stream)  # type: ignore[arg-type]
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("proxy.x").exception("failed")
    written = stream.getvalue()
    text = json.loads(written)["exception"] if style == "json" else written
    assert "ValueError: broken" in text


def test_setting_up_again_replaces_the_style() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("text", stream=first)
    configure("json", stream=second, level="warning")
    logging.getLogger("proxy.x").warning("once")
    logging.getLogger("proxy.x").info("not asked for")
    assert first.getvalue() == ""
    assert json.loads(second.getvalue())["message"] == "once"


def test_a_field_may_be_anything_that_has_a_text() -> None:
    stream = io.StringIO()
    configure("text", stream=stream)
    logging.getLogger("proxy").info("seen", extra={"fields": {"models": ["a", "b"], "yes": True, "one": 1}})
    assert stream.getvalue().endswith("seen models=\"['a', 'b']\" yes=True one=1\n")

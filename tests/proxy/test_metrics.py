import itertools
from collections.abc import Iterable

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from proxy.lease import Kind, LeaseEvent
from proxy.line import Mode, Ticket
from proxy.metrics import PREFIX, WAIT_BUCKETS, Known, Metrics

KNOWN = Known(
    leases={"gpu0": 1800},
    groups={
        "chat": ("gpu0", "read"),
        "vision": ("gpu0", "read"),
        "voice": ("gpu0", "write"),
        "embed": ("gpu0", "none"),
    },
    upstreams=frozenset({"swapper"}),
    backends=frozenset({"hibari"}),
    routes=frozenset({"/v1/chat/completions", "/v1/audio/speech"}),
)
MODES = {"chat": Mode.READ, "vision": Mode.READ, "voice": Mode.WRITE, "embed": Mode.NONE}


class Server:
    """Metrics on a clock that the test sets, fed with the events that a lease would send."""

    def __init__(self, known: Known = KNOWN) -> None:
        self.now = 100.0
        self.metrics = Metrics(known, clock=lambda: self.now)
        self._ids = itertools.count(1)

    def tell(self, kind: Kind, ticket: Ticket, reason: str = "") -> None:
        self.metrics.on_lease_event(LeaseEvent(kind=kind, lease="gpu0", ticket=ticket, at=self.now, reason=reason))

    def queue(self, group: str = "chat", id: str = "") -> Ticket:
        mode = MODES.get(group, Mode.READ)
        ticket = Ticket(id=id or f"t{next(self._ids)}", model="m", group=group, mode=mode, arrived=self.now)
        self.tell("queued", ticket)
        return ticket

    def hold(self, group: str = "chat") -> Ticket:
        ticket = self.queue(group)
        self.tell("granted", ticket)
        return ticket

    def value(self, name: str, **labels: str) -> float:
        """The value on the page of the one series of this name with these labels."""
        found = [
            sample.value
            for family in self.page()
            for sample in family.samples
            if sample.name == PREFIX + name and sample.labels == labels
        ]
        assert len(found) == 1, f"{name} {labels}: {len(found)} series"
        return found[0]

    def page(self) -> Iterable[Metric]:
        text, _ = self.metrics.render()
        return text_string_to_metric_families(text.decode())


@pytest.fixture
def server() -> Server:
    return Server()


def place(group: str) -> dict[str, str]:
    lease, mode = KNOWN.groups[group]
    return {"lease": lease, "mode": mode, "group": group}


# What HTTP.md promises: name -> its labels
PROMISED = {
    "lease_wait_seconds": {"lease", "mode", "group", "outcome"},
    "lease_hold_seconds": {"lease", "mode", "group"},
    "queue_depth": {"lease", "mode", "group"},
    "leases_active": {"lease", "mode", "group"},
    "queue_oldest_wait_seconds": {"lease", "mode"},
    "swaps_total": {"lease"},
    "overtakes_total": {"lease"},
    "queue_rejected_total": {"lease", "reason"},
    "client_disconnects_total": {"phase"},
    "requests_total": {"route", "group", "code"},
    "request_duration_seconds": {"route", "group"},
    "time_to_first_byte_seconds": {"route", "group"},
    "upstream_errors_total": {"upstream", "kind"},
    "heartbeats_total": {"kind"},
    "speech_first_audio_seconds": {"backend"},
    "speech_audio_seconds_total": {"backend"},
    "speech_synthesis_seconds_total": {"backend"},
    "speech_tokens_total": {"backend"},
    "speech_characters_total": {"backend"},
    "config_reloads_total": {"result"},
    "config_last_reload_success_timestamp_seconds": set(),
    "build_info": {"version"},
}


def test_every_promised_metric_is_exported_with_its_labels(server: Server) -> None:
    server.metrics.request_finished("/v1/chat/completions", "chat", 200, 1.0, 0.5)
    exported: dict[str, set[str]] = {}
    for family in server.page():
        name = family.name + ("_total" if family.type == "counter" else "")
        if name.startswith(PREFIX):
            exported[name.removeprefix(PREFIX)] = set(family.samples[0].labels) - {"le"}
    assert {name: exported.get(name) for name in PROMISED} == PROMISED


def test_wait_buckets_are_the_promised_ones() -> None:
    assert WAIT_BUCKETS == (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 180, 300, 600,
    )  # fmt: skip


def test_the_page_says_the_same_as_prometheus_clients_own_writer(server: Server) -> None:
    server.hold("voice")
    server.now += 7
    server.queue("chat")
    server.metrics.request_finished("/v1/chat/completions", "chat", 200, 1.0, 0.5)

    def samples(text: bytes) -> set[tuple[str, str, tuple[tuple[str, str], ...], float]]:
        return {
            (sample.name, family.type, tuple(sorted(sample.labels.items())), sample.value)
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }

    assert samples(server.metrics.render()[0]) == samples(generate_latest(server.metrics.registry))


@pytest.mark.parametrize(
    ("end", "reason", "outcome"),
    [
        ("granted", "", "granted"),
        ("timeout", "", "timeout"),
        ("cancelled", "client", "cancelled"),
        ("cancelled", "admin", "cancelled"),
        ("cancelled", "shutdown", "cancelled"),
        ("rejected", "full", "rejected"),
    ],
)
def test_a_wait_is_observed_however_it_ends(server: Server, end: Kind, reason: str, outcome: str) -> None:
    ticket = server.queue("chat")
    server.now += 42
    server.tell(end, ticket, reason)
    assert server.value("lease_wait_seconds_count", **place("chat"), outcome=outcome) == 1
    assert server.value("lease_wait_seconds_sum", **place("chat"), outcome=outcome) == 42
    assert server.value("lease_wait_seconds_bucket", **place("chat"), outcome=outcome, le="30.0") == 0
    assert server.value("lease_wait_seconds_bucket", **place("chat"), outcome=outcome, le="60.0") == 1
    assert server.value("queue_depth", **place("chat")) == 0


def test_a_refused_ticket_that_never_stood_in_the_queue_is_observed_too(server: Server) -> None:
    ticket = Ticket(id="x", model="m", group="chat", mode=Mode.READ, arrived=server.now)
    server.tell("rejected", ticket, "full")
    assert server.value("lease_wait_seconds_count", **place("chat"), outcome="rejected") == 1
    assert server.value("queue_rejected_total", lease="gpu0", reason="full") == 1


@pytest.mark.parametrize(
    ("end", "reason", "counted"),
    [("rejected", "full", "full"), ("timeout", "", "timeout"), ("rejected", "shutdown", "shutdown"),
     ("cancelled", "shutdown", "shutdown")],
)  # fmt: skip
def test_lost_places_are_counted_by_reason(server: Server, end: Kind, reason: str, counted: str) -> None:
    server.tell(end, server.queue(), reason)
    assert server.value("queue_rejected_total", lease="gpu0", reason=counted) == 1


def test_a_client_that_leaves_the_queue_is_not_a_rejection(server: Server) -> None:
    server.tell("cancelled", server.queue(), "client")
    assert all(
        server.value("queue_rejected_total", lease="gpu0", reason=reason) == 0
        for reason in ("full", "timeout", "shutdown", "model_failed")
    )


def test_what_is_observed_after_a_scrape_is_on_the_next_page(server: Server) -> None:
    for expected in (1, 2, 3):
        server.hold("chat")
        assert server.value("lease_wait_seconds_count", **place("chat"), outcome="granted") == expected


def test_an_edge_of_a_bucket_belongs_to_the_bucket(server: Server) -> None:
    ticket = server.queue("chat")
    server.now += 5
    server.tell("granted", ticket)
    assert server.value("lease_wait_seconds_bucket", **place("chat"), outcome="granted", le="5.0") == 1


def test_gauges_follow_the_queue_and_the_holders(server: Server) -> None:
    first, second, third = server.hold("chat"), server.queue("voice"), server.queue("voice")
    assert server.value("leases_active", **place("chat")) == 1
    assert server.value("queue_depth", **place("voice")) == 2
    server.tell("released", first, "done")
    server.tell("granted", second)
    server.tell("cancelled", third, "client")
    assert server.value("leases_active", **place("chat")) == 0
    assert server.value("leases_active", **place("voice")) == 1
    assert server.value("queue_depth", **place("voice")) == 0


def test_the_oldest_waiter_ages_while_nothing_happens(server: Server) -> None:
    server.hold("chat")
    old = server.queue("voice")
    server.now += 10
    server.queue("voice")
    server.now += 5
    assert server.value("queue_oldest_wait_seconds", lease="gpu0", mode="write") == 15
    server.tell("cancelled", old, "client")
    assert server.value("queue_oldest_wait_seconds", lease="gpu0", mode="write") == 5
    assert server.value("queue_oldest_wait_seconds", lease="gpu0", mode="read") == 0


def test_two_tickets_of_the_same_id_are_two(server: Server) -> None:
    first, _ = server.queue("chat", id="same"), server.queue("chat", id="same")
    server.tell("cancelled", first, "client")
    assert server.value("queue_depth", **place("chat")) == 1


def test_the_oldest_reader_is_looked_for_in_all_groups(server: Server) -> None:
    server.queue("vision")
    server.now += 3
    server.queue("chat")
    assert server.value("queue_oldest_wait_seconds", lease="gpu0", mode="read") == 3


def test_the_oldest_holder_shows_a_lease_that_is_never_released(server: Server) -> None:
    server.hold("voice")
    server.now += 2000
    assert server.value("lease_oldest_hold_seconds", lease="gpu0", mode="write") == 2000
    assert server.value("lease_max_hold_seconds", lease="gpu0") == 1800


def test_holds_are_measured_from_the_grant(server: Server) -> None:
    ticket = server.queue("voice")
    server.now += 100
    server.tell("granted", ticket)
    server.now += 8
    server.tell("released", ticket, "done")
    assert server.value("lease_hold_seconds_sum", **place("voice")) == 8


def test_busy_time_is_shared_by_the_groups_that_hold_together(server: Server) -> None:
    chat = server.hold("chat")
    server.now += 4
    vision, second_chat = server.hold("vision"), server.hold("chat")
    server.now += 2
    for ticket in (chat, second_chat, vision):
        server.tell("released", ticket, "done")
    server.now += 100  # idle
    server.hold("voice")
    server.now += 3
    busy = {group: server.value("lease_busy_seconds_total", lease="gpu0", group=group) for group in ("chat", "vision")}
    assert busy == {"chat": 5, "vision": 1}
    assert server.value("lease_busy_seconds_total", lease="gpu0", group="voice") == 3


def test_always_resident_models_take_no_share_of_the_gpu(server: Server) -> None:
    server.hold("embed")
    server.now += 3
    busy = [
        s.labels["group"] for f in server.page() for s in f.samples if s.name == PREFIX + "lease_busy_seconds_total"
    ]
    assert "embed" not in busy
    assert server.value("leases_active", **place("embed")) == 1


def test_swaps_and_overtakes_are_counted(server: Server) -> None:
    ticket = server.hold()
    server.tell("swap", ticket)
    server.tell("overtake", ticket)
    server.tell("opened", ticket)
    assert server.value("swaps_total", lease="gpu0") == 1
    assert server.value("overtakes_total", lease="gpu0") == 1


def test_names_that_the_configuration_does_not_know_make_no_series(server: Server) -> None:
    server.metrics.request_finished("/v1/chat/completions", "chat", 200, 1, 1)
    server.metrics.request_finished("/x", "x", 200, 1, 1)
    server.metrics.upstream_error("x", "x")
    before = server.metrics.render()[0].count(b"\n")
    for i in range(50):
        server.metrics.request_finished(f"/random/{i}", f"model-{i}", 200, 1, 1)
        server.metrics.upstream_error(f"up-{i}", f"kind-{i}")
    assert server.metrics.render()[0].count(b"\n") == before
    assert server.value("requests_total", route="other", group="other", code="200") == 51


def test_a_status_that_is_none_is_other(server: Server) -> None:
    server.metrics.request_finished("/v1/chat/completions", "chat", 799, 1, None)
    assert server.value("requests_total", route="/v1/chat/completions", group="chat", code="other") == 1


def test_a_client_that_closed_its_connection_has_its_own_code(server: Server) -> None:
    server.metrics.request_finished("/v1/chat/completions", "chat", 499, 1, None)
    assert server.value("requests_total", route="/v1/chat/completions", group="chat", code="499") == 1


def test_a_request_without_a_first_byte_has_no_time_to_it(server: Server) -> None:
    server.metrics.request_finished("/v1/chat/completions", "chat", 503, 9, None)
    assert server.value("request_duration_seconds_sum", route="/v1/chat/completions", group="chat") == 9
    assert "time_to_first_byte_seconds_sum" not in server.metrics.render()[0].decode()


def test_a_reload_moves_no_ticket_and_forgets_no_count(server: Server) -> None:
    waiting, held = server.queue("vision"), server.hold("chat")
    server.metrics.reconfigure(Known(leases={"gpu0": 60}, groups={"chat": ("gpu0", "read")}))
    server.tell("granted", waiting)
    assert server.value("leases_active", **place("vision")) == 1
    for ticket in (waiting, held):
        server.tell("released", ticket, "done")
    assert server.value("leases_active", **place("vision")) == 0
    assert server.value("lease_hold_seconds_count", **place("vision")) == 1
    assert server.value("lease_max_hold_seconds", lease="gpu0") == 60
    server.queue("vision")
    assert server.value("queue_depth", lease="gpu0", mode="read", group="other") == 1


def test_speech_is_summed_by_backend(server: Server) -> None:
    server.metrics.speech_first_audio("hibari", 0.2)
    server.metrics.speech_done("hibari", 3.5, 1.25, 88, 40)
    server.metrics.speech_done("hibari", 1.5, 0.75, 12, 10)
    values = [
        server.value(f"speech_{name}_total", backend="hibari")
        for name in ("audio_seconds", "synthesis_seconds", "tokens", "characters")
    ]
    assert values == [5, 2, 100, 50]
    assert server.value("speech_first_audio_seconds_count", backend="hibari") == 1


def test_a_refused_reload_stays_visible_until_one_is_accepted(server: Server) -> None:
    server.metrics.config_reloaded(False)
    assert server.value("config_last_reload_successful") == 0
    assert server.value("config_reloads_total", result="failure") == 1
    server.metrics.config_reloaded(True)
    assert server.value("config_last_reload_successful") == 1
    assert server.value("config_reloads_total", result="success") == 1


def test_a_scrape_does_not_cost_in_waiters(server: Server) -> None:
    quiet = server.metrics.render()[0].count(b"\n")
    tickets = [server.queue("chat") for _ in range(10_000)]
    assert server.metrics.render()[0].count(b"\n") == quiet
    for ticket in tickets:
        server.tell("cancelled", ticket, "client")
    assert server.value("queue_depth", **place("chat")) == 0


def test_label_values_are_escaped() -> None:
    server = Server(Known(leases={"gpu0": 1}, groups={'a"\\\nb': ("gpu0", "read")}))
    server.queue('a"\\\nb')
    assert server.value("queue_depth", lease="gpu0", mode="read", group='a"\\\nb') == 1

"""What one scrape of a busy server costs: ten groups that have all seen every kind of end, and 10,000 who wait.

The page is written on the event loop, so this is how long a stream can be held up by it. The contender is
prometheus_client's own writer with the same numbers.
"""

import time
from collections.abc import Callable

from prometheus_client import generate_latest

from bench._common import Report, Target, median, options, percentile
from proxy.lease import Kind, LeaseEvent
from proxy.line import Mode, Ticket
from proxy.metrics import Known, Metrics

GROUPS, WAITING = 10, 10_000
SERVED: tuple[Kind, ...] = ("queued", "granted", "opened", "released")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/audio/speech")


def busy_server() -> Metrics:
    """A server on which every kind of series exists, with a long queue."""
    groups = {f"group{n}": ("gpu0", ("read", "write")[n % 2]) for n in range(GROUPS)}
    metrics = Metrics(
        Known(
            leases={"gpu0": 1800.0},
            groups=groups,
            upstreams=frozenset({"swapper", "embeddings"}),
            backends=frozenset({"hibari", "cosyvoice"}),
            routes=frozenset(ROUTES),
        )
    )
    for route in ROUTES:
        for group in groups:
            for code in (200, 400, 429, 503):
                metrics.request_finished(route, group, code, 1.0, 0.5)
    for number in range(WAITING):
        group = f"group{number % GROUPS}"
        ticket = Ticket(f"t{number}", "model", group, Mode(groups[group][1]), arrived=time.monotonic())
        metrics.on_lease_event(LeaseEvent("queued", "gpu0", ticket, time.monotonic()))
    return metrics


def move(metrics: Metrics) -> None:
    """Every group is served once: so much changes between two scrapes, five seconds apart, of a server that swaps."""
    for number, (group, (_, mode)) in enumerate(metrics.known.groups.items()):
        now = time.monotonic()
        ticket = Ticket(f"s{number}", "model", group, Mode(mode), arrived=now)
        for kind in SERVED:
            metrics.on_lease_event(LeaseEvent(kind, "gpu0", ticket, now, "done" if kind == "released" else ""))
        metrics.request_finished(ROUTES[0], group, 200, 1.0, 0.5)


def times(write: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        write()
        taken.append((time.perf_counter() - start) * 1000)
    return taken


def main() -> None:
    chosen = options(__doc__ or "")
    rounds = 3 if chosen.quick else 30
    metrics = busy_server()
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(rounds * 10):
        move(metrics)
        ours += times(metrics.render, 1)
        if turn % 10 == 0:  # in turns, so that both see the same moods of the machine
            theirs += times(lambda: generate_latest(metrics.registry), 1)
    page = metrics.render()[0]
    report = Report("scrape", "One scrape of a busy server", quick=chosen.quick)
    report.add_table(
        f"{len(page.splitlines())} lines, {len(page) // 1024} KiB, {WAITING} waiting; milliseconds",
        ["writer", "median", "p99"],
        [
            ["llama-lease", median(ours), percentile(ours, 0.99)],
            ["prometheus_client", median(theirs), percentile(theirs, 0.99)],
        ],
    )
    report.targets.append(Target("scrape of a busy server, median", median(ours), 5.0, unit="ms"))
    report.finish(chosen.json)


if __name__ == "__main__":
    main()

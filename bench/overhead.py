"""What stands between a client and its model costs: nothing, nginx, a bare relay, llama-lease, LiteLLM's proxy.

`python -m bench.overhead [--json PATH] [--quick]`. One tiny upstream, one load, rounds in alternating order.
"""

import subprocess
from dataclasses import dataclass, field, replace

from bench._common import Report, Target, median, options, percentile
from bench._contenders import KEY, Server, available, contenders, install_litellm
from bench._load import have_wrk, json_load, sse_load

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
CONNECTIONS = 16
MIB_PER_50_000 = 5.0
BARE = "bare aiohttp relay"
LEAST_MS = 0.01
"""What nginx is taken to add to an event where less was measured: below, a shared machine tells nothing."""


@dataclass
class Seen:
    """All rounds of one contender. Rates per second; times in milliseconds; CPU in microseconds per request."""

    rates: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    event_p50: list[float] = field(default_factory=list)
    event_p99: list[float] = field(default_factory=list)
    event_rates: list[float] = field(default_factory=list)
    errors: int = 0


@dataclass(frozen=True)
class Plan:
    """How much is done: rounds, seconds of JSON load (a quarter of it of unpaced streams), requests of the memory run."""

    rounds: int
    seconds: float
    memory_requests: int


def measure(server: Server, seen: Seen, plan: Plan) -> None:
    """One round of one contender."""
    before = server.cost().cpu
    load = json_load(server.url, HEADERS, connections=CONNECTIONS, seconds=plan.seconds, cpu=0)
    seen.cpu.append((server.cost().cpu - before) / load.requests * 1e6)
    seen.rates.append(load.rate)
    seen.p50.append(load.p50)
    seen.p99.append(load.p99)
    seen.errors += load.errors
    paced = sse_load(server.url, HEADERS, streams=4, between_us=5000)
    seen.event_p50.append(percentile(paced.latencies, 0.5))
    seen.event_p99.append(percentile(paced.latencies, 0.99))
    seen.event_rates.append(sse_load(server.url, HEADERS, streams=8, seconds=plan.seconds / 4).rate)


def memory_run(server: Server, requests: int) -> list[tuple[int, float]]:
    """(requests answered, MiB) from the warmed-up server to the one that has answered `requests` more."""
    points, done = [(0, server.cost().memory)], 0
    while done < requests:
        done += json_load(server.url, HEADERS, connections=CONNECTIONS, seconds=5, cpu=0).requests
        points.append((done, server.cost().memory))
    return points


def ratio(first: list[float], second: list[float]) -> float:
    """The median of the rounds' own ratios: what the machine did in a round, it did to both."""
    return median(a / b for a, b in zip(first, second, strict=True))


def run(quick: bool) -> Report:
    """Measure everything that this machine has. Returns what was found."""
    report = Report("overhead", "What the proxy costs per request and per event", quick)
    plan = Plan(1, 0.3, 0) if quick else Plan(5, 2, 50_000)
    if not quick and not available("litellm"):
        try:
            install_litellm()
        except subprocess.CalledProcessError as error:
            report.notes.append(f"LiteLLM could not be installed: {error}")
    wanted = ["nginx", BARE, "llama-lease"] if quick else ["nginx", BARE, "llama-lease", "litellm"]
    names = [name for name in wanted if available(name)]
    report.notes += [f"{name} is not installed here and was left out" for name in wanted if name not in names]
    if not have_wrk():
        report.notes.append("wrk is not installed: the JSON load came from a Python client, which slows everyone")
    with contenders(names) as servers:
        seen = {name: Seen() for name in servers}
        for server in servers.values():  # connections, code paths and caches, thrown away
            measure(server, Seen(), replace(plan, seconds=min(1.0, plan.seconds)))
        for number in range(plan.rounds):
            for name in list(servers)[:: 1 if number % 2 == 0 else -1]:
                measure(servers[name], seen[name], plan)
        memory = memory_run(servers["llama-lease"], plan.memory_requests)
    _tell(report, seen, memory)
    return report


def _tell(report: Report, seen: dict[str, Seen], memory: list[tuple[int, float]]) -> None:
    direct, ours = seen["direct"], seen["llama-lease"]
    report.add_table(
        f"JSON answers, {CONNECTIONS} connections kept busy (medians of {len(ours.rates)} rounds)",
        ("through", "requests/s", "p50 ms", "p99 ms", "CPU µs/request", "failed"),
        [(n, median(s.rates), median(s.p50), median(s.p99), median(s.cpu), s.errors) for n, s in seen.items()],
    )
    report.add_table(
        "SSE answers of 200 events: 4 streams, an event each 5 ms; 8 streams as fast as they go",
        ("through", "event p50 ms", "added p50 ms", "event p99 ms", "events/s"),
        [
            (name, median(s.event_p50), median(added(s, direct)), median(s.event_p99), median(s.event_rates))
            for name, s in seen.items()
        ],
    )
    report.add_table("llama-lease's memory", ("requests", "MiB"), memory)
    report.data = {name: vars(each) for name, each in seen.items()} | {"memory": memory}
    if "litellm" in seen:
        gain = ratio(ours.rates, seen["litellm"].rates)
        report.targets.append(Target("requests/s, against LiteLLM's proxy", gain, 30, "at least", "x"))
    if "nginx" in seen:
        share = ratio(ours.rates, seen["nginx"].rates)
        report.targets.append(Target("requests/s, against nginx", share, 0.10, "at least", "x"))
        cost = median(added(ours, direct)) / max(LEAST_MS, median(added(seen["nginx"], direct)))
        report.targets.append(Target("added latency of an SSE event (p50), against nginx's", cost, 5, unit="x"))
    if memory[-1][0]:
        grown = (memory[-1][1] - memory[0][1]) * 50_000 / memory[-1][0]
        report.targets.append(Target("memory grown over 50,000 requests", grown, MIB_PER_50_000, unit="MiB"))


def added(server: Seen, direct: Seen) -> list[float]:
    """What a contender adds to an event's way, round by round, in milliseconds."""
    return [a - b for a, b in zip(server.event_p50, direct.event_p50, strict=True)]


if __name__ == "__main__":
    given = options(__doc__ or "")
    run(given.quick).finish(given.json)

"""What the dashboard shows: rows of panels, each with its queries. Plain data; build.py makes Grafana's JSON of it.

In a query the words TICKET, LEASE, GROUP and HERE stand for the filters of the dashboard's variables.
"""

import re
from dataclasses import dataclass
from typing import Literal

Look = Literal["lines", "stacked", "percent", "bars", "heatmap", "timeline", "stat"]

FILTERS = {
    "TICKET": 'instance=~"$instance", lease=~"$lease", group=~"$group"',
    "LEASE": 'instance=~"$instance", lease=~"$lease"',
    "GROUP": 'instance=~"$instance", group=~"$group"',
    "HERE": 'instance=~"$instance"',
}


@dataclass(frozen=True)
class Query:
    """`text` is PromQL with filter words, `legend` Grafana's name for each series, e.g. {{mode}}."""

    text: str
    legend: str = ""

    @property
    def expr(self) -> str:
        return re.sub(r"\b(TICKET|LEASE|GROUP|HERE)\b", lambda word: FILTERS[word[0]], self.text)


@dataclass(frozen=True)
class Panel:
    """`width` is in the grid's 24 columns; `red` is the value from which a stat turns red."""

    title: str
    text: str
    look: Look
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    red: float | None = None


def quantiles(metric: str, filters: str, by: str, legend: str, *points: float) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({point}, sum by (le, {by}) (rate({metric}_bucket{{{filters}}}[$__rate_interval])))",
            f"{legend} p{point * 100:g}",
        )
        for point in points
    )


def over(seconds: int) -> Query:
    """The share of all waits that ended after more than `seconds`, which must be an edge of the wait buckets."""
    within = (
        f'rate(llama_lease_lease_wait_seconds_bucket{{TICKET, mode!="none", le="{seconds:.1f}"}}[$__rate_interval])'
    )
    ended = 'rate(llama_lease_lease_wait_seconds_count{TICKET, mode!="none"}[$__rate_interval])'
    return Query(f"1 - sum({within}) / sum({ended})", f"over {seconds} s")


def rows() -> tuple[tuple[str, tuple[Panel, ...]], ...]:
    return (
        ("Now", _now()),
        ("Waiting", _waiting()),
        ("The GPU", _gpu()),
        ("Answers", _answers()),
        ("Speech", _speech()),
        ("The server itself", _server()),
    )


def _now() -> tuple[Panel, ...]:
    def stat(title: str, text: str, unit: str, query: str, red: float | None = None) -> Panel:
        return Panel(title, text, "stat", unit, (Query(query),), width=4, red=red)

    return (
        stat("Waiting", "Requests in the queue.", "short", "sum(llama_lease_queue_depth{TICKET})", red=50),
        stat("Oldest wait", "How long the one that came first has waited by now.", "s",
             "max(llama_lease_queue_oldest_wait_seconds{LEASE})", red=120),
        stat("Holding the lease", "Requests that run now.", "short",
             'sum(llama_lease_leases_active{TICKET, mode!="none"})'),
        stat("Longest hold", "How long the oldest holder has held the lease by now.", "s",
             'max(llama_lease_lease_oldest_hold_seconds{LEASE, mode!="none"})'),
        stat("Wait p95, 5 minutes", "19 of 20 waits were shorter.", "s",
             "max(lease_mode:llama_lease_wait_seconds:p95_rate5m{LEASE})", red=60),
        stat("Last reload", "0: the last configuration was refused and the one before it runs on.", "short",
             "min(llama_lease_config_last_reload_successful{HERE})"),
    )  # fmt: skip


def _waiting() -> tuple[Panel, ...]:
    return (
        Panel("Wait by mode", "Time in the queue of all tickets, however the wait ended.", "lines", "s",
              quantiles("llama_lease_lease_wait_seconds", "TICKET", "mode", "{{mode}}", 0.5, 0.95, 0.99)),
        Panel("Waits", "How many waits ended in each range of lengths. Brighter: more.", "heatmap", "s",
              (Query("sum by (le) (increase("
                     'llama_lease_lease_wait_seconds_bucket{TICKET, mode!="none"}[$__rate_interval]))', "{{le}}"),)),
        Panel("Waits that clients give up on", "Share of waits longer than clients wait: voice satellites 5 s, proxies "
              "60 s, scripts 120 s, patient clients 300 s.", "lines", "percentunit",
              tuple(over(seconds) for seconds in (5, 60, 120, 300))),
        Panel("Queue depth", "Requests that wait, by group.", "stacked", "short",
              (Query("sum by (lease, group, mode) (llama_lease_queue_depth{TICKET})", "{{group}} ({{mode}})"),)),
        Panel("Oldest wait over time", "Rises while somebody waits; the histogram learns of a wait at its end.",
              "lines", "s",
              (Query("max by (lease, mode) (llama_lease_queue_oldest_wait_seconds{LEASE})", "{{lease}} {{mode}}"),)),
        Panel("How waits ended", "Granted, timed out, cancelled (the client left), or rejected.", "stacked", "reqps",
              (Query("sum by (outcome) (rate(llama_lease_lease_wait_seconds_count{TICKET}[$__rate_interval]))",
                     "{{outcome}}"),)),
    )  # fmt: skip


def _gpu() -> tuple[Panel, ...]:
    busy = "rate(llama_lease_lease_busy_seconds_total{%s}[$__rate_interval])"
    return (
        Panel("Who holds the GPU", "One lane a group; bright while at least one of its requests holds the lease.",
              "timeline", "short",
              (Query('clamp_max(sum by (instance, lease, group) (llama_lease_leases_active{TICKET, mode!="none"}), 1)',
                     "{{lease}} {{group}}"),), width=12),
        Panel("Share of GPU time", "Groups that hold the lease together share the time equally. The rest is idle.",
              "percent", "percentunit",
              (Query(f"sum by (instance, lease, group) ({busy % 'TICKET'})", "{{lease}} {{group}}"),
               Query(f"clamp_min(1 - sum by (instance, lease) ({busy % 'LEASE'}), 0)", "{{lease}} idle")),
              width=12),
        Panel("Swaps per minute", "Grants that changed which models are resident, and grants that passed an older one.",
              "lines", "short",
              (Query("60 * sum by (lease) (rate(llama_lease_swaps_total{LEASE}[$__rate_interval]))", "{{lease}} swaps"),
               Query("60 * sum by (lease) (rate(llama_lease_overtakes_total{LEASE}[$__rate_interval]))",
                     "{{lease}} overtakes"))),
        Panel("Holds by group", "From the grant to the release.", "lines", "s",
              quantiles("llama_lease_lease_hold_seconds", "TICKET", "group", "{{group}}", 0.5, 0.95)),
        Panel("Places refused or lost", "By reason: the queue was full, the wait too long, the server stopping, the "
              "model's load had failed.", "bars", "short",
              (Query("sum by (lease, reason) (increase(llama_lease_queue_rejected_total{LEASE}[$__rate_interval]))",
                     "{{lease}} {{reason}}"),)),
    )  # fmt: skip


def _answers() -> tuple[Panel, ...]:
    return (
        Panel("Requests", "By group and status.", "stacked", "reqps",
              (Query("sum by (group, code) (rate(llama_lease_requests_total{GROUP}[$__rate_interval]))",
                     "{{group}} {{code}}"),)),
        Panel("First byte without the wait", "From the grant to the answer's first byte: loading and the model's own "
              "speed.", "lines", "s",
              quantiles("llama_lease_time_to_first_byte_seconds", "GROUP", "group", "{{group}}", 0.5, 0.95)),
        Panel("Whole request", "From the request to the last byte, the wait included.", "lines", "s",
              quantiles("llama_lease_request_duration_seconds", "GROUP", "route", "{{route}}", 0.5, 0.95)),
        Panel("Upstream errors by kind", "Exchanges with upstreams that failed.", "bars", "short",
              (Query("sum by (upstream, kind) (increase(llama_lease_upstream_errors_total{HERE}[$__rate_interval]))",
                     "{{upstream}} {{kind}}"),)),
        Panel("Disconnects by phase", "Clients that left while queued, at the upstream, or during the answer.", "bars",
              "short",
              (Query("sum by (phase) (increase(llama_lease_client_disconnects_total{HERE}[$__rate_interval]))",
                     "{{phase}}"),)),
        Panel("Signs of life to waiting clients", "By kind: comments, empty chunks, pings.", "lines", "ops",
              (Query("sum by (kind) (rate(llama_lease_heartbeats_total{HERE}[$__rate_interval]))", "{{kind}}"),)),
    )  # fmt: skip


def _speech() -> tuple[Panel, ...]:
    def rate(name: str) -> str:
        return f"sum by (backend) (rate(llama_lease_speech_{name}_total{{HERE}}[$__rate_interval]))"

    return (
        Panel("First audio", "From the grant to the first audio.", "lines", "s",
              quantiles("llama_lease_speech_first_audio_seconds", "HERE", "backend", "{{backend}}", 0.5, 0.95)),
        Panel("Real-time factor", "Seconds of work for a second of audio; over 1 it stutters.", "lines", "short",
              (Query(f"{rate('synthesis_seconds')} / {rate('audio_seconds')}", "{{backend}}"),)),
        Panel("Speech tokens per second of work", "How fast the speech model generates.", "lines", "short",
              (Query(f"{rate('tokens')} / {rate('synthesis_seconds')}", "{{backend}}"),)),
        Panel("Audio made", "Seconds of audio in a second.", "lines", "short",
              (Query(rate("audio_seconds"), "{{backend}}"),), width=12),
        Panel("Characters spoken", "Per second.", "lines", "short",
              (Query(rate("characters"), "{{backend}}"),), width=12),
    )  # fmt: skip


def _server() -> tuple[Panel, ...]:
    ours = "and on (instance, job) llama_lease_build_info"  # every process that Prometheus knows has these two
    return (
        Panel("Memory", "Resident, the backends in the process included.", "lines", "bytes",
              (Query(f"process_resident_memory_bytes{{HERE}} {ours}", "{{instance}}"),)),
        Panel("CPU", "Cores in use.", "lines", "short",
              (Query(f"rate(process_cpu_seconds_total{{HERE}}[$__rate_interval]) {ours}", "{{instance}}"),)),
        Panel("Version", "What runs.", "stat", "short",
              (Query("llama_lease_build_info{HERE}", "{{version}}"),)),
    )  # fmt: skip

"""The dashboard, the recording rules and the alerts, proved with the real Prometheus on the real server under load."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grafana.mixed_load import mixed_load
from tests.grafana.promql import panel_queries, rules
from tests.grafana.real_prometheus import Prometheus, prometheus

# What Grafana puts in place of the dashboard's variables: all instances, leases and groups.
VARIABLES = {"$instance": ".*", "$lease": ".*", "$group": ".*", "$__rate_interval": "10s", "$__interval": "10s"}

# In a load of seconds nobody waits for the 5 to 300 seconds after which clients give up.
ZERO_IS_RIGHT = {"Waits that clients give up on", "lease:llama_lease_waits_over:ratio_rate5m"}


pytestmark = pytest.mark.usefixtures("root_logger")


def filled_in(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, expr
    return expr


def highest(found: list[dict[str, Any]]) -> float:
    """The greatest value in any of the series; minus infinity where there is none."""
    values = (float(value) for series in found for _, value in series["values"])
    return max((value for value in values if math.isfinite(value)), default=-math.inf)


async def unanswered(watching: Prometheus) -> list[str]:
    """The queries of panels, marks and recording rules that have no data, or only zeros where there was something."""
    queries = [(title, filled_in(expr), legend) for title, expr, legend in panel_queries()]
    queries += [(rule["record"], rule["record"], "") for rule in rules("recording.yml")]
    problems = []
    for title, expr, legend in queries:
        found = await watching.query(expr)
        if highest(found) < 0 or (highest(found) == 0 and title not in ZERO_IS_RIGHT):
            problems.append(f"{title}: {highest(found)} from {expr}")
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            if not all(label in series["metric"] for series in found):
                problems.append(f"{title}: a series without {label} from {expr}")
    return problems


async def none_left(problems: Callable[[], Awaitable[list[str]]], seconds: float = 40) -> list[str]:
    """What is still wrong after some time; nothing, as soon as nothing is."""
    end = time.monotonic() + seconds
    while True:
        left = await problems()
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.5)


async def test_every_panel_and_every_rule_has_data_from_a_server_under_load(tmp_path: Path) -> None:
    async def waiting_for() -> list[str]:
        return await unanswered(watching)

    async with mixed_load(tmp_path) as target, prometheus(target, tmp_path) as watching:
        assert await none_left(waiting_for) == []
        evaluated = {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in await watching.rules()}
        assert set(evaluated.values()) == {("ok", "")}
        assert set(evaluated) == {rule.get("alert") or rule["record"] for rule in rules("alerts.yml", "recording.yml")}


async def test_alerts_see_what_goes_wrong_in_the_load_and_nothing_else(tmp_path: Path) -> None:
    async def missing() -> list[str]:
        states = await watching.alerts()
        return [f"{name}: {states.get(name)}" for name, state in expected.items() if states.get(name) != state]

    # The crowd and the impatient are turned away, which becomes an alert when it lasts; a cut answer is one at once.
    expected = {"LeaseRejecting": "pending", "UpstreamTruncation": "firing"}
    async with mixed_load(tmp_path) as target, prometheus(target, tmp_path) as watching:
        assert await none_left(missing) == []
        allowed = {*expected, "ConfigReloadFailed"}  # for a moment, between the refused file and the repaired one
        assert set(await watching.alerts()) <= allowed

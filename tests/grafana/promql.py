"""What the tests of grafana/ share: the files, the queries in them, and the names in the queries."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from proxy.metrics import Known, Metrics

GRAFANA = Path(__file__).parents[2] / "grafana"
_WORDS = frozenset({"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool"})


def installed(command: str) -> str:
    """The path of a command of Debian's package prometheus; the test fails where it is missing."""
    path = shutil.which(command)
    if path is None:
        pytest.fail(f"{command} is not installed; this test needs it: apt-get install prometheus")
    return path


def load(name: str) -> Any:
    return yaml.safe_load((GRAFANA / name).read_text())


def rules(*names: str) -> list[dict[str, Any]]:
    return [rule for name in names for group in load(name)["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((GRAFANA / "llama-lease.json").read_text())
    return board


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """(panel's title, PromQL, legend) of every query in the committed dashboard, its annotations included."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target.get("legendFormat", "")
    for mark in board["annotations"]["list"]:
        yield mark["name"], mark["expr"], ""


def names(query: str) -> set[str]:
    """The metrics that a query reads: what is left of it without strings, labels, ranges, functions and operators."""
    query = re.sub(r'"(\\.|[^"\\])*"', "", query)
    query = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", " ", query)
    query = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)", " ", query)
    found = re.findall(r"([a-zA-Z_:][\w:]*)\s*(\()?", query)
    return {name for name, call in found if not call and name not in _WORDS}


def exported() -> set[str]:
    """The names of all samples on the page of a server that has seen one of everything."""
    known = Known(
        leases={"gpu0": 1800}, groups={"chat": ("gpu0", "read")}, upstreams=frozenset({"swapper"}),
        backends=frozenset({"voice"}), routes=frozenset({"/v1/chat/completions"}),
    )  # fmt: skip
    metrics = Metrics(known)
    metrics.request_finished("/v1/chat/completions", "chat", 200, 1.0, 0.5)
    page = text_string_to_metric_families(metrics.render()[0].decode())
    return {sample.name for family in page for sample in family.samples}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules("recording.yml")}

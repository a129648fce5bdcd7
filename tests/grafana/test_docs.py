import re
from pathlib import Path

from proxy.metrics import PREFIX
from tests.grafana.promql import exported, rules

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def first_cells(heading: str) -> set[str]:
    """The names in the first column of the table under this heading."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")][2:]
    return {name.strip() for row in rows for name in row.split(",")}


def test_the_documentation_lists_exactly_the_exported_metrics() -> None:
    samples = {name.removeprefix(PREFIX) for name in exported() if name.startswith(PREFIX)}
    assert first_cells("The metrics") == {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples}


def test_the_documentation_lists_exactly_the_alerts() -> None:
    assert first_cells("The alerts") == {rule["alert"] for rule in rules("alerts.yml")}

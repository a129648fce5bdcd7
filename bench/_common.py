"""What every benchmark shares: its two options, its table, its JSON, and how a target is judged.

A script's JSON is one Report. README's table of measurements is made of the `targets` of all of them (bench/run.py).
"""

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """One claim: `value` is at most or at least `limit`. `unit` is for people ("x", "ms", "s", "")."""

    claim: str
    value: float
    limit: float
    sense: Literal["at most", "at least"] = "at most"
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass
class Report:
    """What one script found. `tables`: title -> (columns, rows of cells); `notes`: what the numbers do not say."""

    name: str
    title: str
    quick: bool = False
    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def add_table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """One more table; cells are text or numbers."""
        self.tables[title] = (list(columns), [list(row) for row in rows])

    def finish(self, json_path: Path | None) -> None:
        """Print everything, and write the JSON if a path was given."""
        print(f"\n# {self.title}\n")
        for title, (columns, rows) in self.tables.items():
            print(f"{title}\n{table(columns, rows)}\n")
        if self.targets:
            print(target_table(self.targets))
        for note in self.notes:
            print(f"- {note}")
        if json_path:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            targets = [{**asdict(target), "met": target.met} for target in self.targets]
            json_path.write_text(
                json.dumps({**asdict(self), "targets": targets, "machine": machine()}, indent=1) + "\n"
            )


def options(description: str, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The command line: --json PATH, --quick, and what a script adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results there")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the numbers mean nothing")
    for name, settings in more:
        parser.add_argument(name, **settings)
    return parser.parse_args()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table that also reads well as plain text; numbers get three significant digits."""
    cells = [[show(cell) for cell in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells), 3) for i, column in enumerate(columns)]
    lines = [list(columns), ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def target_table(targets: Iterable[Target]) -> str:
    """The targets and whether each is met."""
    rows = [
        (t.claim, f"{show(t.value)}{_unit(t)}", f"{t.sense} {show(t.limit)}{_unit(t)}", "yes" if t.met else "NO")
        for t in targets
    ]
    return table(("claim", "measured", "to reach", "met"), rows)


def _unit(target: Target) -> str:
    return f" {target.unit}" if target.unit else ""


def show(cell: Any) -> str:
    """A cell as text."""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of them lie, nearest rank. Raises ValueError on none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def machine() -> dict[str, str]:
    """The kind of machine, without its name, and how busy it is: the load average of the last five minutes."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "system": platform.system(),
        "load": f"{os.getloadavg()[1]:.1f}",
    }

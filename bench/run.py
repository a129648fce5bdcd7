"""All benchmarks, one after the other, and the table in the documents that is made of their results.

`python -m bench.run [--quick] [--only NAME ...] [--table]`. Results go to bench/results/NAME.json; with --quick to
a temporary folder, and the documents stay as they are. --table: measure nothing, only write the table again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench._common import Target, target_table

SCRIPTS = ("contention", "lease", "overhead", "scrape", "speech_lm", "first_audio", "streaming")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def run(names: Sequence[str], folder: Path, *, quick: bool) -> list[str]:
    """Run these scripts, their results into `folder`. Returns the names of those that failed."""
    failed = []
    for name in names:
        began = time.monotonic()
        command = [sys.executable, "-m", f"bench.{name}", "--json", str(folder / f"{name}.json")]
        code = subprocess.run([*command, "--quick"] if quick else command, cwd=ROOT, check=False).returncode
        print(f"\nbench.{name}: {'done' if code == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
        if code != 0:
            failed.append(name)
    return failed


def measured(folder: Path) -> str:
    """The table of all targets, from the results in `folder`."""
    targets, machine, loads = [], {}, []
    for name in SCRIPTS:
        if (folder / f"{name}.json").exists():
            result = json.loads((folder / f"{name}.json").read_text())
            machine = result["machine"]
            if "load" in machine:
                loads.append(float(machine["load"]))
            for target in result["targets"]:
                del target["met"]
                targets.append(Target(**target))
    kind = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}" if machine else "no machine yet"
    busy = f", load average up to {max(loads):.1f}" if loads else ""
    return f"{target_table(targets)}\n\nMeasured on: {kind}{busy}. `make bench` makes this table again."


def with_table(text: str, table: str) -> str:
    """A document with the table between its two marks replaced; a document without marks stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end else text


def main() -> int:
    """The command; its exit code is 1 when a script failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the numbers mean nothing")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    given = parser.parse_args()
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            return bool(run(given.only, Path(folder), quick=True))
    failed = [] if given.table else run(given.only, RESULTS, quick=False)
    for document in DOCUMENTS:
        if document.exists():
            document.write_text(with_table(document.read_text(), measured(RESULTS)))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

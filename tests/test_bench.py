"""Every benchmark runs and its results can be read; the documents show the results that are kept."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench._common import Target, percentile, show, table
from bench.run import BEGIN, DOCUMENTS, END, RESULTS, ROOT, SCRIPTS, measured, with_table


@pytest.mark.timeout(900)  # the quick form of a full-size model still makes one
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_quick_form_runs_and_its_results_parse(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["name"] == name
    assert result["quick"] is True
    assert result["tables"] or result["targets"]
    for target in result["targets"]:
        assert math.isfinite(target["value"])
        assert measured(tmp_path)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.exists()], ids=lambda path: path.name)
def test_a_document_shows_the_results_that_are_kept(document: Path) -> None:
    text = document.read_text()
    assert BEGIN in text
    assert with_table(text, measured(RESULTS)) == text


def test_a_table_replaces_what_stands_between_the_marks_alone() -> None:
    assert with_table(f"a{BEGIN}old{END}b", "new") == f"a{BEGIN}\nnew\n{END}b"
    assert with_table("no marks", "new") == "no marks"


def test_a_target_is_met_at_its_limit() -> None:
    assert Target("c", 3.0, 3.0).met
    assert not Target("c", 3.1, 3.0).met
    assert Target("c", 3.0, 3.0, "at least").met


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_table_is_aligned_and_short_of_digits() -> None:
    assert table(("a", "long name"), [(1.23456, "x")]).splitlines() == [
        "| a    | long name |",
        "| ---- | --------- |",
        "| 1.23 | x         |",
    ]
    assert show(12345.678) == "12346"

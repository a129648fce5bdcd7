"""The map of the code: who may import whom, and who may not import what. Reads the sources; runs nothing of them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("proxy/**/*.py"), *ROOT.glob("backends/**/*.py")])
HEAVY = {"torch", "onnxruntime", "llama_cpp", "gguf", "hibari", "tokenizers", "opentelemetry"}
PURE = {
    "proxy.classify": {"asyncio", "aiohttp", "time", "logging"},
    "proxy.line": {"asyncio", "aiohttp", "time", "logging"},
    "proxy.residency": {"asyncio", "aiohttp", "time", "logging"},
    "proxy.sse": {"asyncio", "aiohttp", "logging"},
    "backends.text": {"asyncio", "time", "logging", "numpy"},
    "backends.cosyvoice.schedule": {"asyncio", "time", "logging", "torch"},
    "backends.cosyvoice.sampling": {"asyncio", "time", "logging", "torch"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere; `from a import b` counts as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def roots(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(path)}


@pytest.mark.parametrize("path", [path for path in SOURCES if name_of(path).startswith("backends")], ids=name_of)
def test_backends_know_nothing_of_the_proxy_and_of_http(path: Path) -> None:
    assert not roots(path) & {"proxy", "aiohttp"}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_stay_pure(module: str) -> None:
    assert not roots(ROOT / f"{module.replace('.', '/')}.py") & PURE[module]


def test_the_rules_of_the_lease_import_nothing_of_ours() -> None:
    assert not roots(ROOT / "proxy/line.py") & {"proxy", "backends"}


def test_only_the_handler_the_runtime_and_their_guests_take_a_lease() -> None:
    """`Runtime.hold` and `Lease.hold` are called by few; everybody else gets a hold handed in."""
    takers = {
        name_of(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "hold"
    }
    assert takers <= {"proxy.handler", "proxy.runtime", "proxy.jobs", "proxy.voices", "proxy.simulate"}


def test_the_proxy_starts_without_the_packages_of_any_model() -> None:
    modules = [name_of(path) for path in SOURCES if name_of(path).startswith("proxy") and path.stem != "__main__"]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; print(*set(sys.modules) & {HEAVY})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_too_long_to_know_its_way_around(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports at the top of files form no cycle; a late import inside a function is a choice that the reader sees."""
    known = {name_of(path): path for path in SOURCES}
    graph = {
        name: {
            target
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for target in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            )
            if target in known and target != name and not name.startswith(f"{target}.")
        }
        for name, path in known.items()
    }
    done: set[str] = set()
    while ready := {name for name, targets in graph.items() if name not in done and targets <= done}:
        done |= ready
    assert set(graph) - done == set()

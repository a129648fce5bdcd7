"""The command line as a user meets it: what it prints, and its exit codes."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from tests.embedded import ROOT, Server, until, write_config


def run(*arguments: str, **more: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **more)  # type: ignore[call-overload]


def test_check_shows_where_every_model_of_the_default_goes() -> None:
    done = run("check")
    assert done.returncode == 0
    words = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert words["smollm2"][1:4] == ["chat", "read", "upstream"]
    assert words["smollm2-embed"][1:3] == ["embeddings", "none"]
    assert words["hibari"][1:4] == ["speech", "write", "backend"]
    assert words["tts-1"][1:] == ["alias", "of", "hibari", "configured"]


def test_check_explains_one_request() -> None:
    done = run("check", "tts-1", "/v1/audio/speech")
    assert done.returncode == 0
    assert "'tts-1' is alias of 'hibari', which is named by group 'speech'" in done.stdout
    assert "mode      write" in done.stdout


def test_check_says_the_rules_of_residency_in_words(tmp_path: Path) -> None:
    swap = {"models": {m: {"cmd": "x"} for m in "qvte"}, "matrix": {"sets": {"all": "(q | v | t) & e"}}}
    (tmp_path / "swap.yaml").write_text(json.dumps(swap))
    config = {
        "upstreams": {"swap": {"url": "http://127.0.0.1:9", "swap_config": "swap.yaml"}},
        "groups": {"all": {"mode": "read", "models": ["*"], "upstream": "swap"}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    done = run("check", "--config", str(tmp_path / "config.yaml"))
    assert done.returncode == 0, done.stderr
    assert "lease gpu0: q excludes v and t; e stays" in done.stdout


def test_a_fault_in_the_configuration_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("leases:\n  gpu0:\n    max_wiat: 5\n")
    done = run("check", "--config", str(path))
    assert done.returncode == 1
    assert f"{path}:3: leases.gpu0: unknown key 'max_wiat', did you mean 'max_wait'?" in done.stderr


def test_a_port_that_is_taken_is_an_error_and_not_a_traceback(embedded: Server, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"listen: {embedded.url.removeprefix('http://')}\n")
    done = run("serve", "--config", str(path))
    assert done.returncode == 1
    assert "cannot listen on" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_without_a_server_says_so() -> None:
    done = run("demo", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no answer from http://127.0.0.1:9" in done.stderr


def test_simulate_compares_the_orders_on_a_trace() -> None:
    done = run("simulate", "examples/light.jsonl")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if "all" in row] == ["llama-swap", "fifo", "phases", "phases"]


def test_simulate_names_the_line_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"models": {"a": {}}}\n{"at": 1, "model": "b", "work": 1}\n')
    done = run("simulate", str(path))
    assert done.returncode == 1
    assert f"{path}:2: model: the head does not name 'b'" in done.stderr


def test_a_trace_of_a_running_server_can_be_simulated(embedded: Server, tmp_path: Path) -> None:
    run("demo", "--url", embedded.url, "--streams", "2")
    traced = run("trace", "--url", embedded.url)
    assert traced.returncode == 0
    head, *requests = map(json.loads, traced.stdout.splitlines())
    assert {"smollm2", "hibari", "smollm2-embed"} <= set(head["models"])
    assert {frozenset(request) for request in requests} == {frozenset({"at", "model", "work"})}
    path = tmp_path / "own.jsonl"
    path.write_text(traced.stdout)
    assert run("simulate", str(path), "--config", str(embedded.path)).returncode == 0


def test_convert_of_a_folder_without_a_model_names_the_file(tmp_path: Path) -> None:
    done = run("convert", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "llm.pt" in done.stderr
    assert "Traceback" not in done.stderr


async def test_saving_the_file_and_sighup_read_it_again_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    server = Server(*write_config(tmp_path))
    await server.start()

    def knows(model: str) -> bool:
        with urlopen(server.url + "/v1/models") as answer:
            return model in {entry["id"] for entry in json.load(answer)["data"]}

    try:
        text = server.path.read_text()
        server.path.write_text(text.replace("tts-1: hibari", "narrator: hibari"))
        await until(lambda: knows("narrator"))
        server.path.write_text(text.replace("tts-1: hibari", "narrator: [hibari]"))
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: "the configuration is refused, the old one stays" in server.log.read_text())
        assert await asyncio.to_thread(knows, "narrator")
    finally:
        assert await server.stop() == 0

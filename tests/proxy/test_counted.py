"""The metrics of the running server: each is counted at its place, once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from proxy.serve import reload_config
from tests.proxy.observed import Observed, observed

HELLO = [{"role": "user", "content": "hello"}]
ROUTE = {"route": "/v1/chat/completions", "group": "chat"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Observed]:
    async with observed(tmp_path) as running:
        yield running


async def gone(task: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    """The client closes its connection."""
    task.cancel()
    await asyncio.wait({task})


async def test_a_client_that_leaves_the_queue_is_counted_as_queued(server: Observed) -> None:
    gate = server.swapper.hold("qwen")
    first = asyncio.create_task(server.chat())
    await gate.reached.wait()
    waiting = asyncio.create_task(server.speak("Hello."))
    await server.reaches(1, "queue_depth", lease="gpu0", mode="write", group="speech")
    await gone(waiting)
    await server.reaches(1, "client_disconnects_total", phase="queued")
    gate.open()
    await first
    assert (
        server.value("lease_wait_seconds_count", lease="gpu0", mode="write", group="speech", outcome="cancelled") == 1
    )
    assert server.value("client_disconnects_total", phase="upstream") == 0


async def test_a_client_that_leaves_before_the_first_byte_is_counted_as_upstream(server: Observed) -> None:
    gate = server.swapper.hold("qwen")
    running = asyncio.create_task(server.chat())
    await gate.reached.wait()
    await gone(running)
    await server.reaches(1, "client_disconnects_total", phase="upstream")
    assert server.value("requests_total", **ROUTE, code="499") == 1
    assert server.value("time_to_first_byte_seconds_count", **ROUTE) == 0


async def test_a_client_that_leaves_in_the_answer_is_counted_as_streaming_and_not_as_an_error(server: Observed) -> None:
    gate = server.swapper.hold("qwen", after=400)
    async with server.client.post(
        "/v1/chat/completions", json={"model": "qwen", "stream": True, "messages": HELLO}
    ) as response:
        await response.content.readany()
        await gate.reached.wait()
        response.close()
    await server.reaches(1, "client_disconnects_total", phase="streaming")
    kinds = ("connect", "timeout", "reset", "truncated", "5xx", "429")
    assert [server.value("upstream_errors_total", upstream="swapper", kind=kind) for kind in kinds] == [0] * 6


async def test_the_time_to_the_first_byte_does_not_contain_the_wait(server: Observed) -> None:
    held = server.speech.hold()
    speaking = asyncio.create_task(server.speak("Hello."))
    await asyncio.to_thread(held.reached.wait)
    waiting = asyncio.create_task(server.chat())
    await server.reaches(1, "queue_depth", lease="gpu0", mode="read", group="chat")
    await asyncio.sleep(0.2)
    held.open()
    await asyncio.gather(speaking, waiting)
    waited = server.value("lease_wait_seconds_sum", lease="gpu0", mode="read", group="chat", outcome="granted")
    first_byte = server.value("time_to_first_byte_seconds_sum", **ROUTE)
    assert waited >= 0.2
    assert 0 < first_byte
    assert waited + first_byte <= server.value("request_duration_seconds_sum", **ROUTE)
    assert server.value("heartbeats_total", kind="comment") > 0


async def test_truncated_answers_are_counted(server: Observed) -> None:
    with pytest.raises(aiohttp.ClientError):
        await server.chat("broken")
    assert server.value("upstream_errors_total", upstream="broken", kind="truncated") == 1


async def test_a_model_whose_load_failed_is_refused_by_reason(server: Observed) -> None:
    fields: dict[str, object] = {"model": "slow", "messages": []}  # not a stream, whose status a heartbeat would settle
    first = await server.post("/v1/chat/completions", fields)
    second = await server.post("/v1/chat/completions", fields)
    assert (first.status >= 500, second.status) == (True, 503)
    assert server.value("queue_rejected_total", lease="gpu0", reason="model_failed") == 1


async def test_speech_is_counted(server: Observed) -> None:
    await server.speak("Hello.")
    await server.reaches(6, "speech_characters_total", backend="fake")  # counted when its thread has ended
    assert server.value("speech_tokens_total", backend="fake") == 6
    assert server.value("speech_audio_seconds_total", backend="fake") == pytest.approx(6 * 480 / 24000)
    assert server.value("speech_first_audio_seconds_count", backend="fake") == 1
    assert server.value("speech_synthesis_seconds_total", backend="fake") > 0


async def test_a_client_that_closes_behind_the_last_byte_of_speech_has_not_left_it(server: Observed) -> None:
    for _ in range(5):
        fields: dict[str, object] = {"model": "tts", "input": "Hello.", "response_format": "wav"}
        await server.post("/v1/audio/speech", fields, Connection="close")
    await server.reaches(5, "requests_total", route="/v1/audio/speech", group="speech", code="200")
    assert server.value("client_disconnects_total", phase="streaming") == 0


async def test_a_file_that_is_repaired_to_what_runs_counts_as_accepted(server: Observed, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    server.runtime.config = server.runtime.config.model_copy(update={"path": file})
    file.write_text("no_such_key: 1\n")
    assert not reload_config(server.runtime)
    assert server.value("config_last_reload_successful") == 0
    file.write_text(server.runtime.config.model_dump_json())
    assert reload_config(server.runtime)
    assert server.value("config_last_reload_successful") == 1


async def test_a_scrape_takes_no_lease(server: Observed) -> None:
    gate = server.swapper.hold("qwen")
    running = asyncio.create_task(server.chat())
    await gate.reached.wait()
    async with server.client.get("/metrics") as response:
        page = await response.text()
    assert 'llama_lease_leases_active{lease="gpu0",mode="read",group="chat"} 1\n' in page
    gate.open()
    await running


async def test_an_upstreams_own_page_is_passed_on_under_its_name(server: Observed) -> None:
    async with server.client.get(f"{server.swapper.url}/metrics") as direct:
        expected = await direct.read()
    async with server.client.get("/metrics/upstream/swapper") as response:
        assert (response.status, await response.read()) == (200, expected)
    assert expected
    async with server.client.get("/metrics/upstream/nobody") as response:
        assert response.status == 404

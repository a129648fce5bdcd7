"""The live page in Chromium: the queue moves, the cancel works, speech plays, and nothing is asked of another host."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from proxy.lease import LeaseEvent
from proxy.line import Mode, Ticket
from tests.end_to_end.watched import chromium, watched
from tests.fakes import FakeSpeech, Gate
from tests.fronted import until
from tests.proxy.speech_server import SpeechServer, speech_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER, ADMIN = "user-key", "admin-key"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=15_000)
    async with chromium() as running:
        yield running


class Line:
    """A chat that stands at a gate with the lease in hand, and whoever comes behind it."""

    def __init__(self, server: SpeechServer, tasks: asyncio.TaskGroup, gate: Gate) -> None:
        self._server, self._tasks, self.gate = server, tasks, gate

    async def joins(self, id: str, model: str) -> "asyncio.Task[int]":
        """One more request, once it waits; its status in the end."""
        lease = self._server.runtime.leases["gpu0"]
        waiting = len(lease.snapshot().waiting)
        task = self._tasks.create_task(ask(self._server, id, model))
        await until(lambda: len(lease.snapshot().waiting) == waiting + 1)
        return task


@asynccontextmanager
async def line(server: SpeechServer) -> AsyncIterator[Line]:
    gate = server.swapper.hold("qwen")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(server, "holds", "qwen"))
        await gate.reached.wait()
        yield Line(server, tasks, gate)
        gate.open()


async def ask(server: SpeechServer, id: str, model: str = "qwen") -> int:
    """A chat, or a speech where the model speaks; the status of its answer."""
    path, fields = "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    if model == "tts":
        path, fields = "/v1/audio/speech", {"model": model, "input": "Hello.", "response_format": "pcm"}
    async with server.client.post(path, json=fields, headers={"X-Request-Id": id}) as reply:
        await reply.read()
        return reply.status


# -- what is shown -------------------------------------------------------------------------------------------------


async def test_an_idle_server_is_shown_as_one(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url) as seen:
        await expect(seen.page.locator("#link-text")).to_have_text("live")
        await expect(seen.page.locator("#headline")).to_have_text("The GPU is free.")
        await expect(seen.page.locator("#queue-empty")).to_be_visible()
        await expect(seen.page.locator("#plot-empty")).to_contain_text("Nothing has happened")


async def test_the_queue_moves(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url) as seen:
        rows = seen.page.locator("#waiters tr")
        await expect(seen.page.locator("#link-text")).to_have_text("live")
        async with line(server) as queue:
            await expect(seen.page.locator("#headline")).to_have_text("qwen has the GPU.")
            await queue.joins("first", "tts")
            await queue.joins("second", "chatter")
            await expect(rows.locator(".place")).to_have_text(["1", "2"])
            await expect(rows.locator("b")).to_have_text(["tts", "chatter"])
            speaking = server.speech.hold()
            queue.gate.open()
            await expect(seen.page.locator("#headline")).to_have_text("tts has the GPU to itself.")
            await expect(rows.locator("b")).to_have_text(["chatter"])
            await expect(rows.locator(".place")).to_have_text(["1"])
            speaking.open()
        await expect(seen.page.locator("#queue-empty")).to_be_visible()
        await expect(seen.page.locator("#headline")).to_have_text("The GPU is free.")


async def test_waits_count_up(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue:
        await queue.joins("first", "tts")
        async with watched(browser, server.url, clock=True) as seen:
            time = seen.page.locator("#waiters td").nth(2)
            await expect(time).to_have_text(re.compile(r"^\d s$"))
            # The page's clock alone: the server's next answer would set it right again.
            await seen.page.route("**/lease", lambda route: route.abort())
            seen.allowed = ["ERR_FAILED"]
            await seen.page.clock.run_for(34_000)
            await expect(time).to_have_text(re.compile(r"^(3[4-9]|4\d) s$"))


async def test_who_came_before_the_page_is_shown_with_true_times(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        for id in ("one", "two"):
            await ask(server, id)
        async with watched(browser, server.url) as seen:
            await expect(seen.page.locator("#readout")).to_contain_text("2 requests for 1 model")
            await seen.page.locator("#as-table summary").click()
            await expect(seen.page.locator("#rows tr")).to_have_count(2)
            await expect(seen.page.locator("#rows tr").first).to_contain_text("done")
            await expect(seen.page.locator("#waits-words")).to_contain_text("half waited less")


def tell_of_a_swap(server: SpeechServer) -> None:
    """A chat of two minutes ago: it waited for 60 s, was loaded for 20 s, answered for 30 s."""
    now = server.runtime.leases["gpu0"].now()
    ticket = Ticket("old", "qwen", "chat", Mode.READ, number=10_000, arrived=now - 230)
    tell = server.runtime.feed.on_lease_event
    tell(LeaseEvent("queued", "gpu0", ticket, now - 230))
    ticket.granted, ticket.swaps = now - 170, True
    tell(LeaseEvent("granted", "gpu0", ticket, now - 170))
    ticket.opened = now - 150
    tell(LeaseEvent("opened", "gpu0", ticket, now - 150))
    ticket.released = now - 120
    tell(LeaseEvent("released", "gpu0", ticket, now - 120, "done"))


async def test_the_timeline_shows_waiting_loading_and_answering_and_marks_the_swap(
    browser: Browser, tmp_path: Path
) -> None:
    async with speech_server(tmp_path) as server:
        tell_of_a_swap(server)
        async with watched(browser, server.url) as seen:
            await expect(seen.page.locator("#readout")).to_contain_text("1 request for 1 model, 1 swap.")
            assert await colours_of_the_timeline(seen.page, 12, 24) >= {"waiting-fill", "loading", "streaming"}
            assert await colours_of_the_timeline(seen.page, 0, 10) == {"loading"}  # the mark above the bar
            box = await seen.page.locator("#bars").bounding_box()
            assert box is not None
            await seen.page.mouse.move(box["x"] + box["width"] * (1 - 160 / 600), box["y"] + 16)
            await expect(seen.page.locator("#readout")).to_contain_text(
                "qwen · waited 60 s · loaded for 20 s · answered for 30 s · done, 2 min 0"
            )


async def colours_of_the_timeline(page: Page, top: int, bottom: int) -> set[str]:
    """The names of the style sheet's colours that are on the canvas between two heights."""
    found: list[str] = await page.evaluate(
        """([top, bottom]) => {
          const canvas = document.getElementById("bars");
          const data = canvas.getContext("2d").getImageData(0, top, canvas.width, bottom - top).data;
          const there = new Set();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) there.add(data.slice(i, i + 3).join());
          const one = document.createElement("canvas").getContext("2d");
          return ["waiting-fill", "loading", "starting", "streaming", "failed"].filter((name) => {
            one.fillStyle = getComputedStyle(canvas).getPropertyValue(`--${name}`);
            one.fillRect(0, 0, 1, 1);
            return there.has(one.getImageData(0, 0, 1, 1).data.slice(0, 3).join());
          });
        }""",
        [top, bottom],
    )
    return set(found)


async def test_the_rules_are_told_in_words(browser: Browser, tmp_path: Path) -> None:
    settings = {"gpu0": {"order": "fifo", "max_wait": 90, "max_waiting": 7}}
    async with speech_server(tmp_path, leases=settings) as server, watched(browser, server.url) as seen:
        rules = seen.page.locator("#rules")
        await expect(rules).to_contain_text("Strictly in order of arrival.")
        await expect(rules).to_contain_text(
            "may wait for 90 seconds and hold the GPU for 30 minutes. 7 requests may wait"
        )


async def test_a_long_queue_is_short_until_asked_for(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue:
        for number in range(12):
            await queue.joins(f"r{number}", "tts")
        async with watched(browser, server.url) as seen:
            rows = seen.page.locator("#waiters tr")
            await expect(rows).to_have_count(10)
            await seen.page.get_by_role("button", name="Show 2 more").click()
            await expect(rows).to_have_count(12)
            await expect(seen.page.locator("#queue-count")).to_have_text("12 requests")


async def test_many_holders_do_not_push_the_rest_away(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gates = [server.swapper.hold("qwen") for _ in range(6)]
        async with asyncio.TaskGroup() as tasks, watched(browser, server.url) as seen:
            for number in range(6):
                tasks.create_task(ask(server, f"r{number}"))
            await expect(seen.page.locator("#headline")).to_have_text("qwen has the GPU.")
            await seen.page.get_by_role("button", name="Show 2 more").click()
            await expect(seen.page.locator("#holders li")).to_have_count(6)
            for gate in gates:
                gate.open()


async def test_each_gpu_has_its_own_queue(browser: Browser, tmp_path: Path) -> None:
    backends = {"fake": {"kind": "hibari", "lease": "gpu1"}}
    leases: dict[str, dict[str, str]] = {"gpu0": {}, "gpu1": {}}
    async with (
        speech_server(tmp_path, leases=leases, backends=backends) as server,
        line(server) as queue,
        watched(browser, server.url) as seen,
    ):
        await queue.joins("waits", "chatter")
        await expect(seen.page.locator("#headline")).to_have_text("qwen has gpu0.")
        await expect(seen.page.locator("#waiters tr")).to_have_count(1)
        await seen.page.get_by_role("button", name="gpu1").click()
        await expect(seen.page.locator("#headline")).to_have_text("gpu1 is free.")
        await expect(seen.page.locator("#queue-empty")).to_be_visible()
        await expect(seen.page.get_by_role("button", name="gpu0 (1)")).to_have_attribute("aria-pressed", "false")


# -- cancelling ----------------------------------------------------------------------------------------------------


async def test_a_waiting_request_is_cancelled_after_a_question(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue:
        asked = await queue.joins("waits", "tts")
        async with watched(browser, server.url) as seen:
            await seen.page.get_by_role("button", name="Cancel the request for tts, 1st in the queue").click()
            await expect(seen.page.locator("#cancel-what")).to_contain_text("id waits. It has waited for")
            await seen.page.get_by_role("button", name="Keep it").click()
            assert not asked.done()
            await seen.page.get_by_role("button", name="Cancel the request for tts").click()
            await seen.page.get_by_role("button", name="Cancel request").click()
            await expect(seen.page.locator("#said")).to_have_text("The request is cancelled.")
            await expect(seen.page.locator("#queue-empty")).to_be_visible()
            assert await asked == 503


async def test_the_holder_is_cancelled_and_the_next_goes_on(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue:
        next_one = await queue.joins("next", "tts")
        async with watched(browser, server.url) as seen:
            await seen.page.get_by_role("button", name="Cancel the running request for qwen").click()
            await expect(seen.page.locator("#cancel-what")).to_contain_text("its answer breaks off")
            await seen.page.get_by_role("button", name="Cancel request").click()
            assert await next_one == 200
            await expect(seen.page.locator("#headline")).to_have_text("The GPU is free.")


async def test_where_there_are_administrators_the_page_explains_and_asks_for_their_key(
    browser: Browser, tmp_path: Path
) -> None:
    async with (
        speech_server(tmp_path, api_keys=[USER], admin_keys=[ADMIN]) as server,
        line(server) as queue,
        watched(browser, server.url) as seen,
    ):
        seen.allowed = ["401 (Unauthorized)", "403 (Forbidden)"]
        asked = await queue.joins("waits", "tts")
        await seen.page.get_by_label("Key", exact=True).fill(USER)
        await seen.page.get_by_role("button", name="Use this key").click()
        await seen.page.get_by_role("button", name="Cancel the request for tts").click()
        await seen.page.get_by_role("button", name="Cancel request").click()
        await expect(seen.page.locator("#cancel-why")).to_contain_text("only an administrator")
        await seen.page.get_by_label("Admin key").fill("wrong")
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.locator("#cancel-why")).to_contain_text("does not take that key")
        assert not asked.done()
        await seen.page.get_by_label("Admin key").fill(ADMIN)
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.locator("#cancel-dialog")).to_be_hidden()
        assert await asked == 503


# -- the connection ------------------------------------------------------------------------------------------------


async def test_a_server_with_keys_shows_nothing_before_it_has_one(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_keys=[USER]) as server, watched(browser, server.url) as seen:
        seen.allowed = ["401 (Unauthorized)"]
        await expect(seen.page.locator("#key-dialog")).to_be_visible()
        await expect(seen.page.locator("#queue")).to_be_hidden()
        await seen.page.keyboard.type(USER)
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.locator("#link-text")).to_have_text("live")
        await expect(seen.page.locator("#queue")).to_be_visible()


@asynccontextmanager
async def unheard(server: SpeechServer) -> AsyncIterator[None]:
    """The server ends every stream and takes no new ones until the block ends."""
    server.runtime.feed.close()
    yield
    server.runtime.feed.closed = False


async def test_after_a_break_the_page_goes_on_and_has_missed_nothing(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url) as seen:
        seen.allowed = ["503 (Service Unavailable)"]
        page = seen.page
        await ask(server, "before")
        await expect(page.locator("#readout")).to_contain_text("1 request for 1 model")
        resumed: list[str] = []
        page.on("request", lambda request: resumed.append(request.headers.get("last-event-id", "")))
        async with unheard(server):
            await expect(page.locator("#link-text")).to_have_text("not connected")
            await expect(page.locator("#banner-text")).to_contain_text("The server cannot be heard")
            await ask(server, "meanwhile")
        await expect(page.locator("#link-text")).to_have_text("live")
        await expect(page.locator("#readout")).to_contain_text("2 requests for 1 model")
        await expect(page.locator("#banner")).to_be_hidden()
        assert server.runtime.feed.position(next(filter(None, resumed))).lost == ""


async def test_a_wait_does_not_count_up_while_the_server_cannot_be_heard(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue:
        await queue.joins("first", "tts")
        async with watched(browser, server.url, clock=True) as seen:
            seen.allowed = ["503 (Service Unavailable)"]
            time = seen.page.locator("#waiters td").nth(2)
            await expect(time).to_have_text(re.compile(r"^\d s$"))
            async with unheard(server):
                await expect(seen.page.locator("#link-text")).to_have_text("not connected")
                before = await time.text_content()
                await seen.page.clock.run_for(20_000)
                await expect(seen.page.locator("#banner-text")).to_contain_text("What you see is 2")
                assert await time.text_content() == before


# -- the playground ------------------------------------------------------------------------------------------------


async def test_a_chat_streams(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url) as seen:
        gate = server.swapper.hold("qwen", after=400)
        await expect(seen.page.locator("#chat-model")).to_have_value("qwen")
        await seen.page.get_by_label("Message").fill("Which trees?")
        await seen.page.keyboard.press("Control+Enter")
        answer = seen.page.locator("#turns li").nth(1).locator("p")
        await gate.reached.wait()
        await expect(answer).not_to_be_empty()
        first = await answer.text_content()
        gate.open()
        await expect(seen.page.locator("#chat-status")).to_contain_text("8 pieces in")
        whole = await answer.text_content()
        assert first is not None
        assert whole is not None
        assert whole.startswith(first)
        assert len(whole) > len(first)
        assert uuid.UUID(server.swapper.requests[-1].headers["X-Request-Id"]).version == 4


async def test_a_chat_sees_its_own_place_in_the_queue(browser: Browser, tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path, leases={"gpu0": {"order": "fifo"}}) as server,
        line(server) as queue,
        watched(browser, server.url) as seen,
    ):
        await queue.joins("before", "tts")
        await expect(seen.page.locator("#chat-model")).to_have_value("qwen")
        await seen.page.get_by_label("Message").fill("Hello")
        await seen.page.get_by_role("button", name="Send").click()
        await expect(seen.page.locator("#chat-status")).to_contain_text("2nd in the queue, for")
        await expect(seen.page.locator("#waiters tr").nth(1)).to_contain_text("you")
        await expect(seen.page.locator("#said")).to_have_text("2nd in the queue")
        await seen.page.locator("#chat-stop").click()
        await expect(seen.page.locator("#chat-status")).to_have_text("Stopped.")
        await expect(seen.page.locator("#waiters tr")).to_have_count(1)


async def test_an_error_of_the_server_is_shown_and_the_message_is_not_lost(browser: Browser, tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path, leases={"gpu0": {"max_waiting": 0}}) as server,
        line(server) as queue,
        watched(browser, server.url) as seen,
    ):
        seen.allowed = ["429 (Too Many Requests)"]
        await speak(seen.page, "Hello.")
        await expect(seen.page.locator("#speech-status")).to_contain_text("the queue is full")
        await expect(seen.page.get_by_label("Text")).to_have_value("Hello.")
        queue.gate.open()


async def speak(page: Page, text: str) -> None:
    await expect(page.locator("#speech-model")).to_have_value("tts")
    await page.get_by_label("Text").fill(text)
    await page.get_by_role("button", name="Speak").click()


async def test_speech_is_heard_while_it_is_still_being_made(browser: Browser, tmp_path: Path) -> None:
    voice = FakeSpeech()
    gate = voice.hold(at=60)
    words = "a" * 100
    async with speech_server(tmp_path, voice=voice) as server, watched(browser, server.url) as seen:
        await speak(seen.page, words)
        wave = seen.page.locator("#wave")
        await asyncio.to_thread(gate.reached.wait)
        await heard(seen.page, lambda at: at > 0.5)  # the audio clock runs, and the synthesis stands at the gate
        gate.open()
        await expect(seen.page.locator("#speech-status")).to_contain_text("Spoken: 2.0 s of 2.0 s")
        assert await wave.get_attribute("data-scheduled") == f"{len(words) * 480 / 24000:.3f}"
        assert int(await wave.get_attribute("data-pieces") or 0) > 1


async def heard(page: Page, enough: Callable[[float], bool]) -> None:
    """Wait until so many seconds of audio have been heard."""
    while not enough(float(await page.locator("#wave").get_attribute("data-heard") or 0)):
        await page.evaluate("() => new Promise(requestAnimationFrame)")


async def test_the_voice_and_the_speed_are_sent(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url) as seen:
        await expect(seen.page.locator("#speech-model")).to_have_value("tts")
        await seen.page.get_by_label("Speed").fill("1.5")
        await expect(seen.page.locator("#speech-voice option")).to_have_count(3)
        await seen.page.get_by_label("Voice").select_option("bruno")
        await speak(seen.page, "Hello.")
        await expect(seen.page.locator("#speech-status")).to_contain_text("Spoken")
        assert [(said.voice, said.speed) for said in server.speech.said] == [("bruno", 1.5)]


async def test_stopping_a_speech_stops_its_making_and_frees_the_gpu(browser: Browser, tmp_path: Path) -> None:
    voice = FakeSpeech()
    gate = voice.hold(at=50)
    async with speech_server(tmp_path, voice=voice) as server, watched(browser, server.url) as seen:
        await speak(seen.page, "a" * 100)
        await asyncio.to_thread(gate.reached.wait)
        await seen.page.locator("#speech-stop").click()
        await expect(seen.page.locator("#speech-status")).to_have_text("Stopped.")
        await expect(seen.page.locator("#headline")).to_have_text("The GPU is free.")
        assert voice.cancelled == 1

"""Making room: models of a swapper, backends in the process, and what goes wrong with them."""

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from backends.errors import BackendUnavailable
from proxy.config import Upstream
from proxy.errors import ModelUnavailable
from proxy.lease import Lease, LeaseSettings
from proxy.line import Mode, Ticket
from proxy.matrix import Matrix
from proxy.residency import Residency, Sets
from proxy.residents import Residents
from tests.fakes import FakeSpeech, FakeSwapper
from tests.proxy.lines import settle

MODELS = {"q": "swap", "v": "swap", "e": "swap", "far": "other", "voice": "voice", "song": "song"}
RULES = Residency([Sets(Matrix({"all": "(q | v) & e"}, {}, {}), [])], matrix=Matrix({"s": "voice & q & e"}, {}, {}))


class Server:
    """The part of llama-swap that unloads. `lingers`: looks for which an unloaded model is still shown."""

    def __init__(self, *running: str) -> None:
        self.running = dict.fromkeys(running, 0)
        self.lingers = 0
        self.status = 200
        self.looks = 0
        self.enough = 1
        self.looked = asyncio.Event()  # `enough` times
        self.unloaded: list[str] = []
        self.keys: set[str | None] = set()
        self.gate: asyncio.Event | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/running", self._running)
        app.router.add_post("/api/models/unload/{model}", self._unload)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _running(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.looks == self.enough:
            self.looked.set()
        self.keys.add(request.headers.get("Authorization"))
        if self.gate is not None:
            await self.gate.wait()
        for model, left in list(self.running.items()):
            if left == 1:
                del self.running[model]
            elif left:
                self.running[model] -= 1
        return web.json_response({"running": [{"model": model, "state": "ready"} for model in self.running]})

    async def _unload(self, request: web.Request) -> web.Response:
        if self.status == 200:
            model = request.match_info["model"]
            self.unloaded.append(model)
            self.running[model] = self.lingers + 1
        return web.Response(status=self.status)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


def residents(
    client: aiohttp.ClientSession,
    server: Server | FakeSwapper,
    *backends: FakeSpeech,
    rules: Residency | None = RULES,
    lease: Lease | None = None,
    other: Server | None = None,
) -> Residents:
    subject = Residents(client)
    upstreams = {"swap": Upstream(url=server.url, api_key="secret", load_timeout=0.5)}
    if other is not None:
        upstreams["other"] = Upstream(url=other.url)
    subject.configure(rules, upstreams, {b.name: b for b in backends}, MODELS.get, lease)
    return subject


def ticket(model: str, mode: Mode = Mode.READ) -> Ticket:
    return Ticket("t", model, "g", mode)


def speech(model: str = "voice") -> Ticket:
    return ticket(model, Mode.WRITE)


async def test_a_backend_is_loaded_for_its_ticket(client: aiohttp.ClientSession, server: Server) -> None:
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice, rules=None)
    await subject.prepare(speech())
    await subject.prepare(speech())
    assert voice.loads == 1
    assert server.looks == 0


async def test_what_excludes_a_backend_is_unloaded_before_it_is_loaded(client: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q", "v", "e"], matrix="(q | v) & e") as fake:
        async with client.post(f"{fake.url}/v1/chat/completions", json={"model": "v", "messages": []}) as answer:
            assert answer.status == 200
        async with client.post(f"{fake.url}/v1/embeddings", json={"model": "e", "input": "x"}) as answer:
            assert answer.status == 200
        voice = FakeSpeech("voice")
        await residents(client, fake, voice).prepare(speech())
        assert fake.resident == {"e"}
        assert voice.loaded


async def test_room_is_made_when_the_server_does_not_show_the_model_any_more(
    client: aiohttp.ClientSession, server: Server
) -> None:
    server.running = {"v": 0}
    server.lingers = 3
    voice = FakeSpeech("voice")
    await residents(client, server, voice).prepare(speech())
    assert server.unloaded == ["v"]
    assert server.looks == 1 + 4
    assert not server.running
    assert server.keys == {"Bearer secret"}


async def test_a_backend_is_unloaded_before_what_it_excludes_is_asked_for(
    client: aiohttp.ClientSession, server: Server
) -> None:
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice)
    await subject.prepare(speech())
    await subject.prepare(ticket("q"))
    assert voice.loaded, "they go together"
    await subject.prepare(ticket("v"))
    assert not voice.loaded


async def test_one_backend_makes_room_for_another(client: aiohttp.ClientSession, server: Server) -> None:
    voice, song = FakeSpeech("voice"), FakeSpeech("song")
    rules = Residency(matrix=Matrix({"s": "voice | song"}, {}, {}))
    subject = residents(client, server, voice, song, rules=rules)
    await subject.prepare(speech("voice"))
    await subject.prepare(speech("song"))
    assert (voice.loaded, song.loaded) == (False, True)


async def test_while_a_room_stays_no_server_is_asked(client: aiohttp.ClientSession, server: Server) -> None:
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice)
    await subject.prepare(speech())
    looks = server.looks
    for model in ("e", "voice", "q", "e", "voice"):
        await subject.prepare(ticket(model))
    assert server.looks == looks


async def test_a_model_asked_for_since_is_known_to_be_in_the_way(client: aiohttp.ClientSession, server: Server) -> None:
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice)
    await subject.prepare(speech())
    await subject.prepare(ticket("v"))
    server.running["v"] = 0
    await subject.prepare(speech())
    assert server.unloaded == ["v"]


async def test_two_servers_on_one_card_make_room_for_each_other(client: aiohttp.ClientSession, server: Server) -> None:
    other = Server("far")
    await other.start()
    rules = Residency(matrix=Matrix({"s": "q | far"}, {}, {}))
    subject = residents(client, server, rules=rules, other=other)
    await subject.prepare(ticket("q"))
    assert other.unloaded == ["far"]
    assert server.looks == 0, "a swapper sees to its own models"
    await other.stop()


async def test_what_is_in_use_beside_everything_is_never_unloaded(
    client: aiohttp.ClientSession, server: Server
) -> None:
    server.running = {"e": 0, "v": 0}
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice, rules=Residency(matrix=Matrix({"s": "voice | v | e"}, {}, {})))
    await subject.prepare(ticket("e", Mode.NONE))
    await subject.prepare(speech())
    assert server.unloaded == ["v"]


async def test_what_others_hold_is_not_unloaded(client: aiohttp.ClientSession, server: Server) -> None:
    """Any two of three: the one that is not held goes."""
    rules = Residency(matrix=Matrix({"s": "q & v | q & voice | v & voice"}, {}, {}))
    voice = FakeSpeech("voice")
    lease = Lease("gpu0", LeaseSettings(), residency=rules)
    subject = residents(client, server, voice, rules=rules, lease=lease)
    for held, unloaded in (("q", ["v"]), ("v", ["v", "q"])):
        voice.unload()
        server.running = {"q": 0, "v": 0}
        await subject.correct()
        async with lease.hold(id="1", model=held, group="g", mode=Mode.READ):
            await subject.prepare(ticket("voice"))
        assert server.unloaded == unloaded


@pytest.mark.parametrize("status", [404, 500])
async def test_an_unload_that_fails_is_an_error_of_that_ticket_and_blocks_nobody(
    client: aiohttp.ClientSession, server: Server, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.running = {"v": 0}
    server.status = status
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice)
    lease = Lease("gpu0", LeaseSettings(), residency=RULES, prepare=subject.prepare)
    with pytest.raises(ModelUnavailable, match=f"'v' at the upstream 'swap' could not be unloaded.*{status}"):
        async with lease.hold(id="1", model="voice", group="g", mode=Mode.WRITE):
            pass
    assert not voice.loaded
    assert "no room for model=voice" in caplog.text
    async with lease.hold(id="2", model="q", group="g", mode=Mode.READ):
        pass
    server.status = 200
    async with lease.hold(id="3", model="voice", group="g", mode=Mode.WRITE):
        assert voice.loaded


async def test_a_model_that_does_not_go_is_an_error_after_a_while(
    client: aiohttp.ClientSession, server: Server
) -> None:
    server.running = {"v": 0}
    server.lingers = 1_000_000
    with pytest.raises(ModelUnavailable, match="no answer in time"):
        await residents(client, server, FakeSpeech("voice")).prepare(speech())


async def test_a_server_that_cannot_say_what_is_resident_is_an_error_of_who_needs_to_know(
    client: aiohttp.ClientSession, server: Server
) -> None:
    await server.stop()
    subject = residents(client, server, FakeSpeech("voice"))
    await subject.prepare(ticket("q"))
    with pytest.raises(ModelUnavailable, match="'swap' does not say what is resident"):
        await subject.prepare(speech())


async def test_a_backend_that_cannot_be_loaded_is_an_error_of_that_ticket(
    client: aiohttp.ClientSession, server: Server
) -> None:
    voice = FakeSpeech("voice")
    voice.fail_load = "weights.bin is missing"
    with pytest.raises(ModelUnavailable, match=r"'voice' cannot run: weights\.bin is missing"):
        await residents(client, server, voice).prepare(speech())


class Stubborn(FakeSpeech):
    """Cannot be unloaded."""

    def unload(self) -> None:
        raise BackendUnavailable("the device is gone")


async def test_a_backend_that_cannot_be_unloaded_is_an_error_of_who_needs_the_room(
    client: aiohttp.ClientSession, server: Server
) -> None:
    subject = residents(client, server, Stubborn("voice"))
    await subject.prepare(speech())
    with pytest.raises(ModelUnavailable, match="could not be unloaded to make room: the device is gone"):
        await subject.prepare(ticket("v"))


class Slow(FakeSpeech):
    """Loads when it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def load(self) -> None:
        asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop).result()
        super().load()


async def test_a_cancelled_load_is_waited_for(client: aiohttp.ClientSession, server: Server) -> None:
    voice = Slow("voice")
    subject = residents(client, server, voice, rules=None)
    task = asyncio.create_task(subject.prepare(speech()))
    await settle()
    task.cancel()
    await settle()
    assert not task.done()
    voice.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert voice.loaded


async def test_those_who_enter_together_make_room_once(client: aiohttp.ClientSession, server: Server) -> None:
    voice = FakeSpeech("voice")
    subject = residents(client, server, voice)
    await subject.prepare(speech())
    await asyncio.gather(*(subject.prepare(ticket("v")) for _ in range(5)))
    assert voice.unloads == 1


# Following the truth


async def test_what_is_resident_is_corrected_while_nobody_holds(client: aiohttp.ClientSession, server: Server) -> None:
    server.running = {"v": 0}
    voice = FakeSpeech("voice")
    voice.load()
    lease = Lease("gpu0", LeaseSettings(), residency=RULES)
    subject = residents(client, server, voice, lease=lease)
    server.enough = 2
    watch = asyncio.create_task(subject.watch(every=0.001))
    await server.looked.wait()
    assert lease.snapshot().resident == ("v", "voice")
    watch.cancel()


async def test_what_is_resident_is_not_corrected_by_an_answer_that_somebody_overtook(
    client: aiohttp.ClientSession, server: Server
) -> None:
    server.running = {"v": 0}
    server.gate = asyncio.Event()
    lease = Lease("gpu0", LeaseSettings(), residency=RULES)
    subject = residents(client, server, lease=lease)
    look = asyncio.create_task(subject.correct())
    await server.looked.wait()
    async with lease.hold(id="1", model="q", group="g", mode=Mode.READ):
        await subject.prepare(ticket("q"))
        server.gate.set()
        await look
    assert lease.snapshot().resident == ("q",)
    voice = FakeSpeech("voice")
    subject.configure(
        Residency(matrix=Matrix({"s": "q | voice"}, {}, {})),
        {"swap": Upstream(url=server.url, api_key="secret", load_timeout=0.5)},
        {"voice": voice},
        MODELS.get,
        lease,
    )
    server.running["q"] = 0
    await subject.prepare(speech())
    assert "q" in server.unloaded, "what was asked for while the answer was on its way is not forgotten"


async def test_a_server_that_does_not_answer_leaves_what_the_grants_say(
    client: aiohttp.ClientSession, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await server.stop()
    lease = Lease("gpu0", LeaseSettings(), residency=RULES)
    async with lease.hold(id="1", model="q", group="g", mode=Mode.READ):
        pass
    await residents(client, server, lease=lease).correct()
    assert lease.snapshot().resident == ("q",)
    assert not caplog.records

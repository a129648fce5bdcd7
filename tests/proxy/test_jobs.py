import asyncio
import json
import time
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any
from wave import open as open_wav

import aiohttp
import pytest

from backends.audio import to_pcm
from proxy.config import Config
from proxy.job_store import Job, JobSpec, JobStore, StoreInUse
from tests.backends.readers import all_readers
from tests.fakes import FakeSpeech, FakeSwapper, Gate, spoken
from tests.fakes.answers import speech as upstream_speech
from tests.fakes.speech import SpeechGate
from tests.proxy.speech_server import SpeechServer, speech_server

JOBS = "/v1/audio/speech/jobs"
THREE = "One. Two. Three."
SENTENCE_EACH = {"job_slice": 0.001}  # a slice is full after every sentence


def pcm(*pieces: str) -> bytes:
    return b"".join(to_pcm(spoken(piece)) for piece in pieces)


async def submit(server: SpeechServer, text: str = THREE, **fields: Any) -> dict[str, Any]:
    body = {"model": "tts", "input": text, "response_format": "pcm", **fields}
    async with server.client.post(JOBS, json=body) as reply:
        assert reply.status == 202, await reply.text()
        job: dict[str, Any] = await reply.json()
        assert reply.headers["Location"] == f"{JOBS}/{job['id']}"
        return job


async def events(server: SpeechServer, id: str) -> AsyncIterator[dict[str, Any]]:
    async with server.client.get(f"{JOBS}/{id}/events") as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        async for line in reply.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def ended(server: SpeechServer, id: str) -> dict[str, Any]:
    """The job once it is over."""
    async for event in events(server, id):
        if event["job"]["status"] in ("done", "failed", "cancelled"):
            job: dict[str, Any] = event["job"]
            return job
    raise AssertionError("the events ended before the job")


async def audio(server: SpeechServer, id: str, query: str = "") -> bytes:
    async with server.client.get(f"{JOBS}/{id}/audio{query}") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.read()


async def reached(gate: SpeechGate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, 30)


async def holders(server: SpeechServer) -> list[str]:
    return [holder["id"] for holder in (await server.json("GET", "/lease"))["leases"]["gpu0"]["holders"]]


async def waiters(server: SpeechServer) -> list[str]:
    return [waiter["id"] for waiter in (await server.json("GET", "/lease"))["leases"]["gpu0"]["waiting"]]


async def chat(server: SpeechServer) -> tuple[aiohttp.ClientResponse, Gate]:
    """A chat stream that has begun and holds the lease until its gate is opened and the rest is read."""
    gate = server.swapper.hold("qwen", after=1)
    body = {"model": "qwen", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    return await server.client.post("/v1/chat/completions", json=body), gate


def files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


def counted(server: SpeechServer, series: str) -> float:
    """The value of one series, written as on the metrics page without the prefix; 0 where there is none."""
    lines = server.runtime.metrics.render()[0].decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"llama_lease_{series} ")), 0.0)


# -- the life of a job ---------------------------------------------------------------------------------------------


async def test_a_job_is_queued_then_runs_then_is_done(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold(piece=2)
        job = await submit(server)
        assert (job["status"], job["position"], job["started_at"], job["error"]) == ("queued", 1, None, None)
        await reached(gate)
        job = await server.json("GET", f"{JOBS}/{job['id']}")
        assert job["status"] == "running"
        assert job["created_at"] <= job["started_at"] <= time.time()
        assert job["progress"] == {"sentences_done": 1, "sentences_total": 3, "audio_seconds": 0.08}
        gate.open()
        job = await ended(server, job["id"])
        assert (job["status"], job["position"]) == ("done", None)
        assert job["progress"] == {"sentences_done": 3, "sentences_total": 3, "audio_seconds": 0.28}
        assert job["expires_at"] == pytest.approx(job["ended_at"] + 86400, abs=1)
        assert job["usage"] == {"input_tokens": 3, "output_tokens": 14, "total_tokens": 17}
        assert await audio(server, job["id"]) == pcm("One.", "Two.", "Three.")
        assert await server.lease_is_free()


async def test_it_is_running_only_while_it_holds_the_lease(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech=SENTENCE_EACH) as server:
        reply, gate = await chat(server)
        job = await submit(server)
        while job["id"] not in await waiters(server):
            assert job["id"] not in await holders(server)
        assert (await server.json("GET", f"{JOBS}/{job['id']}"))["status"] == "queued"
        gate.open()
        await reply.read()
        seen = [event["job"]["status"] async for event in events(server, job["id"])]
        assert set(seen) <= {"queued", "running", "done"}
        assert seen[-1] == "done"


async def test_chat_gets_its_turn_between_two_slices(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech=SENTENCE_EACH, leases={"gpu0": {"order": "fifo"}}) as server:
        gate = server.speech.hold(piece=2)
        job = await submit(server)
        await reached(gate)  # the job holds the lease for its second slice
        body = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}
        asking = asyncio.create_task(server.json("POST", "/v1/chat/completions", json=body))
        while len(await waiters(server)) != 1:
            assert not asking.done()
        third = server.speech.hold(piece=3)
        gate.open()
        assert (await asking)["choices"]
        await reached(third)  # only now the third slice
        assert (await server.json("GET", f"{JOBS}/{job['id']}"))["progress"]["sentences_done"] == 2
        third.open()
        assert (await ended(server, job["id"]))["status"] == "done"


async def test_a_slice_is_as_long_as_the_configuration_says(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech={"job_slice": 0.1}) as server:
        job = await ended(server, (await submit(server, "Aaaa. Bbbb. Cccc. Dddd. Eeee."))["id"])
        assert job["status"] == "done"
        # Sentences of 0.1 s: a slice is one of them.
        assert counted(server, 'lease_hold_seconds_count{lease="gpu0",mode="write",group="speech"}') == 5


async def test_a_speech_request_in_between_does_not_change_the_job(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech=SENTENCE_EACH) as server:
        jobs = [await submit(server, f"Job {n} a. Job {n} b. Job {n} c.") for n in range(4)]
        body = {"model": "tts", "input": "In between.", "response_format": "pcm"}
        async with server.client.post("/v1/audio/speech", json=body) as reply:
            assert await reply.read() == pcm("In between.")
        for n, job in enumerate(jobs):
            await ended(server, job["id"])
            assert await audio(server, job["id"]) == pcm(f"Job {n} a.", f"Job {n} b.", f"Job {n} c.")
        assert server.speech.most_active == 1


async def test_a_failed_sentence_fails_the_job_and_keeps_what_was_made(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        server.speech.fail_at = {2}
        job = await ended(server, (await submit(server))["id"])
        assert job["status"] == "failed"
        assert set(job["error"]) == {"message", "type", "param", "code"}
        status, error = await server.error("GET", f"{JOBS}/{job['id']}/audio")
        assert (status, error["code"]) == (500, "job_failed")
        assert await audio(server, job["id"], "?partial=true") == pcm("One.")
        assert await server.lease_is_free()


async def test_delete_cancels_a_running_job_and_frees_the_lease(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold(piece=2)
        job = await submit(server)
        await reached(gate)
        assert (await server.json("DELETE", f"{JOBS}/{job['id']}"))["status"] == "cancelled"
        assert await server.lease_is_free()
        assert (server.speech.active, server.speech.cancelled) == (0, 1)
        assert (await server.error("GET", f"{JOBS}/{job['id']}/audio"))[0] == 400
        assert (await server.json("GET", f"{JOBS}/{job['id']}"))["status"] == "cancelled"


async def test_delete_cancels_a_waiting_job(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reply, gate = await chat(server)
        job = await submit(server)
        assert (await server.json("DELETE", f"{JOBS}/{job['id']}"))["status"] == "cancelled"
        assert await waiters(server) == []
        gate.open()
        await reply.read()
        assert server.speech.started == 0


async def test_delete_forgets_a_job_that_is_over(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        job = await ended(server, (await submit(server))["id"])
        assert files(tmp_path, "jobs/*.pcm")
        assert (await server.json("DELETE", f"{JOBS}/{job['id']}"))["deleted"]
        assert not files(tmp_path, "jobs/*.pcm")
        assert (await server.error("GET", f"{JOBS}/{job['id']}"))[0] == 404


async def test_an_administrator_cancels_it_like_any_ticket(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold(piece=2)
        job = await submit(server)
        await reached(gate)
        await server.json("DELETE", f"/lease/{job['id']}")
        assert (await ended(server, job["id"]))["status"] == "cancelled"


async def test_a_full_queue_and_a_long_wait_do_not_end_a_job(tmp_path: Path) -> None:
    lease = {"gpu0": {"max_waiting": 1, "max_wait": 0.05}}
    async with speech_server(tmp_path, leases=lease) as server:
        reply, gate = await chat(server)
        first, second = await submit(server), await submit(server)
        while not all(
            counted(server, f'queue_rejected_total{{lease="gpu0",reason="{why}"}}') for why in ("full", "timeout")
        ):
            await server.json("GET", "/health")
        gate.open()
        await reply.read()
        assert (await ended(server, first["id"]))["status"] == "done"
        assert (await ended(server, second["id"]))["status"] == "done"


async def test_results_expire(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech={"job_ttl": 0.5}) as server:
        job = await ended(server, (await submit(server))["id"])
        while True:
            async with server.client.get(f"{JOBS}/{job['id']}") as reply:
                if reply.status == 404:
                    break
            await asyncio.sleep(0.05)
        assert not files(tmp_path, "jobs/*.pcm")


# -- audio and events ----------------------------------------------------------------------------------------------


async def test_audio_follows_the_job_while_it_runs(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold(piece=2)
        job = await submit(server)
        async with server.client.get(f"{JOBS}/{job['id']}/audio") as reply:
            assert reply.headers["Transfer-Encoding"] == "chunked"
            first = pcm("One.")
            assert await reply.content.readexactly(len(first)) == first
            gate.open()
            assert await reply.read() == pcm("Two.", "Three.")


async def test_audio_of_a_job_that_fails_is_cut(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold(piece=2)
        server.speech.fail_at = {2}
        job = await submit(server)
        async with server.client.get(f"{JOBS}/{job['id']}/audio") as reply:
            await reply.content.readexactly(len(pcm("One.")))
            gate.open()
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
@pytest.mark.parametrize("speed", [1.0, 4.0])
async def test_a_jobs_audio_opens_in_every_format_and_speed(format: str, speed: float, tmp_path: Path) -> None:
    async with speech_server(tmp_path, FakeSpeech(samples=4800)) as server:
        job = await submit(server, response_format=format, speed=speed)
        await ended(server, job["id"])
        for reader, (samples, rate) in all_readers(format, await audio(server, job["id"])).items():
            assert samples.size / rate == pytest.approx(14 * 0.2 / speed, abs=0.1), reader


@pytest.mark.parametrize("speed", [1.0, 4.0])
async def test_the_wav_of_a_finished_job_has_exact_sizes(speed: float, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        job = await submit(server, response_format="wav", speed=speed)
        await ended(server, job["id"])
        async with server.client.get(f"{JOBS}/{job['id']}/audio") as reply:
            data = await reply.read()
            assert reply.headers["Content-Length"] == str(len(data))
        with open_wav(BytesIO(data)) as file:
            assert 2 * file.getnframes() == len(data) - 44
        if speed == 1.0:
            assert data[44:] == pcm("One.", "Two.", "Three.")


async def test_events_tell_every_step(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reply, gate = await chat(server)
        job = await submit(server)
        told = []
        async for event in events(server, job["id"]):
            told.append((event["type"], event["job"]["status"], event["job"]["progress"]["sentences_done"]))
            gate.open()
        await reply.read()
        assert told[0] == ("audio.speech.job.updated", "queued", 0)
        assert ("audio.speech.job.updated", "running", 1) in told
        assert told[-1] == ("audio.speech.job.done", "done", 3)


async def test_events_of_a_job_that_is_over_are_its_end(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        job = await ended(server, (await submit(server))["id"])
        assert [event["type"] async for event in events(server, job["id"])] == ["audio.speech.job.done"]


# -- who may see what ----------------------------------------------------------------------------------------------


async def test_keys_see_only_their_own_jobs(tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_keys=["mine", "theirs"]) as server:
        job = await ended(server, (await submit(server))["id"])
        other = {"Authorization": "Bearer theirs"}
        assert (await server.json("GET", JOBS, headers=other))["data"] == []
        for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/audio"), ("GET", "/events")]:
            assert (await server.error(method, f"{JOBS}/{job['id']}{path}", headers=other))[0] == 404
        assert [entry["id"] for entry in (await server.json("GET", JOBS))["data"]] == [job["id"]]
        assert (await server.error("GET", JOBS, headers={"Authorization": "Bearer wrong"}))[0] == 401


async def test_the_list_is_newest_first_and_pages(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        ids = [(await submit(server, f"Number {n}."))["id"] for n in range(5)]
        page = await server.json("GET", f"{JOBS}?limit=3")
        assert ([entry["id"] for entry in page["data"]], page["has_more"]) == ([ids[4], ids[3], ids[2]], True)
        page = await server.json("GET", f"{JOBS}?limit=3&after={ids[2]}")
        assert ([entry["id"] for entry in page["data"]], page["has_more"]) == ([ids[1], ids[0]], False)
        assert (await server.error("GET", f"{JOBS}?limit=0"))[1]["param"] == "limit"


async def test_a_key_has_a_limited_number_of_unfinished_jobs(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech={"max_jobs": 1}, api_keys=["mine", "theirs"]) as server:
        gate = server.speech.hold()
        job = await submit(server)
        body = {"model": "tts", "input": "More."}
        async with server.client.post(JOBS, json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "60")
        other = await server.json("POST", JOBS, json=body, headers={"Authorization": "Bearer theirs"})
        assert other["status"] == "queued"
        gate.open()
        await ended(server, job["id"])
        await submit(server)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": "..."}, 400, None),
        ({"voice": "nobody"}, 400, "voice"),
        ({"speed": 5}, 400, "speed"),
        ({"model": "nothing"}, 404, "model"),
        ({"model": 5}, 400, "model"),
    ],
)
async def test_a_bad_job_is_refused_at_once(fields: Any, status: int, param: str | None, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        body = {"model": "tts", "input": THREE, **fields}
        if param is None:  # the fake voice can say anything but white space
            body["input"] = "  "
        refused, error = await server.error("POST", JOBS, json=body)
        assert refused == status
        assert error["param"] == (param or "input")
        assert (await server.json("GET", JOBS))["data"] == []


@pytest.mark.parametrize("path", ["/nothing", "/..%2F..%2Fetc%2Fpasswd", "/nothing/audio", "/nothing/events"])
async def test_an_unknown_job_is_404(path: str, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        assert (await server.error("GET", JOBS + path))[0] == 404


# -- a model at an upstream ----------------------------------------------------------------------------------------


async def test_a_job_for_an_upstream_is_forwarded_slice_by_slice_under_the_write_lease(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech={"job_slice": 0.5}) as server:
        job = await submit(server, "The first. The second. The third.", model="far", voice="alba", exaggeration=0.7)
        job = await ended(server, job["id"])
        assert (job["status"], job["model"]) == ("done", "chatter")
        sent = [json.loads(request.body) for request in server.swapper.requests if request.method == "POST"]
        assert [body["input"] for body in sent] == ["The first.", "The second.", "The third."]
        assert all(body["model"] == "chatter" and body["exaggeration"] == 0.7 for body in sent)
        assert all((body["voice"], body["response_format"]) == ("alba", "wav") for body in sent)
        made = 0
        for body in sent:
            with open_wav(BytesIO(upstream_speech("chatter", body["input"]))) as file:
                made += file.getnframes() * 24000 // file.getframerate()
        assert len(await audio(server, job["id"])) // 2 == pytest.approx(made, abs=10)


async def test_an_upstream_that_fails_fails_the_job(tmp_path: Path) -> None:
    swapper = FakeSwapper(["qwen"])  # it does not know "chatter"
    async with speech_server(tmp_path, swapper=swapper) as server:
        job = await ended(server, (await submit(server, model="chatter"))["id"])
        assert job["status"] == "failed"
        assert "404" in job["error"]["message"]


# -- the end of the process, and the next ---------------------------------------------------------------------------


async def test_a_job_goes_on_in_the_next_process_after_its_last_finished_sentence(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold(piece=3)
        job = await submit(server)
        await reached(gate)
    async with speech_server(tmp_path) as server:
        job = await ended(server, job["id"])
        assert job["status"] == "done"
        assert [utterance.text for utterance in server.speech.said] == ["Three."]
        assert await audio(server, job["id"]) == pcm("One.", "Two.", "Three.")


async def test_a_sentence_that_was_half_written_is_written_again(tmp_path: Path) -> None:
    spec = JobSpec(("One.", "Two."), "alba", "", 1.0, 1.0, "pcm")
    half = Job("job_1", "", "tts", 1.0, spec, "running", 2.0, None, 1, len(pcm("One.")) // 2)
    store = await JobStore.open(tmp_path / "jobs")
    await store.save(half)
    store.audio(half).write_bytes(pcm("One.") + b"\x55" * 999)
    await store.close()
    async with speech_server(tmp_path) as server:
        job = await ended(server, "job_1")
        assert job["started_at"] == 2
        assert await audio(server, "job_1") == pcm("One.", "Two.")


async def test_a_listener_is_cut_when_the_server_stops(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as client:
        async with speech_server(tmp_path) as server:
            gate = server.speech.hold(piece=2)
            job = await submit(server)
            reply = await client.get(f"{server.url}{JOBS}/{job['id']}/audio")
            await reached(gate)
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()


async def test_a_job_whose_model_has_gone_fails_with_a_reason(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold()
        job = await submit(server)
        await reached(gate)
    groups = {"chat": {"mode": "read", "models": ["qwen"], "upstream": "swapper"}}
    async with speech_server(tmp_path, groups=groups, aliases={}) as server:
        job = await ended(server, job["id"])
        assert job["status"] == "failed"
        assert "tts" in job["error"]["message"]


async def test_a_job_whose_model_is_taken_out_while_it_waits_can_still_be_looked_at(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reply, gate = await chat(server)
        job = await submit(server)
        without = server.runtime.config.model_dump() | {"aliases": {}}
        without["groups"] = {"chat": without["groups"]["chat"]}
        server.runtime.apply(Config.model_validate(without))
        shown = await server.json("GET", f"{JOBS}/{job['id']}")
        assert (shown["status"], shown["position"]) == ("queued", None)
        gate.open()
        await reply.read()
        assert (await ended(server, job["id"]))["status"] == "failed"


async def test_without_jobs_nothing_is_written(tmp_path: Path) -> None:
    async with speech_server(tmp_path):
        pass
    assert not files(tmp_path, "*")


async def test_two_servers_do_not_work_on_the_same_jobs(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as first:
        await ended(first, (await submit(first))["id"])
        async with speech_server(tmp_path) as second:
            status, error = await second.error("GET", JOBS)
            assert (status, error["code"]) == (503, "jobs_unavailable")
            assert (await second.json("GET", "/health"))["status"] == "ok"


async def test_a_store_is_opened_once(tmp_path: Path) -> None:
    store = await JobStore.open(tmp_path)
    with pytest.raises(StoreInUse):
        await JobStore.open(tmp_path)
    await store.close()
    await (await JobStore.open(tmp_path)).close()


async def test_a_folder_that_cannot_be_written_is_an_error_of_jobs_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("in the way")
    async with speech_server(tmp_path) as server:
        status, error = await server.error("POST", JOBS, json={"model": "tts", "input": "Hello."})
        assert (status, error["code"]) == (503, "jobs_unavailable")

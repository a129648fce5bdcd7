"""The page's modules that know no document: what is known of tickets, how bars are packed, how streams are cut."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page

from tests.end_to_end.watched import chromium, watched
from tests.proxy.speech_server import speech_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORY = """
  const { State, segments, phase, failed, waited } = await import("/lease/ui/state.js");
  const NOW = 1000;
  const state = new State(() => NOW);
  const told = (kind, more = {}) => ({ kind, at: more.at ?? 900, lease: "gpu0", ticket: 1, request: "r1", model: "qwen",
    group: "chat", mode: "read", arrived: 900, ...more });
  const QUEUED = told("queued");
  const GRANTED = told("granted", { at: 910, granted: 910, swap: true, overtook: false });
  const OPENED = told("opened", { at: 925, granted: 910, swap: true, overtook: false, opened: 925 });
  const RELEASED = told("released", { at: 940, granted: 910, swap: true, overtook: false, opened: 925, reason: "done" });
  const body = (last, more = {}) => ({ now: NOW, version: "1", stopping: false, events: { last: `run-${last}`, since: 400 },
    leases: { gpu0: { holders: [], waiting: [], ...more } }, models: [] });
  const HOLDER = { id: "r1", number: 1, model: "qwen", group: "chat", mode: "read", waited: 10, held: 90, opened: true };
  const only = () => [...state.tickets.values()];
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    folder: Path = tmp_path_factory.mktemp("page")
    async with chromium() as browser, speech_server(folder) as server, watched(browser, server.url) as seen:
        yield seen.page


async def run(page: Page, script: str) -> Any:
    return await page.evaluate("async () => {" + script + "}")


async def test_a_ticket_s_events_become_its_life(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """[QUEUED, GRANTED, OPENED, RELEASED].forEach((event, index) => state.apply(event, index + 1));
        return [segments(only()[0], NOW), only()[0].outcome, failed(only()[0]), state.live.size];""",
    )
    assert found == [[["waiting", 900, 910], ["loading", 910, 925], ["streaming", 925, 940]], "done", False, 0]


async def test_a_ticket_without_a_swap_starts_and_does_not_load(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """state.apply(QUEUED, 1); state.apply({ ...GRANTED, swap: false }, 2);
        return [phase(only()[0]), segments(only()[0], NOW)];""",
    )
    assert found == ["starting", [["waiting", 900, 910], ["starting", 910, 1000]]]


async def test_who_is_let_in_while_the_model_loads_loads_too(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """state.apply(QUEUED, 1); state.apply(GRANTED, 2);
        const second = { ticket: 2, request: "r2", arrived: 915 };
        state.apply({ ...QUEUED, ...second, at: 915 }, 3);
        state.apply({ ...GRANTED, ...second, at: 915, granted: 915, swap: false }, 4);
        return only().map(phase);""",
    )
    assert found == ["loading", "loading"]


async def test_a_state_that_is_older_than_an_event_brings_nobody_back(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """[QUEUED, GRANTED, OPENED, RELEASED].forEach((event, index) => state.apply(event, index + 1));
        state.merge(body(3, { holders: [HOLDER] }));
        return [state.live.size, only()[0].outcome];""",
    )
    assert found == [0, "done"]


async def test_a_state_ends_whom_it_does_not_have_any_more(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """state.apply(QUEUED, 1); state.merge(body(1)); const first = only()[0].outcome;
        state.apply(RELEASED, 2); return [first, only()[0].outcome, only()[0].ended];""",
    )
    assert found == ["unknown", "done", 940]


async def test_a_state_does_not_end_whom_it_cannot_know_yet(page: Page) -> None:
    assert await run(page, STORY + "state.apply(QUEUED, 7); state.merge(body(6)); return state.live.size;") == 1


async def test_one_who_is_known_from_a_state_alone_gets_true_times_from_events(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """state.merge(body(3, { holders: [HOLDER] }));
        const guess = { ...only()[0] };
        [QUEUED, GRANTED, OPENED].forEach((event, index) => state.apply(event, index + 1));
        const { arrived, granted, opened, swap } = only()[0];
        return [guess.arrived, guess.granted, phase(guess), arrived, granted, opened, swap, state.tickets.size];""",
    )
    assert found == [900, 910, "streaming", 900, 910, 925, True, 1]


async def test_positions_are_by_arrival(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """for (const ticket of [10, 9, 2]) state.apply({ ...QUEUED, ticket, request: `r${ticket}` }, ticket);
        return state.waiting("gpu0").map((ticket) => ticket.request);""",
    )
    assert found == ["r2", "r9", "r10"]


async def test_what_is_over_for_ten_minutes_is_forgotten_and_who_waits_is_not(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """state.apply({ ...QUEUED, arrived: 1, at: 1 }, 1);
        state.apply({ ...RELEASED, ticket: 2, at: 399 }, 2); state.apply({ ...RELEASED, ticket: 3, at: 401 }, 3);
        state.prune();
        return only().map((ticket) => ticket.order);""",
    )
    assert found == [1, 3]


async def test_those_who_were_refused_by_a_stopping_server_are_told_apart(page: Page) -> None:
    found = await run(
        page,
        STORY
        + """for (const number of [5, 6]) state.apply(told("rejected", { ticket: 0, reason: "shutdown" }), number);
        return only().map((ticket) => [ticket.outcome, failed(ticket)]);""",
    )
    assert found == [["rejected", True]] * 2


async def test_bars_that_overlap_get_rows_of_their_own(page: Page) -> None:
    found = await run(
        page,
        """const { pack } = await import("/lease/ui/timeline.js");
        const bars = [[0, 10], [5, 8], [9, 12], [11, 20]].map(([arrived, ended]) => ({ arrived, ended }));
        const packed = pack(bars, 20, 1);
        return [packed.bars.map(({ row }) => row), packed.rows];""",
    )
    assert found == [[0, 1, 1, 0], 2]


async def test_every_wait_falls_into_one_bucket(page: Page) -> None:
    found = await run(
        page,
        """const { fill } = await import("/lease/ui/waits.js");
        const now = 1000;
        const served = [0, 0.1, 1, 60, 61, 301].map((wait) => ({ arrived: 0, granted: wait, ended: 900 }));
        const others = [{ arrived: 0, granted: null, ended: 4 }, { arrived: 990, granted: null, ended: null }];
        return fill([...served, ...others], now).filter(({ total }) => total > 0)
          .map(({ label, served, gaveUp, still }) => [label, served, gaveUp, still]);""",
    )
    assert found == [
        ["under 0.1 s", 1, 0, 0],
        ["to 1 s", 2, 0, 0],
        ["to 5 s", 0, 1, 0],
        ["to 10 s", 0, 0, 1],
        ["to 1 min", 1, 0, 0],
        ["to 2 min", 1, 0, 0],
        ["over 5 min", 1, 0, 0],
    ]


async def test_a_stream_is_read_the_same_wherever_it_is_cut(page: Page) -> None:
    found = await run(
        page,
        """const { events } = await import("/lease/ui/api.js");
        const bytes = new TextEncoder().encode(
          "retry: 1000\\n\\nalone\\n: alive\\r\\n\\r\\nid: a-1\\nevent: ticket\\ndata: {\\"x\\":\\ndata: \\"\u00fc\\u2028\\"}\\n\\ndata:last\\r\\n\\r\\n");
        const read = async (pieces) => {
          const stream = new ReadableStream({ start(it) { pieces.forEach((piece) => it.enqueue(piece)); it.close(); } });
          const found = [];
          for await (const event of events(new Response(stream))) if (event !== null) found.push(event);
          return JSON.stringify(found);
        };
        const whole = await read([bytes]);
        const cut = new Set();
        for (let at = 0; at <= bytes.length; at += 1) cut.add(await read([bytes.slice(0, at), bytes.slice(at)]));
        cut.add(await read([...bytes].map((byte) => Uint8Array.of(byte))));
        return [JSON.parse(whole), cut.size, cut.has(whole)];""",
    )
    assert found == [
        [
            {"id": "a-1", "event": "ticket", "data": '{"x":\n"ü\u2028"}'},
            {"id": None, "event": "message", "data": "last"},
        ],
        1,
        True,
    ]


async def test_numbers_are_told_in_words(page: Page) -> None:
    found = await run(
        page,
        """const { duration, limit, ordinal, seconds } = await import("/lease/ui/words.js");
        return [[0, 99.9, 100, 3725].map(duration), [0.04, 3.14, 42.9].map(seconds), [30, 90, 600, 7200].map(limit),
          [1, 2, 3, 4, 11, 12, 13, 21, 112].map(ordinal)];""",
    )
    assert found == [
        ["0 s", "99 s", "1 min 40 s", "1 h 02 min"],
        ["0 s", "3.1 s", "42 s"],
        ["30 seconds", "90 seconds", "10 minutes", "2 hours"],
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th"],
    ]

"""The live page by keyboard, for screen readers, on a phone, in dark and light."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.end_to_end.test_page import ask, line
from tests.end_to_end.watched import chromium, watched
from tests.proxy.speech_server import speech_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Contrast as WCAG 2 defines it, of every element that shows text of its own against the nearest opaque background.
CONTRASTS = """() => {
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const light = ({ r, g, b }) => [r, g, b].map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.a === 1) return color;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  return [...document.body.querySelectorAll("*")].filter((element) =>
    element.checkVisibility() && !element.disabled && !element.closest(".unseen, noscript, option")
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()),
  ).map((element) => {
    const style = getComputedStyle(element);
    const [low, high] = [light(parse(style.color)), light(behind(element))].sort((a, b) => a - b);
    return [element.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05)];
  });
}"""

UNNAMED = """() => [...document.querySelectorAll("button, a, input, select, textarea, summary, [role=img], table, dialog")]
  .filter((element) => element.tagName === "DIALOG" || element.checkVisibility())
  .filter((element) => {
    const labels = (element.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id));
    return !(element.getAttribute("aria-label") || labels.some((label) => label?.textContent.trim())
      || [...(element.labels ?? [])].some((label) => label.textContent.trim()) || element.caption
      || element.closest("section[aria-labelledby], [role=region]") && element.tagName === "TABLE"
      || ["BUTTON", "A", "SUMMARY"].includes(element.tagName) && element.textContent.trim());
  }).map((element) => element.outerHTML.slice(0, 80))"""

SMALL = """(least) => [...document.querySelectorAll("button, select, textarea, input, summary")]
  .filter((element) => element.checkVisibility())
  .map((element) => [element.id || element.textContent, element.getBoundingClientRect()])
  .filter(([, box]) => Math.min(box.width, box.height) < least).map(([name, box]) => `${name} ${box.width} x ${box.height}`)"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=15_000)
    async with chromium() as running:
        yield running


async def everything_is_shown(page: Page, rows: int = 3) -> None:
    await expect(page.locator("#waiters tr")).to_have_count(1)
    await expect(page.locator("#holders li")).to_have_count(1)
    await page.locator("#as-table summary").click()
    await expect(page.locator("#rows tr")).to_have_count(rows)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_text_is_readable_in_both_themes_and_fits(
    browser: Browser, tmp_path: Path, dark: bool, width: int
) -> None:
    async with speech_server(tmp_path) as server:
        await ask(server, "before")
        async with line(server) as queue, watched(browser, server.url, dark=dark, width=width) as seen:
            await queue.joins("waits", "tts")
            await everything_is_shown(seen.page)
            contrasts: list[tuple[str, float]] = await seen.page.evaluate(CONTRASTS)
            assert len(contrasts) > 60
            assert [found for found in contrasts if found[1] < 4.5] == []
            assert await seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_shapes_differ_enough_from_the_paper(browser: Browser, tmp_path: Path, dark: bool) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url, dark=dark) as seen:
        await seen.page.evaluate(
            """() => document.body.append(...["streaming", "loading", "waiting", "failed", "edge", "focus"]
              .map((name) => {
                const shape = document.createElement("p");
                shape.textContent = name;
                shape.style.color = `var(--${name})`;
                return shape;
              }))"""
        )
        contrasts: dict[str, float] = dict(await seen.page.evaluate(CONTRASTS))
        assert contrasts["streaming"] > 3
        assert [found for found in contrasts.items() if found[1] < 3] == []


async def test_everything_has_a_name_and_the_page_has_landmarks(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue, watched(browser, server.url) as seen:
        await queue.joins("waits", "tts")
        await everything_is_shown(seen.page, rows=2)
        assert await seen.page.evaluate(UNNAMED) == []
        levels: list[int] = await seen.page.evaluate(
            "() => [...document.querySelectorAll('main :is(h1, h2, h3)')].map((heading) => +heading.tagName[1])"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        for landmark in ("banner", "main", "contentinfo"):
            await expect(seen.page.get_by_role(landmark)).to_have_count(1)  # type: ignore[arg-type]
        for name in ("Queue", "Playground", "The last ten minutes", "How long they waited", "The rules here"):
            await expect(seen.page.get_by_role("region", name=name, exact=True)).to_have_count(1)


async def test_the_timeline_says_in_words_what_it_shows(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        await ask(server, "one")
        async with watched(browser, server.url) as seen:
            picture = seen.page.get_by_role(
                "img", name="Timeline of the last ten minutes: 1 request for 1 model, 0 swaps"
            )
            await expect(picture).to_be_visible()


async def test_only_one_quiet_region_is_read_out(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, watched(browser, server.url) as seen:
        live: list[Any] = await seen.page.evaluate(
            "() => [...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')]"
            ".map((element) => [element.id, element.ariaLive])"
        )
        assert live == [["said", "polite"]]


async def test_it_can_be_used_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue, watched(browser, server.url) as seen:
        page = seen.page
        asked = await queue.joins("waits", "tts")
        await expect(page.locator("#waiters tr")).to_have_count(1)
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the queue")).to_be_focused()
        assert await visible_focus(page)
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("button", name="Cancel the request for tts")).to_be_focused()
        assert await visible_focus(page)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Keep it")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name="Cancel the request for tts")).to_be_focused()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        assert await asked == 503
        await expect(page.locator("#queue")).to_be_focused()  # and not lost with the row


async def visible_focus(page: Page) -> bool:
    shown: bool = await page.evaluate(
        """() => {
          const style = getComputedStyle(document.activeElement);
          return style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2;
        }"""
    )
    return shown


async def test_a_focused_row_keeps_the_focus_while_the_queue_moves(browser: Browser, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, line(server) as queue, watched(browser, server.url) as seen:
        await queue.joins("first", "tts")
        await queue.joins("second", "chatter")
        await expect(seen.page.locator("#waiters tr")).to_have_count(2)
        await seen.page.locator("#waiters button").nth(1).focus()
        server.runtime.leases["gpu0"].cancel("first")
        await expect(seen.page.locator("#waiters tr")).to_have_count(1)
        await expect(seen.page.get_by_role("button", name="Cancel the request for chatter, 1st")).to_be_focused()


async def test_targets_are_large_enough_for_a_finger(browser: Browser, tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path) as server,
        line(server) as queue,
        watched(browser, server.url, width=390) as seen,
    ):
        await queue.joins("waits", "tts")
        await everything_is_shown(seen.page, rows=2)
        assert await seen.page.evaluate(SMALL, 24) == []

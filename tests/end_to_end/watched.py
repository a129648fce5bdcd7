"""Chromium with an eye on it: what it asks for, what it complains about."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watched:
    """A page and what went on in it. `allowed`: parts of console errors that a story is about."""

    page: Page
    allowed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@asynccontextmanager
async def watched(
    browser: Browser, url: str, *, dark: bool = False, width: int = 1280, clock: bool = False
) -> AsyncIterator[Watched]:
    """The live page of the server at `url`. At the end: no error on the console, nothing asked of another host.

    `clock`: time in the page goes on by itself, and can be moved forward with `page.clock`.
    """
    context = await browser.new_context(
        color_scheme="dark" if dark else "light", viewport={"width": width, "height": 900}
    )
    try:
        page = await context.new_page()
        page.set_default_timeout(10_000)
        seen = Watched(page)
        page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
        if clock:
            await page.clock.install()
        await page.goto(f"{url}/lease/ui")
        yield seen
        assert [error for error in seen.errors if not any(part in error for part in seen.allowed)] == []
        assert seen.hosts == {urlsplit(url).netloc}
    finally:
        await context.close()

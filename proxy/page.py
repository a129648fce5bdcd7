"""The live page's own files, proxy/ui, served as they are under a policy that lets them talk to this server alone.

The page's links are relative, so that it also works behind a proxy that puts a path before ours.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aiohttp import hdrs, web

from proxy.errors import NotFound

FOLDER = Path(__file__).parent / "ui"

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Not the system's table, which on some systems calls a module plain text, and browsers refuse that."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """The files of one folder, read once."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix in TYPES}

    def routes(self) -> Iterator[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """(methods, path, endpoint)."""
        yield "GET HEAD", "/lease/ui", self.index
        yield "GET HEAD", "/lease/ui/{file}", self.file

    async def index(self, request: web.Request) -> web.StreamResponse:
        """The page; under its address with a slash, to which its links are relative."""
        if not request.rel_url.raw_path.endswith("/"):
            return web.Response(status=308, headers={hdrs.LOCATION: "ui/"})
        return self._answer(request, "index.html")

    async def file(self, request: web.Request) -> web.StreamResponse:
        """What the page asks for."""
        return self._answer(request, request.match_info["file"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        body = self._files.get(name)
        if body is None:
            raise NotFound(f"the page has no file {name!r}")
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        headers = {**HEADERS, hdrs.ETAG: tag}
        if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, hdrs.CONTENT_TYPE: TYPES[Path(name).suffix]})

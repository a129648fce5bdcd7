"""Where clients' connections come in, and what is said to those that send no request that can be read."""

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from proxy.app import server_options
from proxy.errors import BadRequest, HeadTooLarge

_LOOK = 0.02  # seconds


class Connection(web.RequestHandler):
    """aiohttp answers in plain text what never becomes a request, and so never comes to the app. Here it is an error
    like any other."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called by aiohttp, which ends the connection behind the answer."""
        plain = super().handle_error(request, status, exc, message)  # its log; raises if an answer has begun
        if not isinstance(exc, HttpProcessingError):
            return plain
        error = BadRequest(f"this cannot be read as HTTP: {exc.message.partition(chr(10))[0].rstrip(':')}")
        if isinstance(exc, LineTooLong):
            error = HeadTooLarge(
                f"the request's first line, or one of its headers, is over {self.max_field_size} bytes"
            )
        response = web.json_response(error.body(), status=error.status, headers={"Connection": "close"})
        response.force_close()
        return response


async def read_out(server: web.Server, until: float) -> bool:
    """Wait, until the loop's time `until` at most, for clients to take what was written to them and waits in their
    connections' buffers; says whether they have."""
    loop = asyncio.get_running_loop()
    while any(
        connection.transport and connection.transport.get_write_buffer_size() for connection in server.connections
    ):
        if loop.time() >= until:
            return False
        await asyncio.sleep(_LOOK)
    return True


async def listen(runner: web.AppRunner, host: str, port: int, *, backlog: int = 128) -> asyncio.Server:
    """Let clients in from now on. The runner was set up with `server_options`; close what is returned before its
    `cleanup`. Raises OSError: the port is taken."""
    server = runner.server
    assert server is not None
    loop = asyncio.get_running_loop()
    options = server_options()
    del options["handler_cancellation"]  # the server's own

    def connection() -> Connection:
        return Connection(server, loop=loop, **options)

    return await loop.create_server(connection, host, port, reuse_address=True, backlog=backlog)

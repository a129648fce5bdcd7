"""Websockets: relayed message by message, both ways, under the lease of the model that they name."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, hdrs, web
from yarl import URL

from proxy.errors import ProxyError, UpstreamError, UpstreamTimeout
from proxy.forward import Upstream
from proxy.headers import sent_headers
from proxy.lease import Hold

logger = logging.getLogger(__name__)

_HANDSHAKE = frozenset(
    ["sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"]
)


ACCEPTED: "web.RequestKey[web.WebSocketResponse]" = web.RequestKey("websocket", web.WebSocketResponse)
"""The client's side, once it has been accepted: no error can have a status any more."""


def asks(request: web.BaseRequest) -> bool:
    """Whether a request wants to become a websocket."""
    return request.headers.get(hdrs.UPGRADE, "").lower() == "websocket" and request.method == "GET"


async def relay(
    request: web.Request,
    upstream: Upstream,
    target: str,
    id: str,
    hold: Hold | None,
    answered: Callable[[int], None],
) -> web.StreamResponse:
    """Connect to the upstream first, then accept the client; ends when either side closes.

    `answered` is told the bytes of each message to the client.

    Raises UpstreamError while the client has not been accepted; afterwards `request[ACCEPTED]` is there to be closed.
    """
    protocols = [
        name.strip() for name in request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(",") if name.strip()
    ]
    headers = sent_headers(request.headers, upstream.config, id, also_not=_HANDSHAKE)
    patience = upstream.config.timeouts.first_byte
    try:
        async with asyncio.timeout(patience):
            server = await upstream.client.ws_connect(
                URL(upstream.config.url + target, encoded=True),
                protocols=protocols,
                headers=headers,
                autoping=False,
                autoclose=False,
                max_msg_size=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=5),
            )
    except TimeoutError as error:
        upstream.count_error("timeout")
        raise UpstreamTimeout(
            f"the upstream '{upstream.name}' did not accept a websocket at {target} within {patience:g} s"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        upstream.count_error("connect")
        raise UpstreamError(
            f"the upstream '{upstream.name}' does not accept a websocket at {target}: {error}"
        ) from error
    async with server:
        if hold is not None:
            hold.opened()
        client = web.WebSocketResponse(
            protocols=[server.protocol] if server.protocol else [], autoping=False, autoclose=False, max_msg_size=0
        )
        await client.prepare(request)
        request[ACCEPTED] = client
        ways = [asyncio.create_task(_pass(client, server)), asyncio.create_task(_pass(server, client, answered))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
    return client


async def fail(client: web.WebSocketResponse, error: ProxyError) -> None:
    """Tell an accepted client why its websocket ends."""
    reason = error.message.encode()[:123]  # of the frame's 125 bytes two are the code
    await client.close(code=WSCloseCode.INTERNAL_ERROR, message=reason.decode("utf-8", "ignore").encode())


Side = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pass(source: Side, sink: Side, passed: Callable[[int], None] = lambda size: None) -> None:
    """Everything that one side says, to the other, until it closes."""
    while True:
        message = await source.receive()
        try:
            match message.type:
                case WSMsgType.TEXT:
                    await sink.send_str(message.data)
                    passed(len(message.data.encode()))
                case WSMsgType.BINARY:
                    await sink.send_bytes(message.data)
                    passed(len(message.data))
                case WSMsgType.PING:
                    await sink.ping(message.data)
                case WSMsgType.PONG:
                    await sink.pong(message.data)
                case WSMsgType.CLOSE:
                    await sink.close(code=message.data or 1000, message=(message.extra or "").encode())
                    await source.close()
                    return
                case _:
                    vanished = message.type is WSMsgType.ERROR or source.close_code == WSCloseCode.ABNORMAL_CLOSURE
                    await sink.close(code=WSCloseCode.INTERNAL_ERROR if vanished else WSCloseCode.OK)
                    return
        except ConnectionError:
            return

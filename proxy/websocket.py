"""Websockets: relayed message by message, both ways, under the lease of the model that they name."""

import asyncio
import logging

import aiohttp
from aiohttp import WSMsgType, hdrs, web

from proxy.errors import UpstreamError
from proxy.forward import Upstream, sent_headers
from proxy.lease import Hold

logger = logging.getLogger(__name__)

_HANDSHAKE = frozenset(
    ["sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"]
)


def asks(request: web.BaseRequest) -> bool:
    """Whether a request wants to become a websocket."""
    return request.headers.get(hdrs.UPGRADE, "").lower() == "websocket" and request.method == "GET"


async def relay(
    request: web.Request, upstream: Upstream, target: str, id: str, hold: Hold | None
) -> web.StreamResponse:
    """Connect to the upstream first, then accept the client; ends when either side closes.

    Raises UpstreamError while the client has not been accepted.
    """
    protocols = [
        name.strip() for name in request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(",") if name.strip()
    ]
    headers = sent_headers(request.headers, upstream.config, id, also_not=_HANDSHAKE)
    try:
        server = await upstream.client.ws_connect(
            upstream.config.url + target,
            protocols=protocols,
            headers=headers,
            autoping=False,
            autoclose=False,
            max_msg_size=0,
            timeout=aiohttp.ClientWSTimeout(ws_close=5),
        )
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
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
        ways = [asyncio.create_task(_pass(client, server)), asyncio.create_task(_pass(server, client))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
    return client


Side = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pass(source: Side, sink: Side) -> None:
    """Everything that one side says, to the other, until it closes."""
    while True:
        message = await source.receive()
        try:
            match message.type:
                case WSMsgType.TEXT:
                    await sink.send_str(message.data)
                case WSMsgType.BINARY:
                    await sink.send_bytes(message.data)
                case WSMsgType.PING:
                    await sink.ping(message.data)
                case WSMsgType.PONG:
                    await sink.pong(message.data)
                case WSMsgType.CLOSE:
                    await sink.close(code=message.data or 1000, message=(message.extra or "").encode())
                    await source.close()
                    return
                case _:
                    await sink.close(code=1011 if message.type is WSMsgType.ERROR else 1000)
                    return
        except ConnectionError:
            return

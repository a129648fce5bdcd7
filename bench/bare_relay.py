"""The least that a relay on aiohttp can do: no key, no lease, no limit, no metric, no word for what goes wrong.

`python -m bench.bare_relay PORT UPSTREAM_PORT`. What llama-lease adds to aiohttp is what it costs over this.
"""

import asyncio
import gc
import sys

import aiohttp
import uvloop
from aiohttp import hdrs, web
from multidict import CIMultiDict


async def serve(port: int, upstream: str) -> None:
    """Serve on 127.0.0.1 until ended."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = CIMultiDict(request.headers)
            headers.popall(hdrs.CONTENT_LENGTH, None)
            headers.popall(hdrs.HOST, None)
            async with session.request(
                request.method, upstream + request.path_qs, data=body, headers=headers
            ) as answer:
                returned = CIMultiDict(answer.headers)
                returned.popall(hdrs.TRANSFER_ENCODING, None)
                response = web.StreamResponse(status=answer.status, headers=returned)
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        gc.collect()
        gc.freeze()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), f"http://127.0.0.1:{sys.argv[2]}"))

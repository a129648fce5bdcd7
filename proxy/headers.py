"""Which headers go on to an upstream, and which come back.

Those of a connection stay on it, both ways. The client's key stays here, and the upstream's own is put in.
"""

import re
from collections.abc import Iterable
from itertools import chain

from multidict import CIMultiDict, CIMultiDictProxy, istr

from proxy.config import Upstream

_HOP_BY_HOP = frozenset(
    ["connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"]
)  # fmt: skip
_NOT_FORWARDED = tuple(map(istr, [
    *_HOP_BY_HOP, "host", "authorization", "x-api-key", "content-length", "expect", "x-max-wait", "x-request-id",
    "origin",  # who may call from a page is decided here; with another Host beside it, an upstream would refuse it
]))  # fmt: skip
_NOT_RETURNED = _HOP_BY_HOP | {"x-request-id", "server-timing"}
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")


def sent_headers(
    client: "CIMultiDict[str] | CIMultiDictProxy[str]",
    config: Upstream,
    request_id: str,
    also_not: frozenset[str] = frozenset(),
) -> "CIMultiDict[str]":
    """The headers of a client's request that go on to the upstream, and what is put in; `also_not` in lower case."""
    named = _named(client.getall("Connection", ()))
    headers = CIMultiDict(client)
    for name in chain(_NOT_FORWARDED, named, also_not):
        if name in headers:
            del headers[name]
    if _UUID.fullmatch(request_id):  # llama-cpp-python's server answers 400 to any other
        headers["X-Request-Id"] = request_id
    if config.api_key:
        headers["Authorization"] = f"Bearer {config.api_key}"
    elif config.forward_client_key:
        headers.update((name, client[name]) for name in ("Authorization", "X-Api-Key") if name in client)
    return headers


def returned_headers(answer_headers: "CIMultiDictProxy[str]") -> "CIMultiDict[str]":
    """The headers of an upstream's answer that go on to the client: CORS is ours to decide."""
    named = _named(answer_headers.getall("Connection", ()))
    return CIMultiDict(
        (name, value)
        for name, value in answer_headers.items()
        if (lower := name.lower()) not in _NOT_RETURNED
        and lower not in named
        and not lower.startswith("access-control-")
    )


def _named(connection: Iterable[str]) -> set[str]:
    """The headers, in lower case, that `Connection` keeps on their hop."""
    return {name.strip().lower() for value in connection for name in value.split(",")}

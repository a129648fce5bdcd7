"""What is learnt about one request on its way, for its log line, its metrics and its trace."""

from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from proxy.errors import ProxyError
from proxy.tracing import RequestTrace

Phase = Literal["queued", "upstream", "streaming"]


@dataclass(slots=True)
class Facts:
    """Filled in by whoever learns it; read once, when the request has ended."""

    id: str
    path: str
    """Normalised."""
    trace: RequestTrace
    owner: str = ""
    """Who asks: a hash of the API key, "" on an open server."""
    group: str = ""
    model: str = ""
    phase: Phase = "queued"
    """How far it came; says when a client went away."""
    waited: float | None = None
    """Seconds in the queue; None while it waits, and for what takes no lease."""
    first_byte: float | None = None
    """Seconds from the grant to the first byte of the answer."""
    watches: bool = False
    """A reader of the live feed: it comes and goes, and is no request as the metrics count them."""
    failed: ProxyError | None = None
    """Why an answer that had begun broke off."""
    headers: dict[str, str] = field(default_factory=dict)
    """To be added to the response when it is prepared."""


FACTS: "web.RequestKey[Facts]" = web.RequestKey("facts", Facts)


def of(request: web.BaseRequest) -> Facts:
    """The facts of a request that came through the app's middleware."""
    return request[FACTS]

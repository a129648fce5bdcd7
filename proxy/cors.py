"""What browsers need before a page may read our answers. Headers go on every response, errors and streams included."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from multidict import CIMultiDict

from proxy.auth import is_loopback
from proxy.config import Cors

_EXPOSED = "X-Request-Id, Server-Timing, Retry-After"
_METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"


def allows(origin: str, cors: Cors) -> bool:
    """Whether a page of this origin may call."""
    if "*" in cors.origins or origin in cors.origins:
        return True
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return "loopback" in cors.origins and is_loopback(host)


def add_headers(request: Mapping[str, str], response: "CIMultiDict[str]", cors: Cors) -> None:
    """Add the headers for a simple or an actual request to a response that is not yet sent."""
    if "Origin" not in response.get("Vary", ""):
        response.add("Vary", "Origin")
    origin = request.get("Origin", "")
    if origin and allows(origin, cors):
        response["Access-Control-Allow-Origin"] = origin
        response["Access-Control-Expose-Headers"] = _EXPOSED


def preflight_headers(request: Mapping[str, str]) -> dict[str, str]:
    """The answer to an OPTIONS request; what the page asks for is echoed, since SDKs send headers of their own."""
    return {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": request.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": "600",
        **({"Access-Control-Allow-Private-Network": "true"}
           if request.get("Access-Control-Request-Private-Network") == "true" else {}),
    }  # fmt: skip

"""Who may call: the Host that the request came under, then the key that it carries."""

import functools
import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping

from aiohttp import web

from proxy.config import Config
from proxy.errors import BadRequest, Forbidden, Unauthorized


def check_host(host: str, config: Config) -> None:
    """Refuse a Host header that is not ours, so that a web page cannot reach an open server by DNS rebinding.

    Raises BadRequest without a Host, Forbidden for a foreign one.
    """
    if _is_ours(host, config.allowed_hosts, config.listen):
        return
    name = hostname(host)
    if not name:
        raise BadRequest("the Host header is missing or malformed", param="Host")
    raise Forbidden(
        f"this server does not answer to the host name '{name}'; add it to allowed_hosts in the configuration",
        param="Host",
        code="host_not_allowed",
    )


@functools.lru_cache(maxsize=32)
def _is_ours(host: str, allowed_hosts: tuple[str, ...], listen: str) -> bool:
    name, allowed = hostname(host), [known.lower() for known in allowed_hosts]
    if not name:
        return False
    if "*" in allowed or name in allowed or ("loopback" in allowed and is_loopback(name)):
        return True
    return name == hostname(listen)  # the one address that it listens on


def hostname(host: str) -> str:
    """The name or address of a Host header, without its port and brackets, in lower case; "" if malformed."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.partition(":")
    return name.lower().rstrip(".") if port.isdigit() or not port else ""


@functools.lru_cache(maxsize=256)
def is_loopback(name: str) -> bool:
    """localhost, its subdomains, 127.0.0.0/8 and ::1."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request carries: `Authorization: Bearer` or `x-api-key`; "" without one."""
    scheme, _, credentials = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("X-Api-Key", "").strip()


def check_key(headers: Mapping[str, str], config: Config, *, admin: bool = False) -> str:
    """The caller's name for what is kept by caller: a hash of the key, "" where the server is open.

    Without `api_keys` everybody may call; without `admin_keys` whoever may call is an administrator. Raises
    Unauthorized and Forbidden.
    """
    key = key_of(headers)
    is_admin = _among(key, config.admin_keys)
    if admin and config.admin_keys and not is_admin:
        raise (Forbidden if key else Unauthorized)("this needs one of admin_keys, as a Bearer token or x-api-key")
    if not config.api_keys and not is_admin:
        return ""
    if not is_admin and not _among(key, config.api_keys):
        what = "the API key is wrong" if key else "an API key is missing"
        raise Unauthorized(f"{what}; send one of api_keys as a Bearer token or in the x-api-key header")
    return _owner(key)


@functools.lru_cache(maxsize=256)  # only of keys that are known here
def _owner(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _among(key: str, keys: Collection[str]) -> bool:
    """Whether `key` is one of them. Compared with all, each in constant time, so that the time says nothing about any."""
    if not keys:
        return False
    given = key.encode("utf-8", "surrogateescape")
    return bool(sum([hmac.compare_digest(given, known.encode("utf-8")) for known in keys if known]))


def needs_no_key(method: str, path: str) -> bool:
    """Health probes, CORS preflights and the live page's own files; the page asks for a key by itself."""
    return method == "OPTIONS" or path in ("/health", "/ready") or path == "/lease/ui" or path.startswith("/lease/ui/")


def admit(request: web.BaseRequest, config: Config, path: str) -> str:
    """Host, then key. Returns the owner as `check_key` does; raises what they raise."""
    if "Host" in request.headers or request.version >= (1, 1):  # no browser is so old that it sends none
        check_host(request.headers.get("Host", ""), config)
    if needs_no_key(request.method, path):
        return ""
    return check_key(request.headers, config)

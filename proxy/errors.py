"""Every error that a client can see, with its HTTP status; one middleware turns them into responses.

ProxyError 500 server_error
├─ ConfigError            the configuration file (never reaches a client)
├─ BadRequest 400 invalid_request_error
│  ├─ Unauthorized 401 · Forbidden 403 · NotFound 404 · MethodNotAllowed 405 · BodyTooLarge 413
│  ├─ HeadTooLarge 431
├─ LeaseError
│  ├─ QueueFull 429       no room to wait; Retry-After
│  ├─ WaitTooLong 503     stood in line longer than allowed
│  ├─ LeaseClosed 503     the server is shutting down
│  ├─ LeaseCancelled 503  an administrator took the ticket out
│  ├─ HoldExpired 504     held longer than max_hold
│  └─ NestedLease         the holder asked again: a bug, refused at once
├─ ModelUnavailable 503   its last load failed moments ago, or its backend cannot run
└─ UpstreamError 502 ── UpstreamTimeout 504 · UpstreamTruncated 502
"""

from collections.abc import Mapping
from typing import Any


class ProxyError(Exception):
    """Base. `code` is a short stable word for programs, `param` the request field that is wrong."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if code is not None:
            self.code = code

    def body(self) -> dict[str, Any]:
        """The OpenAI error object: all four keys, always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same error in the shape of the /v1/messages routes."""
        kind = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
                503: "overloaded_error"}.get(self.status, "api_error")  # fmt: skip
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class ConfigError(ProxyError):
    """A configuration that cannot be used; the message names file, line and key."""


class BadRequest(ProxyError):
    """The request itself is wrong; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(BadRequest):
    """No key, or not one of ours."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """A valid caller who may not do this, or a Host that is not allowed."""

    status = 403
    type = "permission_error"


class NotFound(BadRequest):
    """No such path, model, job, voice or ticket."""

    status = 404
    code = "not_found"


class MethodNotAllowed(BadRequest):
    """The path exists, the method does not."""

    status = 405


class BodyTooLarge(BadRequest):
    """The body is over `max_body`."""

    status = 413
    code = "body_too_large"


class HeadTooLarge(BadRequest):
    """A line of the request's head is over what is read of one."""

    status = 431
    code = "head_too_large"


class LeaseError(ProxyError):
    """The lease was not to be had, or was taken away."""

    status = 503


class QueueFull(LeaseError):
    """`max_waiting` requests wait already; carries Retry-After (seconds, at most 60)."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after)})


class WaitTooLong(LeaseError):
    """Waited `max_wait` (or the request's own X-Max-Wait). A retry would rejoin at the tail: told not to."""

    code = "wait_too_long"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class LeaseClosed(LeaseError):
    """The server is shutting down."""

    code = "shutting_down"

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class LeaseCancelled(LeaseError):
    """An administrator cancelled this request."""

    code = "cancelled"

    def __init__(self, message: str = "the request was cancelled by an administrator") -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class HoldExpired(LeaseError):
    """Held the lease for longer than `max_hold`."""

    status = 504
    code = "hold_expired"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class NestedLease(LeaseError):
    """The task that holds a lease asked for a second one; it would wait for itself. A bug in this program."""

    status = 500
    code = "nested_lease"


class ModelUnavailable(ProxyError):
    """The model cannot be served now: its load failed moments ago, or its backend cannot run."""

    status = 503
    code = "model_unavailable"


class UpstreamError(ProxyError):
    """The upstream could not be reached, or broke off before its answer began."""

    status = 502
    type = "upstream_error"
    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    """The upstream did not answer in the time that the configuration gives it."""

    status = 504
    code = "upstream_timeout"


class UpstreamTruncated(UpstreamError):
    """The upstream's answer ended before it was complete."""

    code = "upstream_truncated"

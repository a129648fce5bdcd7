import pytest
from multidict import CIMultiDict

from proxy.config import Cors
from proxy.cors import add_headers, allows, preflight_headers

LOOPBACK = Cors()


@pytest.mark.parametrize(
    "origin",
    ["http://localhost", "http://localhost:3000", "https://127.0.0.1:8443", "http://[::1]:80", "http://a.localhost"],
)
def test_by_default_pages_on_loopback_may_read(origin: str) -> None:
    assert allows(origin, LOOPBACK)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.com", "http://localhost.evil.com", "http://127.0.0.1.evil.com", "null", "", "http://[::1", "x"],
)
def test_by_default_no_other_page_may(origin: str) -> None:
    assert not allows(origin, LOOPBACK)


def test_an_origin_is_allowed_as_it_is_written_and_a_star_allows_all() -> None:
    chat = Cors(origins=("https://chat.home",))
    assert allows("https://chat.home", chat)
    assert not allows("http://chat.home", chat)
    assert not allows("https://chat.home:8443", chat)
    assert not allows("http://localhost", chat)
    assert allows("https://evil.com", Cors(origins=("*",)))


def test_an_allowed_origin_is_echoed_and_sees_our_headers() -> None:
    headers = CIMultiDict({"Content-Type": "text/plain"})
    add_headers({"Origin": "http://localhost:3000"}, headers, LOOPBACK)
    assert headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert headers["Access-Control-Expose-Headers"] == "X-Request-Id, Server-Timing, Retry-After"
    assert headers["Vary"] == "Origin"


def test_another_origin_gets_nothing_and_caches_are_told() -> None:
    headers = CIMultiDict({"Vary": "Accept-Encoding"})
    add_headers({"Origin": "https://evil.com"}, headers, LOOPBACK)
    assert headers.getall("Vary") == ["Accept-Encoding", "Origin"]
    assert not any(name.startswith("Access-Control") for name in headers)


def test_vary_is_not_said_twice() -> None:
    headers = CIMultiDict({"Vary": "Origin, Accept"})
    add_headers({}, headers, LOOPBACK)
    assert headers.getall("Vary") == ["Origin, Accept"]


def test_a_preflight_echoes_the_headers_that_are_asked_for() -> None:
    headers = preflight_headers({"Access-Control-Request-Headers": "authorization, x-stainless-os"})
    assert headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert {"POST", "DELETE"} <= {method.strip() for method in headers["Access-Control-Allow-Methods"].split(",")}
    assert "Access-Control-Allow-Private-Network" not in headers


def test_a_preflight_to_a_private_network_is_answered() -> None:
    headers = preflight_headers({"Access-Control-Request-Private-Network": "true"})
    assert headers["Access-Control-Allow-Private-Network"] == "true"

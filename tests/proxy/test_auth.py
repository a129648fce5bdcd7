import pytest
from aiohttp import HttpVersion10
from aiohttp.test_utils import make_mocked_request

from proxy.auth import admit, check_host, check_key, hostname, is_loopback, key_of, needs_no_key
from proxy.config import Config
from proxy.errors import BadRequest, Forbidden, Unauthorized

OPEN = Config()
LOCKED = Config(api_keys=("first", "zweiter-schlüssel"))
ADMINS = Config(api_keys=("user",), admin_keys=("root",))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# The key


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        (bearer("k"), "k"),
        ({"Authorization": "bearer   k "}, "k"),
        ({"X-Api-Key": " k "}, "k"),
        ({"Authorization": "Bearer ", "X-Api-Key": "k"}, "k"),
        ({"Authorization": "Basic dTpw", "X-Api-Key": "k"}, "k"),
        ({"Authorization": "Bearer a", "X-Api-Key": "b"}, "a"),
        ({"Authorization": "Bearer"}, ""),
        ({"Authorization": "Basic dTpw"}, ""),
        ({}, ""),
    ],
)
def test_a_key_comes_as_bearer_or_as_x_api_key(headers: dict[str, str], key: str) -> None:
    assert key_of(headers) == key


def test_without_keys_everybody_may_call() -> None:
    assert check_key({}, OPEN) == ""
    assert check_key(bearer("anything"), OPEN, admin=True) == ""


@pytest.mark.parametrize("key", ["first", "zweiter-schlüssel"])
def test_each_of_the_keys_is_good(key: str) -> None:
    assert check_key(bearer(key), LOCKED) != ""
    assert check_key({"X-Api-Key": key}, LOCKED) == check_key(bearer(key), LOCKED)


@pytest.mark.parametrize(
    ("headers", "words"),
    [({}, "missing"), (bearer(""), "missing"), (bearer("fi"), "wrong"), (bearer("\udcff"), "wrong")],
)
def test_a_key_that_is_missing_or_wrong_is_401(headers: dict[str, str], words: str) -> None:
    with pytest.raises(Unauthorized, match=words) as caught:
        check_key(headers, LOCKED)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_each_key_has_an_owner_that_does_not_tell_the_key() -> None:
    owners = [check_key(bearer(key), LOCKED) for key in LOCKED.api_keys]
    assert len(set(owners)) == 2
    assert not any(key in owner for key in LOCKED.api_keys for owner in owners)


def test_only_admin_keys_may_do_what_administrators_do() -> None:
    assert check_key(bearer("root"), ADMINS, admin=True)
    with pytest.raises(Forbidden):
        check_key(bearer("user"), ADMINS, admin=True)
    with pytest.raises(Unauthorized):
        check_key({}, ADMINS, admin=True)


def test_an_administrator_may_do_what_everybody_may() -> None:
    assert check_key(bearer("root"), ADMINS)
    assert check_key(bearer("user"), ADMINS)


def test_with_admin_keys_alone_the_rest_is_open() -> None:
    config = Config(admin_keys=("root",))
    assert check_key({}, config) == ""
    with pytest.raises(Unauthorized):
        check_key({}, config, admin=True)


# The host


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:9292", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:9292", "127.0.0.1"),
        ("[::1]:9292", "::1"),
        ("[::1]", "::1"),
        ("", ""),
        ("a:b", ""),
        ("a:1:2", ""),
    ],
)
def test_the_name_of_a_host_header(host: str, name: str) -> None:
    assert hostname(host) == name


@pytest.mark.parametrize("name", ["localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_these_names_are_loopback(name: str) -> None:
    assert is_loopback(name)


@pytest.mark.parametrize(
    "name", ["localhost.evil.com", "evil-localhost", "127.0.0.1.evil.com", "0.0.0.0", "10.0.0.1", ""]
)
def test_these_names_are_not_loopback(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize("host", ["localhost:9292", "127.0.0.1", "[::1]:1", "x.localhost"])
def test_by_default_loopback_names_are_served(host: str) -> None:
    check_host(host, OPEN)


@pytest.mark.parametrize("host", ["evil.com", "evil.com:9292", "192.168.1.5:9292", "localhost.evil.com"])
def test_a_name_that_dns_rebinding_would_bring_is_403(host: str) -> None:
    with pytest.raises(Forbidden) as caught:
        check_host(host, OPEN)
    assert (caught.value.status, caught.value.param, caught.value.code) == (403, "Host", "host_not_allowed")


def test_a_missing_or_malformed_host_is_400() -> None:
    for host in ("", "a:b"):
        with pytest.raises(BadRequest) as caught:
            check_host(host, OPEN)
        assert (caught.value.status, caught.value.param) == (400, "Host")


@pytest.mark.parametrize("host", ["gpu.home:9292", "GPU.Home", "10.0.0.1", "localhost"])
def test_more_names_can_be_allowed(host: str) -> None:
    check_host(host, Config(allowed_hosts=("loopback", "GPU.home", "10.0.0.1")))
    check_host(host, Config(allowed_hosts=("*",)))


def test_loopback_is_allowed_only_while_it_is_listed() -> None:
    with pytest.raises(Forbidden):
        check_host("localhost", Config(allowed_hosts=("gpu.home",), listen="10.0.0.1:9292"))


def test_the_address_that_it_listens_on_is_allowed() -> None:
    check_host("10.0.0.1:9292", Config(listen="10.0.0.1:9292"))


# Both


@pytest.mark.parametrize("path", ["/health", "/ready", "/lease/ui", "/lease/ui/page.js"])
def test_probes_and_the_pages_own_files_need_no_key(path: str) -> None:
    assert needs_no_key("GET", path)
    assert admit(make_mocked_request("GET", path, headers={"Host": "localhost"}), LOCKED, path) == ""


@pytest.mark.parametrize("path", ["/lease", "/metrics", "/v1/models", "/v1/chat/completions", "/lease/uix", "/healthy"])
def test_everything_else_needs_a_key(path: str) -> None:
    with pytest.raises(Unauthorized):
        admit(make_mocked_request("GET", path, headers={"Host": "localhost"}), LOCKED, path)


def test_options_never_needs_a_key() -> None:
    request = make_mocked_request("OPTIONS", "/v1/chat/completions", headers={"Host": "localhost"})
    assert admit(request, LOCKED, "/v1/chat/completions") == ""


def test_the_host_is_checked_before_the_key_and_for_probes_too() -> None:
    for path in ("/health", "/v1/models"):
        with pytest.raises(Forbidden):
            admit(make_mocked_request("GET", path, headers={"Host": "evil.com"}), LOCKED, path)


def test_http_1_0_may_leave_out_its_host_but_not_send_a_foreign_one() -> None:
    assert admit(make_mocked_request("GET", "/x", version=HttpVersion10), OPEN, "/x") == ""
    with pytest.raises(BadRequest):
        admit(make_mocked_request("GET", "/x"), OPEN, "/x")
    with pytest.raises(Forbidden):
        admit(make_mocked_request("GET", "/x", headers={"Host": "evil.com"}, version=HttpVersion10), OPEN, "/x")

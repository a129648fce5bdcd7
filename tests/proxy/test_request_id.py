"""Which id a request gets, and which of them an upstream sees."""

import uuid

import pytest
from multidict import CIMultiDict

from proxy.config import Upstream
from proxy.headers import sent_headers

CONFIG = Upstream(url="http://127.0.0.1:1")


def sent(id: str) -> "CIMultiDict[str]":
    return sent_headers(CIMultiDict({"X-Request-Id": "the client's"}), CONFIG, id)


@pytest.mark.parametrize("id", [uuid.uuid4().hex, str(uuid.uuid4())])
def test_an_upstream_gets_an_id_that_is_a_uuid(id: str) -> None:
    assert sent(id).getall("X-Request-Id") == [id]


@pytest.mark.parametrize("id", ["mine", "req_0123456789", str(uuid.uuid4()) + "0"])
def test_an_upstream_that_wants_uuids_never_sees_another_id(id: str) -> None:
    assert "X-Request-Id" not in sent(id)

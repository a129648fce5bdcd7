import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.body import Body, Found, find_model, rename_model
from proxy.errors import BodyTooLarge, ProxyError

LIMIT = 64 << 20
FORM = "multipart/form-data; boundary=frontier"


async def find(data: bytes, kind: str = "application/json", encoding: str = "", limit: int = LIMIT) -> Found:
    return await find_model(Body.of(data), kind, encoding, limit)


async def refused(data: bytes, kind: str = "application/json", encoding: str = "") -> tuple[int, str | None, str]:
    with pytest.raises(ProxyError) as caught:
        await find(data, kind, encoding)
    return caught.value.status, caught.value.param, caught.value.message


async def renamed(data: bytes, model: str, kind: str = "application/json", encoding: str = "") -> bytes:
    found = await find(data, kind, encoding)
    body = await rename_model(Body.of(data), found, model, kind, encoding, LIMIT)
    content = body.content()
    body.close()
    return content


def form(*parts: tuple[str, bytes], boundary: str = "frontier") -> bytes:
    """`parts`: (what follows "form-data; ", content)."""
    body = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), content)
        for head, content in parts
    )
    return body + b"--" + boundary.encode() + b"--\r\n"


# JSON


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ('{"model":"m"}', "m"),
        (' \r\n\t{ "a" : [1, {"model": "inner"}] , "model" : "m" } \n', "m"),
        ('{"mod\\u0065l": "m\\u00e9"}', "mé"),
        ('{"text": "\u2028 \u2029 \x85", "model": "m"}', "m"),
        ('{"text": "\\"model\\": \\"n\\"", "model": "m"}', "m"),
        ('{"big": ' + "9" * 5000 + ', "model": "m"}', "m"),
        ('{"odd": NaN, "model": "m"}', "m"),
    ],
)
async def test_the_model_of_an_object_is_found_on_its_top_level(text: str, model: str) -> None:
    found = await find(text.encode())
    assert found.model == model
    assert json.loads(text.encode()[found.start : found.end]) == model


@pytest.mark.parametrize(("written", "stream"), [("true", True), ("false", False), ('"true"', False), ("1", False)])
async def test_a_stream_is_asked_for_by_true_alone(written: str, stream: bool) -> None:
    assert (await find(f'{{"stream": {written}, "model": "m"}}'.encode())).stream is stream


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (b"", "body", "empty"),
        (b" \n", "body", "empty"),
        (b"null", "body", "JSON object"),
        (b'["model"]', "body", "JSON object"),
        (b'"model"', "body", "JSON object"),
        (b"{", "body", "not valid JSON"),
        (b"{model: 1}", "body", "not valid JSON"),
        (b'{"model":"m"', "body", "not valid JSON"),
        (b'{"model":"m",}', "body", "not valid JSON"),
        (b'{"model" "m"}', "body", "not valid JSON"),
        (b'{"model":"m"} {}', "body", "not valid JSON"),
        (b'{"model":"m"}\0', "body", "not valid JSON"),
        (b'{"model":"a\nb"}', "body", "not valid JSON"),
        (b'{"a":01,"model":"m"}', "body", "not valid JSON"),
        (b'{"model":"\xff"}', "body", "not valid UTF-8 at byte 10"),
        ('{"model":"m"}'.encode("utf-16"), "body", "not valid UTF-8"),
        (b'{"a":' * 100_000, "body", "nested too deeply"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"m"}', "body", "nested too deeply"),
        (b"{}", "model", "missing"),
        (b'{"model":null}', "model", "missing"),
        (b'{"model":""}', "model", "empty"),
        (b'{"model":7}', "model", "string"),
        (b'{"model":["m"]}', "model", "string"),
        (b'{"model":"m","model":"n"}', "model", "twice"),
    ],
)
async def test_bad_json_is_400_and_names_the_field(data: bytes, param: str, words: str) -> None:
    status, field, message = await refused(data)
    assert (status, field) == (400, param)
    assert words in message


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "Application/JSON; charset=utf-8", "text/plain", "application/vnd.api+json",
     "application/x-www-form-urlencoded"],
)  # fmt: skip
async def test_json_comes_under_these_content_types(kind: str) -> None:
    assert (await find(b'{"model":"m"}', kind)).model == "m"


async def test_another_content_type_is_400() -> None:
    status, param, message = await refused(b'{"model":"m"}', "text/html")
    assert (status, param) == (400, "model")
    assert "text/html" in message


CODECS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "": (bytes, bytes),
    "gzip": (gzip.compress, gzip.decompress),
    "deflate": (zlib.compress, zlib.decompress),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(st.data())
async def test_renaming_changes_the_model_and_nothing_else(data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.text(max_size=6).filter(lambda key: key != "model"), JSON, max_size=4))
    items: list[tuple[str, Any]] = [*fields.items()]
    items.insert(data.draw(st.integers(0, len(items))), ("model", data.draw(st.text(min_size=1, max_size=6))))
    name = data.draw(st.text(min_size=1, max_size=6))
    ascii_only, indent = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1]))
    text = json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return  # not a body that could come: a lone surrogate
    encoding = data.draw(st.sampled_from(["", "gzip", "deflate"]))
    squeeze, loosen = CODECS[encoding]
    changed = loosen(await renamed(squeeze(text), name, encoding=encoding))
    assert list(json.loads(changed).items()) == [*{**dict(items), "model": name}.items()]
    found = await find(text)
    assert (changed[: found.start], changed[-(len(text) - found.end) :]) == (text[: found.start], text[found.end :])


@settings(deadline=None, max_examples=200)
@given(
    st.binary(max_size=40)
    | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.text(alphabet=st.sampled_from('{}[]:,"\\model0-e.tru '), max_size=40).map(str.encode)
    | JSON.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["application/json", "", FORM, "multipart/form-data"]) | st.text(max_size=30),
    st.sampled_from(["", "gzip", "deflate", "identity"]) | st.text(max_size=6),
)
async def test_whatever_comes_is_found_or_refused(data: bytes, kind: str, encoding: str) -> None:
    answer: Found | ProxyError
    try:
        answer = await find(data, kind, encoding)
    except ProxyError as error:
        answer = error
    assert answer.model if isinstance(answer, Found) else 400 <= answer.status < 500


# Multipart


async def test_the_model_of_a_form_may_come_after_a_large_file() -> None:
    file = random.Random(1).randbytes(20 << 20)
    data = form(('name="file"; filename="a.wav"', file), ('name="model"', b"whisper"), ('name="stream"', b"true"))
    found = await find(data, FORM)
    assert (found.model, found.stream) == ("whisper", True)
    assert data[found.start : found.end] == b"whisper"
    assert found.start > 20 << 20


@pytest.mark.parametrize(
    "content",
    [b"\r\n--frontie\r\n", b"\r\n--frontier-x", b"\r\n", b"--frontier", b"\r\n\r\n--\r\n", b'name="model"\r\n\r\nn'],
)
async def test_a_file_may_hold_what_looks_like_a_boundary(content: bytes) -> None:
    data = form(('name="file"; filename="a"', content * 3), ('name="model"', b"m"))
    found = await find(data, FORM)
    assert data[found.start : found.end] == b"m"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("name=model", FORM),
        ('name="model"', 'multipart/form-data; boundary="frontier"'),
        ('name="model"', "Multipart/Form-Data;boundary=frontier; charset=utf-8"),
        ('name="model"\r\nContent-Type: text/plain', FORM),
    ],
)
async def test_a_form_may_be_written_in_many_ways(head: str, kind: str) -> None:
    assert (await find(form((head, b"m")), kind)).model == "m"


@pytest.mark.parametrize(
    ("data", "kind", "param", "words"),
    [
        (b"", FORM, "body", "breaks off"),
        (b"junk", FORM, "body", "not valid"),
        (form(('name="model"', b"m"))[:-6], FORM, "body", "breaks off"),
        (form(('name="model"', b"m")), "multipart/form-data", "body", "boundary"),
        (form(('name="model"', b"m")), "multipart/form-data; boundary=", "body", "boundary"),
        (form(('name="model"', b"m")), "multipart/form-data; boundary=" + "x" * 71, "body", "boundary"),
        (form(('name="model"', b"m")), "multipart/form-data; boundary=grenze-日", "body", "ASCII"),
        (form(('name="file"', b"m")), FORM, "model", "missing"),
        (form(('name="MODEL"', b"m")), FORM, "model", "missing"),
        (form(('name="model"', b"")), FORM, "model", "empty"),
        (form(('name="model"', b"\xff")), FORM, "model", "UTF-8"),
        (form(('name="model"', b"m"), ('name="model"', b"n")), FORM, "model", "twice"),
    ],
)
async def test_a_bad_form_is_400_and_names_the_field(data: bytes, kind: str, param: str, words: str) -> None:
    status, field, message = await refused(data, kind)
    assert (status, field) == (400, param)
    assert words in message


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["file", "a", "b"]), st.binary(max_size=30)), max_size=3),
    st.integers(0, 3),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=8),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=8),
)
async def test_renaming_in_a_form_keeps_every_other_byte(
    others: list[tuple[str, bytes]], place: int, model: str, name: str
) -> None:
    parts = [(f'name="{key}"; filename="f"', content) for key, content in others]
    before = form(*parts[:place], ('name="model"', model.encode()), *parts[place:])
    after = form(*parts[:place], ('name="model"', name.encode()), *parts[place:])
    assert await renamed(before, name, FORM) == after


# Compressed bodies


@pytest.mark.parametrize(
    ("encoding", "squeeze"), [("gzip", gzip.compress), (" X-Gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_compressed_body_is_looked_into(encoding: str, squeeze: Any) -> None:
    assert (await find(squeeze(b'{"model":"m"}'), encoding=encoding)).model == "m"


@pytest.mark.parametrize(
    ("data", "encoding", "param", "words"),
    [
        (b'{"model":"m"}', "gzip", "body", "not valid gzip"),
        (gzip.compress(b'{"model":"m"}')[:-1], "gzip", "body", "breaks off"),
        (gzip.compress(b'{"model":"m"}') + b"x", "gzip", "body", "behind its end"),
        (b'{"model":"m"}', "br", "model", "'br' cannot be read"),
    ],
)
async def test_a_badly_compressed_body_is_400(data: bytes, encoding: str, param: str, words: str) -> None:
    status, field, message = await refused(data, encoding=encoding)
    assert (status, field) == (400, param)
    assert words in message


async def test_a_compressed_body_is_inflated_up_to_the_limit_only() -> None:
    squeezed = gzip.compress(b'{"model":"m", "a":"' + b"a" * 10_000 + b'"}')
    with pytest.raises(BodyTooLarge, match="1000 bytes"):
        await find(squeezed, encoding="gzip", limit=1000)


# Reading


class Flow(BaseProtocol):
    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())


def stream(*pieces: bytes) -> StreamReader:
    reader = StreamReader(Flow(), 1 << 30)
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return reader


async def test_a_body_is_read_whole_and_can_be_read_again() -> None:
    body = await Body.read(stream(b"one ", b"two"), 7)
    assert (body.size, body.content(), body.content(), body.payload()) == (7, b"one two", b"one two", b"one two")
    body.close()


async def test_a_body_over_the_limit_is_refused_while_it_comes() -> None:
    reader = StreamReader(Flow(), 1 << 30)
    reader.feed_data(b"12345678")  # and no end
    with pytest.raises(BodyTooLarge) as caught:
        await Body.read(reader, 7)
    assert caught.value.status == 413
    assert "7 bytes" in caught.value.message


async def test_a_big_body_is_sent_in_pieces_as_often_as_asked() -> None:
    data = random.Random(2).randbytes(3 << 20)
    body = await Body.read(stream(*[data[at : at + 65536] for at in range(0, len(data), 65536)]), LIMIT)
    for _ in range(2):
        payload = body.payload()
        assert not isinstance(payload, bytes)
        pieces = [piece async for piece in payload]
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) < 1 << 20
    body.close()
    body.close()


async def test_a_body_closes_its_file() -> None:
    file = BytesIO(b"data")
    Body(file, 4).close()
    assert file.closed

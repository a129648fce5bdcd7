"""Read a request's whole body before anything else happens, and find the `model` in it.

A body is bounded while it arrives, kept in memory up to 1 MiB and in a temporary file beyond, and forwarded as it
arrived. Only an alias changes it, and then only the bytes of the model's name: nothing is serialised again.
"""

import asyncio
import io
import json
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import IO

from aiohttp import StreamReader
from python_multipart import multipart
from python_multipart.exceptions import FormParserError

from proxy.errors import BadRequest, BodyTooLarge

_IN_MEMORY = 1 << 20
_CHUNK = 1 << 18
_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder(parse_int=float)  # int() refuses thousands of digits
_PLAIN = ("", "identity")
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_JSON = ("", "application/json", "text/plain", "application/x-www-form-urlencoded")  # the last is what curl -d says


class Body:
    """The bytes of one request body. `close` frees its temporary file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        """`size`: how many bytes `file` has; `close` will close it."""
        self._file = file
        self.size = size

    @classmethod
    async def read(cls, stream: StreamReader, limit: int) -> "Body":
        """Everything that `stream` gives. Raises BodyTooLarge as soon as it is over `limit` bytes.

        Raises what aiohttp raises when the client goes away in the middle.
        """
        first: list[bytes] = []
        file: IO[bytes] | None = None
        size = 0
        try:
            while chunk := await stream.readany():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(f"the body is over max_body, {limit} bytes")
                if file is not None:
                    file.write(chunk)
                    continue
                first.append(chunk)
                if size > _IN_MEMORY:
                    file = tempfile.TemporaryFile()  # noqa: SIM115 closed by close()
                    file.writelines(first)
                    first.clear()
        except BaseException:
            if file is not None:
                file.close()
            raise
        return cls.of(b"".join(first)) if file is None else cls(file, size)

    @classmethod
    def of(cls, data: bytes) -> "Body":
        """A body that was made here."""
        return cls(io.BytesIO(data), len(data))

    def content(self) -> bytes:
        """All of it, in memory."""
        self._file.seek(0)
        return self._file.read()

    def payload(self) -> bytes | AsyncIterator[bytes]:
        """What an HTTP client sends: bytes when small, else pieces read in turn. May be asked for again."""
        return self.content() if self.size <= _IN_MEMORY else self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        position = 0
        while position < self.size:
            self._file.seek(position)
            piece = await asyncio.to_thread(self._file.read, _CHUNK)
            position += len(piece)
            yield piece

    def close(self) -> None:
        """Free the file. Idempotent."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Found:
    """The model that a body names, and where its value lies in the bytes: [start, end)."""

    model: str
    start: int
    end: int
    stream: bool = False


async def find_model(body: Body, content_type: str, content_encoding: str, limit: int) -> Found:
    """The `model` of a JSON or multipart body. Raises BadRequest naming the field; never changes the body.

    Big bodies are parsed in a thread. A compressed body is inflated (to at most `limit` bytes) to be looked at.
    """
    kind, _, parameters = content_type.partition(";")
    kind = kind.strip().lower()
    find: Callable[[bytes], Found]
    if kind == "multipart/form-data":
        boundary = _boundary(parameters)

        def find(data: bytes) -> Found:
            return _in_multipart(data, boundary)
    elif kind in _JSON or kind.endswith("+json"):
        find = _in_json
    else:
        raise BadRequest(f"Content-Type {kind!r} is not one that names a model; send application/json", param="model")

    def look() -> Found:
        return find(inflate(body.content(), content_encoding.strip().lower(), limit))

    return await asyncio.to_thread(look) if body.size > _CHUNK else look()


async def rename_model(
    body: Body, found: Found, model: str, content_type: str, content_encoding: str, limit: int
) -> Body:
    """A copy of the body in which the model's name, and nothing else, is `model`; compressed as it was."""
    is_json = not content_type.strip().lower().startswith("multipart/")
    name = (json.dumps(model) if is_json else model).encode("utf-8")
    encoding = content_encoding.strip().lower()

    def copy() -> Body:
        data = inflate(body.content(), encoding, limit)
        file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 closed by close()
        pieces = [data[: found.start], name, data[found.end :]]
        if encoding not in _PLAIN:
            deflater = zlib.compressobj(wbits=_WBITS[encoding])
            pieces = [*map(deflater.compress, pieces), deflater.flush()]
        return Body(file, sum(map(file.write, pieces)))

    return await asyncio.to_thread(copy) if body.size > _CHUNK else copy()


def inflate(data: bytes, encoding: str, limit: int) -> bytes:
    """The plain bytes of a body with this Content-Encoding. Raises BadRequest, and BodyTooLarge over `limit` bytes."""
    if encoding in _PLAIN:
        return data
    if encoding not in _WBITS:
        raise BadRequest(f"Content-Encoding {encoding!r} cannot be read here; send it plain or as gzip", param="model")
    inflater = zlib.decompressobj(wbits=_WBITS[encoding])
    try:
        plain = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not valid {encoding}: {error}", param="body") from None
    if len(plain) > limit:
        raise BodyTooLarge(f"the inflated body is over max_body, {limit} bytes")
    if not inflater.eof:
        raise BadRequest(f"the {encoding} body breaks off before its end", param="body")
    if inflater.unused_data:
        raise BadRequest(f"the {encoding} body goes on behind its end", param="body")
    return plain


def _in_json(data: bytes) -> Found:
    """Walk the top level of a JSON object. Two `model`s are refused: upstreams differ in which of them counts."""
    if not data.strip():
        raise BadRequest("the body is empty; it must be a JSON object", param="body")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 at byte {error.start}", param="body") from None
    model: object = None
    stream: object = False
    span = (0, 0)
    try:
        position = _skip(text, 0)
        if text[position : position + 1] != "{":
            raise BadRequest("the body must be a JSON object", param="body")
        position = _skip(text, position + 1)
        while text[position : position + 1] != "}":
            if text[position : position + 1] != '"':
                raise json.JSONDecodeError("expected a key in double quotes", text, position)
            key, position = scanstring(text, position + 1, True)
            position = _skip(text, position)
            if text[position : position + 1] != ":":
                raise json.JSONDecodeError("expected ':'", text, position)
            start = _skip(text, position + 1)
            value, end = _DECODER.raw_decode(text, start)
            if key == "model":
                if span != (0, 0):
                    raise BadRequest("the field 'model' is given twice", param="model")
                model, span = value, (start, end)
            elif key == "stream":
                stream = value
            position = _skip(text, end)
            if text[position : position + 1] == ",":
                position = _skip(text, position + 1)
                if text[position : position + 1] == "}":
                    raise json.JSONDecodeError("trailing comma", text, position)
            elif text[position : position + 1] != "}":
                raise json.JSONDecodeError("expected ',' or '}'", text, position)
        if _skip(text, position + 1) != len(text):
            raise json.JSONDecodeError("extra data after the object", text, position + 1)
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", param="body") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", param="body") from None
    _check(model)
    start, end = (len(text[:at].encode("utf-8")) for at in span) if not text.isascii() else span
    return Found(str(model), start, end, stream is True)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _check(model: object) -> None:
    if model is None:
        raise BadRequest("the field 'model' is missing; it names the model that answers", param="model")
    if not isinstance(model, str):
        raise BadRequest("the field 'model' must be a string", param="model")
    if not model:
        raise BadRequest("the field 'model' must not be empty", param="model")


def _boundary(parameters: str) -> bytes:
    if not parameters.isascii():
        raise BadRequest("the parameters of the Content-Type must be ASCII", param="body")
    _, options = multipart.parse_options_header(f"multipart/form-data;{parameters}")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:  # RFC 2046
        raise BadRequest("multipart/form-data needs a boundary of 1 to 70 characters in its Content-Type", param="body")
    return boundary


def _in_multipart(data: bytes, boundary: bytes) -> Found:
    """The form field `model`, wherever it stands. Two of them are refused: upstreams differ in which one counts."""
    header: list[bytes] = [b"", b""]
    fields: dict[bytes, tuple[int, int]] = {}
    part: dict[bytes, bytes] = {}
    name: bytes | None = None
    span: list[int] = [0, 0]

    def header_end() -> None:
        part[header[0].lower()] = header[1]
        header[:] = [b"", b""]

    def grow(index: int) -> Callable[[bytes, int, int], None]:
        def add(chunk: bytes, start: int, end: int) -> None:
            header[index] += chunk[start:end]

        return add

    def headers_finished() -> None:
        nonlocal name
        _, options = multipart.parse_options_header(part.get(b"content-disposition", b""))
        name = options.get(b"name")
        part.clear()
        span[:] = [-1, -1]

    def part_data(_: bytes, start: int, end: int) -> None:
        if name in (b"model", b"stream"):
            span[:] = [start if span[0] < 0 else span[0], end]

    def part_end() -> None:
        if name in (b"model", b"stream"):
            if name == b"model" and name in fields:
                raise BadRequest("the field 'model' is given twice", param="model")
            fields[name] = (max(span[0], 0), max(span[1], 0))

    parser = multipart.MultipartParser(
        boundary,
        {
            "on_header_field": grow(0),
            "on_header_value": grow(1),
            "on_header_end": header_end,
            "on_headers_finished": headers_finished,
            "on_part_data": part_data,
            "on_part_end": part_end,
        },
    )
    try:
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"the multipart body is not valid: {error}", param="body") from None
    if parser.state is not multipart.MultipartState.END:
        raise BadRequest("the multipart body breaks off before its last boundary", param="body")
    start, end = fields.get(b"model", (0, 0))
    try:
        model = data[start:end].decode("utf-8") if b"model" in fields else None
    except UnicodeDecodeError:
        raise BadRequest("the field 'model' is not valid UTF-8", param="model") from None
    _check(model)
    stream = data[slice(*fields.get(b"stream", (0, 0)))].strip().lower() == b"true"
    return Found(str(model), start, end, stream)

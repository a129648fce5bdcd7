"""Reading request bodies, by hand and independent of the code under test."""

import json
import re
from typing import Any

from tests.fakes.scheduler import SwapperError


def json_fields(body: bytes, *, strict: bool = True) -> dict[str, Any]:
    """The JSON object of a body. Raises SwapperError 400; not strict: {} for anything else."""
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        return fields
    if strict:
        raise SwapperError(400, "the body is not a JSON object")
    return {}


def form_fields(content_type: str, body: bytes) -> dict[str, Any]:
    """The parts of multipart/form-data by name: text, or bytes for a file. Raises SwapperError 400."""
    boundary = re.search(r'boundary="?([^";]+)"?', content_type)
    if boundary is None:
        raise SwapperError(400, "no boundary")
    fields: dict[str, Any] = {}
    for part in body.split(b"--" + boundary[1].encode())[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        name = re.search(rb'\bname="([^"]*)"', head)
        if name is None:
            raise SwapperError(400, "a part has no name")
        content = content.removesuffix(b"\r\n")
        fields[name[1].decode()] = content if b"filename=" in head else content.decode()
    return fields

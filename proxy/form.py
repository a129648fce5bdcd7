"""multipart/form-data, as the voice routes need it: small fields and one file, all in memory."""

import io

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, MultipartParser, MultipartState, parse_options_header

from proxy.errors import BadRequest


def read_form(data: bytes, content_type: str) -> dict[str, bytes]:
    """Field name -> its bytes; of two with one name the last counts. File names are dropped unread.

    Raises BadRequest where it is not a form or breaks off.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest("the body must be multipart/form-data with a boundary", param="body")
    fields: dict[str, bytes] = {}

    def on_field(field: Field) -> None:
        fields[_name(field.field_name)] = field.value or b""

    def on_file(file: File) -> None:
        assert isinstance(file.file_object, io.BytesIO)
        fields[_name(file.field_name)] = file.file_object.getvalue()

    parser = FormParser(
        "multipart/form-data", on_field, on_file, boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": len(data) + 1}
    )
    try:
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"the form is not valid: {error}", param="body") from error
    inner = parser.parser
    if not isinstance(inner, MultipartParser) or inner.state is not MultipartState.END:
        raise BadRequest("the form breaks off before its last boundary", param="body")
    return fields


def text_field(fields: dict[str, bytes], *names: str) -> str:
    """The first of these fields that is there and not empty, as stripped text; "" if none. Raises BadRequest."""
    for name in names:
        try:
            text = fields.get(name, b"").decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise BadRequest(f"{name} is not UTF-8", param=name) from error
        if text:
            return text
    return ""


def _name(name: bytes | None) -> str:
    return (name or b"").decode("utf-8", "replace")

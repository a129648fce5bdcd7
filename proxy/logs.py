"""How log records look: one line of text, or one JSON object a line.

A record may carry `extra={"fields": {...}}`: facts for programs. In JSON they are keys of their own; in text they
follow the message as key=value, quoted where a value could be taken for more than one. Nothing in this program logs a
prompt, a key or the text of a speech at any level; `fields` is the place where that is easy to see.
"""

import functools
import json
import logging
import re
import sys
import time
from typing import Any, Literal, TextIO

_PLAIN = re.compile(r"[A-Za-z0-9_./:+@%,()-]+")
_LONGEST_VALUE = 200


def configure(style: Literal["text", "json"], *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all records of this process to `stream` (standard error by default) in one style, replacing earlier set-ups.

    May be called again, after a reload of the configuration.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    # What no line shows costs a look-up for every record; these are the switches that Python's logging HOWTO names.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # where the call stands
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """2026-11-30T17:40:00.123Z INFO proxy.lease: message key=value; a traceback on the lines after it."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if fields := _fields(record):
            line += "".join(
                [
                    f" {key}={value:.3f}" if isinstance(value, float) else f" {key}={_word(str(value))}"
                    for key, value in fields.items()
                ]
            )
        error = _exception(self, record)
        return f"{line}\n{error}" if error else line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the record's fields, and exception where there was one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        error = _exception(self, record)
        if error:
            entry["exception"] = error
        return json.dumps(entry, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    milliseconds = int(record.created * 1000)
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@functools.lru_cache(maxsize=4)
def _second(unix: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


@functools.lru_cache(maxsize=512)
def _word(text: str) -> str:
    """A value as one word; a client's own text (a model's name) cannot begin a new line or a new key."""
    if len(text) > _LONGEST_VALUE:
        text = text[:_LONGEST_VALUE] + "..."
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""

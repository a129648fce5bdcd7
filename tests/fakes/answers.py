"""What a fake model answers: deterministic bytes for each route, in the pieces in which they are sent."""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SSE = "text/event-stream"
JSON = "application/json"
_WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow")


@dataclass(frozen=True)
class Answer:
    """A 200: its type and its pieces; work is spread evenly, one share before each piece."""

    content_type: str
    pieces: Sequence[bytes]

    @property
    def streamed(self) -> bool:
        return len(self.pieces) > 1 or self.content_type == SSE

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


def words(model: str, prompt: str, count: int = 8) -> list[str]:
    """The text that `model` answers to `prompt`, always the same; joined without separators it is the whole."""
    digest = hashlib.sha256(f"{model}\n{prompt}".encode()).digest()
    picked = [_WORDS[digest[i % len(digest)] % len(_WORDS)] for i in range(count)]
    return [f"{word} " for word in picked[:-1]] + picked[-1:]


def text(model: str, prompt: str, count: int = 8) -> str:
    """The whole of `words`."""
    return "".join(words(model, prompt, count))


def vector(model: str, prompt: str, size: int = 8) -> list[float]:
    """An embedding of length one, of the model and the text alone."""
    raw = hashlib.sha256(f"{model}\n{prompt}".encode()).digest()[:size]
    norm = math.sqrt(sum(b * b for b in raw)) or 1.0
    return [b / norm for b in raw]


def speech(model: str, prompt: str, samples: int = 2400) -> bytes:
    """WAV, 24 kHz mono s16le: a tone whose pitch the text chooses, `samples` long."""
    pitch = 110 + sum(prompt.encode()) % 440
    pcm = b"".join(struct.pack("<h", int(9000 * math.sin(2 * math.pi * pitch * i / 24000))) for i in range(samples))
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(pcm), b"WAVE", b"fmt ", 16, 1, 1, 24000, 48000, 2, 16,
                       b"data", len(pcm))  # fmt: skip
    return head + pcm


def answer(route: str, model: str, fields: dict[str, Any], events: int = 8) -> Answer:
    """The answer of `route` (a path without /v1, /v or /upstream/<model>) to a body with these fields."""
    prompt = prompt_of(fields)
    said = words(model, prompt, events)
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": events}
    usage["total_tokens"] = sum(usage.values())
    stream = bool(fields.get("stream"))
    match route:
        case "/chat/completions":
            return _chat(model, said, usage, stream)
        case "/completions" | "/completion" | "/infill":
            base = {"id": "cmpl-fake", "object": "text_completion", "created": 0, "model": model}
            if stream:
                return _events(
                    [{**base, "choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in said]
                    + [{**base, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}]
                )
            return _json(
                {**base, "choices": [{"index": 0, "text": "".join(said), "finish_reason": "stop"}], "usage": usage}
            )
        case "/responses":
            return _responses(model, said, stream)
        case "/messages":
            return _messages(model, said, stream)
        case "/messages/count_tokens":
            return _json({"input_tokens": usage["prompt_tokens"]})
        case "/embeddings":
            given = fields.get("input", "")
            many = given if isinstance(given, list) else [given]
            data = [{"object": "embedding", "index": i, "embedding": vector(model, str(t))} for i, t in enumerate(many)]
            return _json({"object": "list", "model": model, "data": data, "usage": usage})
        case "/audio/speech":
            sound = speech(model, prompt)
            step = -(-len(sound) // events)
            return Answer("audio/wav", [sound[i : i + step] for i in range(0, len(sound), step)])
        case "/audio/voices":
            return _json({"voices": ["alba", "bruno"]})
        case "/audio/transcriptions":
            return _json({"text": text(model, prompt, events)})
        case "/rerank" | "/reranking":
            ranked = [{"index": i, "relevance_score": 1 / (i + 1)} for i, _ in enumerate(fields.get("documents", []))]
            return _json({"model": model, "results": ranked})
        case _:
            return _json({"model": model, "route": route})


def prompt_of(fields: dict[str, Any]) -> str:
    """The text that decides the answer: the last message, the prompt, the input, or the file's checksum."""
    messages = fields.get("messages")
    if isinstance(messages, list) and messages:
        content = messages[-1].get("content", "")
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    for name in ("prompt", "input", "query"):
        if name in fields:
            return fields[name] if isinstance(fields[name], str) else json.dumps(fields[name], sort_keys=True)
    return hashlib.sha256(fields["file"]).hexdigest() if isinstance(fields.get("file"), bytes) else ""


def event(data: dict[str, Any] | str, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def _json(data: dict[str, Any]) -> Answer:
    return Answer(JSON, [json.dumps(data).encode()])


def _events(data: Sequence[dict[str, Any]]) -> Answer:
    *most, last = map(event, data)
    return Answer(SSE, [*most, last + event("[DONE]")])


def _typed(data: Sequence[dict[str, Any]]) -> Answer:
    return Answer(SSE, [event(each, each["type"]) for each in data])


def _chat(model: str, said: list[str], usage: dict[str, int], stream: bool) -> Answer:
    base = {"id": "chatcmpl-fake", "created": 0, "model": model}
    if not stream:
        message = {"role": "assistant", "content": "".join(said)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return _json({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
    deltas: list[tuple[dict[str, str], str | None]] = [({"content": word}, None) for word in said]
    deltas[0] = ({"role": "assistant", **deltas[0][0]}, None)
    return _events([
        {**base, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": d, "finish_reason": why}]}
        for d, why in [*deltas, ({}, "stop")]
    ])  # fmt: skip


def _responses(model: str, said: list[str], stream: bool) -> Answer:
    part = {"type": "output_text", "text": "".join(said), "annotations": []}
    item = {"type": "message", "id": "msg-fake", "role": "assistant", "status": "completed", "content": [part]}
    done = {"id": "resp-fake", "object": "response", "model": model, "status": "completed", "output": [item]}
    if not stream:
        return _json(done)
    deltas = [{"type": "response.output_text.delta", "item_id": "msg-fake", "delta": word} for word in said]
    return _typed([*deltas, {"type": "response.completed", "response": done}])


def _messages(model: str, said: list[str], stream: bool) -> Answer:
    start = {"id": "msg-fake", "type": "message", "role": "assistant", "model": model, "stop_reason": None}
    usage = {"input_tokens": 1, "output_tokens": len(said)}
    if not stream:
        content = [{"type": "text", "text": "".join(said)}]
        return _json({**start, "content": content, "stop_reason": "end_turn", "usage": usage})
    deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": w}} for w in said]
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    first = {"type": "message_start", "message": {**start, "content": [], "usage": usage}}
    return _typed([first, block, *deltas, {"type": "content_block_stop", "index": 0}, end, {"type": "message_stop"}])

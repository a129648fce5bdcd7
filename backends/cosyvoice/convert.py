"""llm.pt to GGUF, in both layouts (layout.py says what they are).

What is written lies beside its final name until it is complete, so a run that is killed leaves no half file under a
name that anyone would load.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.cosyvoice import layout as keys
from backends.cosyvoice.checkpoint import Shapes, differences, official, read_tensors, shapes_of, summary
from backends.cosyvoice.ids import EOS, FILL, SOS, SPEECH_CODES, SPEECH_ROWS, TASK
from backends.cosyvoice.tokenizer import FOLDER, Vocabulary, read_vocabulary
from backends.errors import BackendUnavailable, InvalidInput

TYPES: Final = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f32")
"""Number formats of the weights. The k-quants are not among them: their blocks of 256 do not fit rows of 896."""

Weights = Mapping[str, NDArray[np.float32]]
Progress = Callable[[str, int, int], None]
"""Called with the name of the file that is being made, the bytes of it that exist, and those it will have."""

_TEXT_TABLE, _SPEECH_TABLE = "llm.model.model.embed_tokens.weight", "speech_embedding.weight"
_HEAD, _UNUSED = "llm_decoder.weight", "llm.model.lm_head.weight"
_LAYER = "llm.model.model.layers.{}."
_GGUF_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the weights' shapes do not say, from the Qwen2 configuration beside the tokenizer."""

    heads: int
    kv_heads: int
    rope_base: float
    norm_epsilon: float
    context: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the GGUF: its parts are stacked along the first axis."""

    name: str
    parts: tuple[NDArray[np.float32], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])


def convert(
    model_dir: Path,
    out: Path,
    type: str = "f16",
    progress: Progress | None = None,
    *,
    layouts: Sequence[str] = ("speech", "merged"),
    expected: Shapes | None = None,
) -> list[Path]:
    """Write `out`/cosyvoice3-speech-TYPE.gguf with its .embeddings.npy, and `out`/cosyvoice3-merged-TYPE.gguf.

    `expected`: names and shapes that llm.pt must have, by default those of the published one.
    Returns what was written. Raises InvalidInput (param "type"), and BackendUnavailable when a file is missing,
    broken or not what it should be; it then says which tensors differ.
    """
    if type not in TYPES:
        raise InvalidInput(f"type is {type!r}; it can be {', '.join(TYPES)}", param="type")
    weights = _load(model_dir / "llm.pt", official("llm") if expected is None else expected)
    sizes = _read_sizes(model_dir / FOLDER / "config.json")
    vocabulary = read_vocabulary(model_dir / FOLDER)
    out.mkdir(parents=True, exist_ok=True)
    tell = progress or (lambda file, done, total: None)
    written: list[Path] = []
    if "speech" in layouts:
        written += _write_speech(weights, sizes, out / f"cosyvoice3-speech-{type}.gguf", type, tell)
    if "merged" in layouts:
        written += _write_merged(weights, sizes, vocabulary, out / f"cosyvoice3-merged-{type}.gguf", type, tell)
    return written


def _write_speech(weights: Weights, sizes: _Sizes, path: Path, type: str, tell: Progress) -> list[Path]:
    embeddings = path.with_suffix(".embeddings.npy")
    table = np.concatenate([weights[name].astype(np.float16) for name in (_TEXT_TABLE, _SPEECH_TABLE)])
    with _complete(embeddings) as partial:
        tell(embeddings.name, 0, table.nbytes)
        with partial.open("wb") as file:
            np.save(file, table, allow_pickle=False)
        tell(embeddings.name, table.nbytes, table.nbytes)
    body = list(_body(weights))
    with _complete(path) as partial:
        writer = _writer(partial, "speech", SPEECH_ROWS, body, sizes)
        writer.add_tokenizer_model("none")
        writer.add_string(keys.KEY_EMBEDDINGS, embeddings.name)
        writer.add_string(keys.KEY_FINGERPRINT, keys.fingerprint(table))
        del table  # 0.3 GB
        ends = [
            _Tensor("token_embd.weight", (weights[_SPEECH_TABLE],)),
            _Tensor("output.weight", (weights[_HEAD],)),
        ]
        _write(writer, [*ends, *body], type, lambda done, total: tell(path.name, done, total))
    return [path, embeddings]


def _write_merged(
    weights: Weights, sizes: _Sizes, vocabulary: Vocabulary, path: Path, type: str, tell: Progress
) -> list[Path]:
    words = weights[_TEXT_TABLE]
    if vocabulary.size > len(words):
        raise BackendUnavailable(f"the tokenizer has {vocabulary.size} ids, the text table of llm.pt {len(words)} rows")
    body = list(_body(weights))
    with _complete(path) as partial:
        writer = _writer(partial, "merged", len(words) + SPEECH_ROWS, body, sizes)
        writer.add_uint32(keys.KEY_OFFSET, len(words))
        _add_vocabulary(writer, vocabulary, len(words))
        no_text = np.broadcast_to(np.float32(0), words.shape)  # text is never an answer
        ends = [
            _Tensor("token_embd.weight", (words, weights[_SPEECH_TABLE])),
            _Tensor("output.weight", (no_text, weights[_HEAD])),
        ]
        _write(writer, [*ends, *body], type, lambda done, total: tell(path.name, done, total))
    return [path]


def _load(path: Path, expected: Shapes) -> Weights:
    """The tensors as float32, mapped from the file where they are that already."""
    tensors = read_tensors(path, mmap=True)
    differing = differences(shapes_of(tensors), expected)
    if differing:
        raise BackendUnavailable(f"{path}: list differs from the published one: {summary(differing)}")
    return {name: value.float().numpy() for name, value in tensors.items() if name != _UNUSED}


def _read_sizes(path: Path) -> _Sizes:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _Sizes(
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            rope_base=config.get("rope_theta", 1e6),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            context=config.get("max_position_embeddings", 32768),
        )
    except OSError as error:
        raise BackendUnavailable(
            f"{path}: cannot be read ({error.strerror}); it says how many heads there are"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BackendUnavailable(f"{path}: not a Qwen2 configuration ({error!r})") from error


def _body(weights: Weights) -> Iterator[_Tensor]:
    """Everything between the embeddings and the head."""
    yield _Tensor("output_norm.weight", (weights["llm.model.model.norm.weight"],))
    layer = 0
    while (prefix := _LAYER.format(layer)) + "input_layernorm.weight" in weights:
        for name, value in weights.items():
            if name.startswith(prefix):
                module, _, kind = name.removeprefix(prefix).rpartition(".")
                yield _Tensor(f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}", (value,))
        layer += 1


def _writer(path: Path, layout: str, rows: int, body: list[_Tensor], sizes: _Sizes) -> Any:
    import gguf

    writer = gguf.GGUFWriter(path, keys.ARCHITECTURE)
    writer.add_name("CosyVoice3 language model")
    writer.add_string(keys.KEY_LAYOUT, layout)
    writer.add_vocab_size(rows)
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(body[0].shape[0])
    writer.add_block_count(sum(tensor.name.endswith("attn_norm.weight") for tensor in body))
    writer.add_feed_forward_length(next(t.shape[0] for t in body if t.name.endswith("ffn_gate.weight")))
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_rope_freq_base(sizes.rope_base)
    writer.add_layer_norm_rms_eps(sizes.norm_epsilon)
    return writer


def _add_vocabulary(writer: Any, vocabulary: Vocabulary, text_rows: int) -> None:
    """Names for all ids of the merged layout, so that other programs can show them and know where it ends."""
    import gguf

    named = {SOS: "<|speech_sos|>", EOS: "<|speech_eos|>", TASK: "<|speech_task|>", FILL: "<|speech_fill|>"}
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    names = [f"[PAD{id}]" for id in range(text_rows)]
    types = [unused] * text_rows
    for tokens, kind in ((vocabulary.tokens, normal), (vocabulary.special, control)):
        for name, id in tokens.items():
            names[id], types[id] = name, kind
    for code in range(SPEECH_ROWS):
        names.append(named.get(code, f"<|s_{code}|>"))
        types.append(normal if code < SPEECH_CODES else control)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(text_rows + EOS)


def _write(writer: Any, tensors: list[_Tensor], type: str, tell: Callable[[int, int], None]) -> None:
    """Write tensor by tensor, so that only one is in memory in its new form."""
    import gguf

    wanted = gguf.GGMLQuantizationType[type.upper()]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"])
    kinds = []
    for tensor in tensors:
        kind = wanted if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
        kinds.append((kind, shape))
    total = sum(int(np.prod(shape)) for _, shape in kinds)
    done = 0
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, (kind, shape) in zip(tensors, kinds, strict=True):
            tell(done, total)
            data = np.empty(int(np.prod(shape)), np.uint8)
            filled = 0
            for block in _blocks(tensor.parts):
                encoded = gguf.quantize(block, kind).view(np.uint8).ravel()
                data[filled : filled + encoded.size] = encoded
                filled += encoded.size
            writer.write_tensor_data(data)
            done += data.nbytes
        tell(done, total)
    finally:
        writer.close()


def _blocks(parts: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    for part in parts:
        for start in range(0, len(part), _BLOCK_ROWS):
            yield np.ascontiguousarray(part[start : start + _BLOCK_ROWS])


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` if the block ends well, and goes away if not."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

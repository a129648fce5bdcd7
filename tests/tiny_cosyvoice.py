"""A complete CosyVoice3 model folder, small enough to build and run in a test.

The flow and the vocoder are the golden tiny ones; the language model, the tokenizer and the two ONNX models are
random, with the names, inputs, outputs and ids of the published ones. Nothing it says is speech.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from backends.cosyvoice.checkpoint import official
from backends.cosyvoice.convert import convert
from backends.cosyvoice.tokenizer import FOLDER

DATA = Path(__file__).parent / "data" / "cosyvoice3"
WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 2, 1, 128
_SMALLER = {896: WIDTH, 128: WIDTH * KV_HEADS // HEADS, 4864: INNER}


def build(folder: Path, *, layout: str = "speech", seed: int = 0) -> Path:
    """Fill `folder` with a model whose GGUF has the given layout ("speech", "merged", "both" or "none")."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("flow.pt", "hift.pt"):
        shutil.copyfile(DATA / "tiny" / name, folder / name)
    (folder / "cosyvoice3.yaml").write_text("sample_rate: 24000\ntoken_frame_rate: 25\n")
    write_tokenizer(folder / FOLDER)
    write_llm(folder / "llm.pt", seed)
    write_onnx(folder, seed)
    if layout != "none":
        layouts = ("speech", "merged") if layout == "both" else (layout,)
        convert(folder, folder, "f16", layouts=layouts, expected=tiny_shapes())
    return folder


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    """The names of llm.pt with the tiny model's shapes; the vocabularies keep their real sizes."""
    return {
        name: tuple(_SMALLER.get(size, size) for size in shape)
        for name, shape in official("llm").items()
        if not name.startswith("llm.model.model.layers.") or int(name.split(".")[4]) < LAYERS
    }


def write_llm(path: Path, seed: int = 0, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
    """A random llm.pt."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in (shapes or tiny_shapes()).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        else:
            # Strong enough for a position to matter to the scores, and for some tokens to be much likelier than others.
            scale = 0.3 if name == "llm_decoder.weight" else 1.0 if "embed" in name else 0.15
            weights[name] = torch.randn(shape, generator=generator) * scale
    tied = "llm.model.lm_head.weight"
    if tied in weights:
        weights[tied] = weights["llm.model.model.embed_tokens.weight"]
    torch.save(weights, path)


def write_tokenizer(folder: Path) -> None:
    """Bytes and a few words as vocabulary; the special tokens of Qwen2 at their real ids."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {character: id for id, character in enumerate(_byte_characters())}
    merges = []
    for left, right in ("th", "he", "in", "er", "an", "re", "on", "at", ("th", "e"), ("Ġ", "the"), ("in", "g")):
        merges.append(f"{left} {right}")
        tokens[left + right] = len(tokens)
    (folder / "vocab.json").write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    special = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|endofprompt|>": 151646}
    added = {str(id): {"content": name, "special": True} for name, id in special.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    sizes = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 32768,
    }
    (folder / "config.json").write_text(json.dumps(sizes))


def write_onnx(folder: Path, seed: int = 0) -> None:
    """campplus.onnx: fbank (1, T, 80) -> (1, 192). speech_tokenizer_v3.onnx: log-mel (1, 128, T) -> (1, T / 4)."""
    random = np.random.default_rng(seed)
    speaker = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["input"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("MatMul", ["mean", "weight"], ["output"]),
        ],
        "speaker",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["B", "T", 80])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", 192])],
        [numpy_helper.from_array(random.normal(size=(80, 192)).astype(np.float32), "weight")],
    )
    _save(speaker, folder / "campplus.onnx")
    kernel = random.normal(size=(81, 128, 4)).astype(np.float32)
    tokens = helper.make_graph(
        [
            helper.make_node("Conv", ["feats", "kernel"], ["scores"], strides=[4]),
            helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
            helper.make_node("Mul", ["best", "eighty_one"], ["spread"]),
            helper.make_node("Cast", ["feats_length"], ["frames"], to=TensorProto.INT64),
            helper.make_node("Div", ["frames", "four"], ["count"]),
            helper.make_node("Slice", ["spread", "zero", "count", "one"], ["cut"]),
            helper.make_node("Cast", ["cut"], ["indices"], to=TensorProto.INT32),
        ],
        "tokens",
        [
            helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, 128, "T"]),
            helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
        ],
        [helper.make_tensor_value_info("indices", TensorProto.INT32, [1, "N"])],
        [
            numpy_helper.from_array(kernel, "kernel"),
            *(
                numpy_helper.from_array(np.array([value], np.int64), name)
                for name, value in (("eighty_one", 81), ("four", 4), ("zero", 0), ("one", 1))
            ),
        ],
    )
    _save(tokens, folder / "speech_tokenizer_v3.onnx")


def _save(graph: onnx.GraphProto, path: Path) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def _byte_characters() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(others))]

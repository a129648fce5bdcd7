import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from backends.cosyvoice.convert import TYPES, convert
from backends.cosyvoice.ids import SPEECH_ROWS, TEXT_ROWS
from backends.cosyvoice.layout import read_layout
from backends.cosyvoice.llama import LlamaFile
from backends.cosyvoice.speech_lm import LMPrompt, open_speech_lm
from backends.cosyvoice.tokenizer import FOLDER
from backends.errors import BackendUnavailable, InvalidInput
from tests.tiny_cosyvoice import tiny_shapes, write_llm, write_tokenizer

SHAPES = tiny_shapes()
NAMES = {
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / FOLDER)
    write_llm(tmp_path / "llm.pt")
    return tmp_path


def test_the_weights_arrive_unchanged(model: Path) -> None:
    speech, embeddings = convert(model, model / "out", "f32", layouts=["speech"], expected=SHAPES)
    weights = {name: value.numpy() for name, value in torch.load(model / "llm.pt").items()}
    found = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(speech).tensors
    }
    np.testing.assert_array_equal(found.pop("token_embd.weight"), weights["speech_embedding.weight"])
    np.testing.assert_array_equal(found.pop("output.weight"), weights["llm_decoder.weight"])
    np.testing.assert_array_equal(found.pop("output_norm.weight"), weights["llm.model.model.norm.weight"])
    for theirs, ours in NAMES.items():
        for layer, kind in itertools.product(range(2), ["weight", "bias"]):
            if (name := f"llm.model.model.layers.{layer}.{theirs}.{kind}") in weights:
                np.testing.assert_array_equal(found.pop(f"blk.{layer}.{ours}.{kind}"), weights[name])
    assert not found
    tables = [weights["llm.model.model.embed_tokens.weight"], weights["speech_embedding.weight"]]
    np.testing.assert_array_equal(np.load(embeddings), np.concatenate(tables).astype(np.float16))


def test_the_merged_vocabulary_names_every_id(model: Path) -> None:
    (merged,) = convert(model, model / "out", "q4_0", layouts=["merged"], expected=SHAPES)
    file = LlamaFile(merged)
    names = [file.text(id) for id in range(file.rows)]
    file.close()
    assert len(names) == len(set(names)) == TEXT_ROWS + SPEECH_ROWS
    assert names[151646] == "<|endofprompt|>"
    assert names[TEXT_ROWS : TEXT_ROWS + 2] == ["<|s_0|>", "<|s_1|>"]
    assert names[158497:158500] == ["<|speech_sos|>", "<|speech_eos|>", "<|speech_task|>"]


@pytest.mark.parametrize("type", TYPES)
def test_every_type_can_be_loaded_and_speaks(model: Path, type: str) -> None:
    speech, _ = convert(model, model / "out", type, layouts=["speech"], expected=SHAPES)
    lm = open_speech_lm(speech, context=512, threads=1, gpu_layers=0, kept_bytes=0)
    assert len(list(lm.generate(LMPrompt((1, 2, 3), 2, 3), seed=0, stopped=lambda: False))) >= 6
    lm.close()


def test_progress_goes_up_to_the_size_of_each_file(model: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    convert(
        model,
        model / "out",
        "q8_0",
        lambda file, done, total: told.setdefault(file, []).append((done, total)),
        expected=SHAPES,
    )
    assert list(told) == [
        "cosyvoice3-speech-q8_0.embeddings.npy",
        "cosyvoice3-speech-q8_0.gguf",
        "cosyvoice3-merged-q8_0.gguf",
    ]
    for steps in told.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def test_a_run_that_dies_leaves_no_file_that_anyone_would_load(model: Path) -> None:
    class Killed(BaseException):
        pass

    def die(file: str, done: int, total: int) -> None:
        if "speech-f16.gguf" in file and done > total / 2:
            raise Killed

    with pytest.raises(Killed):
        convert(model, model / "out", "f16", die, expected=SHAPES)
    assert [path.name for path in (model / "out").iterdir()] == ["cosyvoice3-speech-f16.embeddings.npy"]


def test_a_new_conversion_replaces_the_old_one(model: Path) -> None:
    convert(model, model / "out", "f16", expected=SHAPES)
    write_llm(model / "llm.pt", seed=1)
    speech, embeddings, merged = convert(model, model / "out", "f16", expected=SHAPES)
    assert sorted((model / "out").iterdir()) == sorted([speech, embeddings, merged])
    assert read_layout(speech).embeddings is not None


def test_tensors_that_differ_from_the_published_list_are_named(model: Path) -> None:
    weights = torch.load(model / "llm.pt")
    weights["llm_decoder.bias"] = torch.zeros(SPEECH_ROWS)
    del weights["llm.model.model.norm.weight"]
    weights["speech_embedding.weight"] = weights["speech_embedding.weight"][:6561].clone()
    torch.save(weights, model / "llm.pt")
    with pytest.raises(BackendUnavailable) as caught:
        convert(model, model / "out", expected=SHAPES)
    message = str(caught.value)
    assert "llm.pt: list differs from the published one" in message
    assert "llm.model.model.norm.weight [64] is missing" in message
    assert "llm_decoder.bias [6761] is not expected" in message
    assert "speech_embedding.weight is [6561, 64], not [6761, 64]" in message
    assert not (model / "out").exists()


def test_by_default_the_published_shapes_are_wanted(model: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"list differs.* and \d+ more"):
        convert(model, model / "out")


def test_a_checkpoint_in_another_precision_is_fine(model: Path) -> None:
    torch.save({name: value.bfloat16() for name, value in torch.load(model / "llm.pt").items()}, model / "llm.pt")
    speech, _ = convert(model, model / "out", "f32", layouts=["speech"], expected=SHAPES)
    head = next(tensor for tensor in gguf.GGUFReader(speech).tensors if tensor.name == "output.weight")
    np.testing.assert_array_equal(head.data, torch.load(model / "llm.pt")["llm_decoder.weight"].float().numpy())


def test_a_missing_or_truncated_checkpoint_is_named(model: Path) -> None:
    content = (model / "llm.pt").read_bytes()
    (model / "llm.pt").write_bytes(content[:100_000])
    with pytest.raises(BackendUnavailable, match=r"llm.pt cannot be read as a torch file of 100000 bytes"):
        convert(model, model / "out", expected=SHAPES)
    (model / "llm.pt").unlink()
    with pytest.raises(BackendUnavailable, match=r"llm.pt is missing"):
        convert(model, model / "out", expected=SHAPES)


def test_a_missing_configuration_is_named(model: Path) -> None:
    (model / FOLDER / "config.json").unlink()
    with pytest.raises(BackendUnavailable, match=r"config.json: cannot be read"):
        convert(model, model / "out", expected=SHAPES)


def test_an_unknown_type_is_refused(model: Path) -> None:
    with pytest.raises(InvalidInput, match="it can be f16, q8_0") as caught:
        convert(model, model / "out", "q4_k_m", expected=SHAPES)
    assert caught.value.param == "type"

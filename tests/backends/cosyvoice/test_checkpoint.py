"""Model files: strictly loaded, or refused with the file's name and what would be right."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.cosyvoice import checkpoint
from backends.cosyvoice.checkpoint import load_flow_network, load_hift_network
from backends.cosyvoice.flow import FlowNetwork
from backends.cosyvoice.hift import HiFT
from backends.errors import BackendUnavailable
from tests.golden import DATA, FLOW, HIFT

PREFIXED = "generator."


def tensors(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


def saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize("part", ["flow", "hift", "llm"])
def test_the_packaged_lists_are_the_published_ones(part: checkpoint.Part) -> None:
    wanted = json.loads((DATA / f"official_{part}_keys.json").read_text())["tensors"]
    assert checkpoint.official(part) == {name: tuple(entry["shape"]) for name, entry in wanted.items()}


def test_a_network_of_the_published_sizes_has_the_published_names_and_shapes() -> None:
    flow, hift = checkpoint.official("flow"), checkpoint.official("hift")
    with torch.device("meta"):
        network = FlowNetwork(checkpoint.flow_dims(flow))
        folded = checkpoint.fold_weight_norm({name: torch.empty(shape) for name, shape in hift.items()})
        vocoder = HiFT(checkpoint.hift_dims(checkpoint.shapes_of(folded)))
    assert checkpoint.differences(checkpoint.shapes_of(network.state_dict()), flow) == []
    assert sum(tensor.numel() for tensor in network.state_dict().values()) == 332_257_120
    folded_shapes = checkpoint.shapes_of(folded)
    assert checkpoint.differences(checkpoint.shapes_of(vocoder.state_dict()), folded_shapes) == []


def test_other_sizes_than_the_published_ones_are_loaded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_flow_network(FLOW)
    assert "flow.pt: list differs" in caplog.text


@pytest.mark.parametrize("change", ["prefix", "older", "plain"])
def test_every_way_to_write_a_vocoder_gives_the_same_weights(tmp_path: Path, change: str) -> None:
    state = tensors(HIFT)
    if change == "prefix":
        state = {f"{PREFIXED}{name}": tensor for name, tensor in state.items()}
    elif change == "older":
        state = {
            name.replace(".parametrizations.weight.original0", ".weight_g").replace(
                ".parametrizations.weight.original1", ".weight_v"
            ): tensor
            for name, tensor in state.items()
        }
    else:
        state = checkpoint.fold_weight_norm(state)
    found = load_hift_network(saved(tmp_path / "hift.pt", state)).state_dict()
    wanted = load_hift_network(HIFT).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("load", [load_flow_network, load_hift_network])
def test_a_missing_file_is_named(tmp_path: Path, load) -> None:
    with pytest.raises(BackendUnavailable, match=r"x\.pt is missing"):
        load(tmp_path / "x.pt")


@pytest.mark.parametrize("size", [0, 100, 200_000, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "flow.pt"
    path.write_bytes(FLOW.read_bytes()[:size])
    with pytest.raises(BackendUnavailable, match=r"flow\.pt cannot be read as a torch file.*cut short"):
        load_flow_network(path)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x04.", b"<html>"])
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "flow.pt"
    path.write_bytes(content)
    with pytest.raises(BackendUnavailable, match=r"flow\.pt"):
        load_flow_network(path)


@pytest.mark.parametrize("content", [[1, 2], {"model": {"a": torch.zeros(1)}}])
def test_a_file_that_holds_no_plain_tensors_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(BackendUnavailable, match="dictionary of tensors"):
        load_flow_network(saved(tmp_path / "flow.pt", content))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"cannot be read"):
        load_flow_network(saved(tmp_path / "flow.pt", {"path": Path("somewhere")}))


@pytest.mark.parametrize(("load", "path"), [(load_flow_network, HIFT), (load_hift_network, FLOW)])
def test_the_file_of_another_network_is_refused_with_the_list(load, path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"not a CosyVoice 3 .*list differs: .* is missing; .*more"):
        load(path)


def test_each_difference_to_the_right_list_is_said(tmp_path: Path) -> None:
    state = tensors(FLOW)
    del state["decoder.estimator.proj_out.bias"]
    state["spk_embed_affine_layer.weight"] = torch.zeros(80, 256)
    state["encoder.extra"] = torch.zeros(3)
    with pytest.raises(BackendUnavailable, match="list differs") as caught:
        load_flow_network(saved(tmp_path / "flow.pt", state))
    message = str(caught.value)
    assert "decoder.estimator.proj_out.bias [80] is missing" in message
    assert "spk_embed_affine_layer.weight is [80, 256], not [80, 192]" in message
    assert "encoder.extra [3] is not expected" in message


@pytest.mark.parametrize("half", ["original0", "original1"])
def test_half_a_normalised_weight_is_refused(tmp_path: Path, half: str) -> None:
    state = tensors(HIFT)
    del state[f"conv_post.parametrizations.weight.{half}"]
    with pytest.raises(BackendUnavailable, match=f"conv_post.parametrizations.weight.{half}.* is missing"):
        load_hift_network(saved(tmp_path / "hift.pt", state))


def test_an_incomplete_folder_names_all_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "flow.pt").touch()
    with pytest.raises(BackendUnavailable, match=r"missing hift\.pt \(mel to audio\), campplus\.onnx"):
        checkpoint.find(tmp_path, ["flow.pt", "hift.pt", "campplus.onnx"])
    assert checkpoint.find(tmp_path, ["flow.pt"]) == {"flow.pt": tmp_path / "flow.pt"}


SETTINGS = """
__set_seed1: !apply:random.seed [1986]
sample_rate: 24000
token_frame_rate: 25
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    llm_input_size: !ref <llm_input_size>
    parts: !new:list [1, 2]
"""


def test_settings_are_read_without_building_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "cosyvoice3.yaml"
    path.write_text(SETTINGS)
    checkpoint.check_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SETTINGS.replace("24000", "22050"), "sample_rate is 22050, not 24000"),
        ("a: [", "cannot be read as YAML"),
        ("just words", "no settings"),
        ("a: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_settings_of_another_model_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cosyvoice3.yaml"
    path.write_text(text)
    with pytest.raises(BackendUnavailable, match=message):
        checkpoint.check_yaml(path)

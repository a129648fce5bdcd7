"""Find, check and strictly load the published model's torch files.

A file is read as plain tensors (no pickled code runs), its sizes are deduced from the shapes, and every name and shape
must then be the one that these sizes ask for. A file that is missing, cut short or of another model raises
`BackendUnavailable`, which names the file and what would be right. The lists in `official/` hold the names and shapes
of the published sizes; a file that agrees with itself but not with them is loaded with a warning "list differs".
"""

import importlib.resources
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from backends.cosyvoice.dit import DiTDims
from backends.cosyvoice.flow import Flow, FlowDims, FlowNetwork
from backends.cosyvoice.hift import HiFT, HiFTDims
from backends.cosyvoice.noise import FlowNoise, SourceNoise
from backends.cosyvoice.vocoder import Vocoder
from backends.errors import BackendUnavailable

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
Part = Literal["flow", "hift", "llm"]

PARTS = {
    "cosyvoice3.yaml": "the model's settings",
    "flow.pt": "tokens to mel",
    "hift.pt": "mel to audio",
    "llm.pt": "text to tokens",
    "campplus.onnx": "the speaker embedding",
    "speech_tokenizer_v3.onnx": "the speech tokens of a prompt",
    "CosyVoice-BlankEN": "the text tokenizer's folder",
}
LISTED_DIFFERENCES = 5
WEIGHT_NORM = ".parametrizations.weight.original"
YAML_NUMBERS = {"sample_rate": 24000, "token_frame_rate": 25, "token_mel_ratio": 2, "spk_embed_dim": 192}


def find(model_dir: Path, names: Iterable[str]) -> dict[str, Path]:
    """Paths of files or folders (keys of `PARTS`) in a model folder. Raises BackendUnavailable naming all missing."""
    paths = {name: model_dir / name for name in names}
    missing = [f"{name} ({PARTS.get(name, 'part of the model')})" for name, path in paths.items() if not path.exists()]
    if missing:
        raise BackendUnavailable(
            f"{model_dir} is not a complete CosyVoice 3 model folder: missing {', '.join(missing)}"
        )
    return paths


def official(part: Part) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published sizes. In the file, `{n}` in a name stands for 0 to n - 1."""
    text = importlib.resources.files("backends.cosyvoice").joinpath("official", f"{part}.json").read_text("utf-8")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in json.loads(text).items():
        match = re.search(r"\{(\d+)\}", name)
        count = int(match[1]) if match else 1
        for index in range(count):
            shapes[name.replace(match[0], str(index)) if match else name] = tuple(shape)
    return shapes


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def differences(found: Shapes, wanted: Shapes) -> list[str]:
    """Each difference of two lists of names and shapes in words: missing, shaped otherwise, not expected."""
    lines = [f"{name} {list(shape)} is missing" for name, shape in wanted.items() if name not in found]
    lines += [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return lines + [f"{name} {list(shape)} is not expected" for name, shape in found.items() if name not in wanted]


def summary(lines: list[str]) -> str:
    """The first few differences and how many more there are."""
    more = len(lines) - LISTED_DIFFERENCES
    return "; ".join(lines[:LISTED_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def read_tensors(path: Path, *, mmap: bool = False) -> dict[str, Tensor]:
    """The tensors of a torch file, on the CPU; `mmap` leaves them in the file. Raises BackendUnavailable."""
    if not path.is_file():
        raise BackendUnavailable(f"{path} is missing ({PARTS.get(path.name, 'part of the model')})")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever the reader stumbles over: these are not the bytes of a torch file
        reason = str(error).partition("\n")[0][:200]
        raise BackendUnavailable(
            f"{path} cannot be read as a torch file of {path.stat().st_size} bytes (cut short, or another format): "
            f"{type(error).__name__}: {reason}"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BackendUnavailable(f"{path} is a torch file, but not a plain dictionary of tensors")
    return state


def load_flow_network(path: Path) -> FlowNetwork:
    """flow.pt as a network on the CPU, with the layers of the time."""
    tensors = read_tensors(path)
    shapes = shapes_of(tensors)
    try:
        with torch.device("meta"):
            network = FlowNetwork(flow_dims(shapes))
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise foreign(path, "flow", shapes) from error
    load_strictly(path, "flow", network, tensors, shapes)
    return network


def load_hift_network(path: Path) -> HiFT:
    """hift.pt as a network on the CPU: trainer's prefix removed, weight normalisation folded."""
    tensors = modern_names(read_tensors(path))
    shapes = shapes_of(tensors)
    try:
        folded = fold_weight_norm(tensors)
        with torch.device("meta"):
            network = HiFT(hift_dims(shapes_of(folded)))
    except (KeyError, IndexError, RuntimeError) as error:
        raise foreign(path, "hift", shapes) from error
    load_strictly(path, "hift", network, folded, shapes)
    return network


def load_flow(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    max_cached_seconds: float | None = None,
    noise: FlowNoise | None = None,
) -> Flow:
    """flow.pt, ready to use; the options are those of `Flow`. Raises BackendUnavailable."""
    exact_convolutions(device)
    return Flow(
        load_flow_network(path),
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        max_cached_seconds=max_cached_seconds,
        noise=noise,
    )


def load_vocoder(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    noise: SourceNoise | None = None,
) -> Vocoder:
    """hift.pt, ready to use; the options are those of `Vocoder`. Raises BackendUnavailable."""
    exact_convolutions(device)
    return Vocoder(load_hift_network(path), device=device, dtype=dtype, noise=noise)


def exact_convolutions(device: torch.device | str) -> None:
    """Float32 means float32: cuDNN would round a convolution's inputs to ten bits unless told otherwise."""
    if torch.device(device).type == "cuda":
        torch.backends.cudnn.allow_tf32 = False


def flow_dims(shapes: Shapes) -> FlowDims:
    """The sizes of a flow from its shapes. Raises KeyError, IndexError or ZeroDivisionError for another model's."""
    estimator = "decoder.estimator."
    depth = len({name.split(".")[3] for name in shapes if name.startswith(f"{estimator}transformer_blocks.")})
    first = f"{estimator}transformer_blocks.0."
    dim, per_group, _ = shapes[f"{estimator}input_embed.conv_pos_embed.conv1.0.weight"]
    dim_head = 2 * shapes[f"{estimator}rotary_embed.inv_freq"][0]
    dit = DiTDims(
        dim=dim,
        depth=depth,
        heads=shapes[f"{first}attn.to_q.weight"][0] // dim_head,
        dim_head=dim_head,
        ff_dim=shapes[f"{first}ff.ff.0.0.weight"][0],
        position_groups=dim // per_group,
    )
    return FlowDims(shapes["input_embedding.weight"][0], shapes["pre_lookahead_layer.conv1.weight"][0], dit)


def hift_dims(shapes: Shapes) -> HiFTDims:
    """The sizes of a vocoder from its folded shapes. Raises KeyError for another model's."""
    return HiFTDims(shapes["conv_pre.weight"][0], shapes["f0_predictor.condnet.0.weight"][0])


def modern_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """hift.pt under today's names: no `generator.`, and weight_g, weight_v as older torch wrote them renamed."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("generator.", "")
        name = re.sub(r"\.weight_g$", f"{WEIGHT_NORM}0", name)
        renamed[re.sub(r"\.weight_v$", f"{WEIGHT_NORM}1", name)] = tensor
    return renamed


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """weight = g * v / |v| in float64, the norm over all axes but the first; other tensors as they are.

    Raises KeyError where one of a pair is missing, RuntimeError where their shapes do not go together.
    """
    folded = {}
    for name, tensor in tensors.items():
        base, norm, which = name.partition(WEIGHT_NORM)
        if not norm:
            folded[name] = tensor
        elif which == "1":
            gain = tensors[f"{base}{WEIGHT_NORM}0"].double()
            vector = tensor.double()
            if gain.shape != (len(vector), 1, 1):
                raise RuntimeError(f"{base}: gain {tuple(gain.shape)} for weights {tuple(vector.shape)}")
            folded[f"{base}.weight"] = gain * vector / torch.linalg.vector_norm(vector, dim=(1, 2), keepdim=True)
        else:
            tensors[f"{base}{WEIGHT_NORM}1"]  # a gain alone is as wrong as a weight alone
    return folded


def load_strictly(path: Path, part: Part, network: nn.Module, tensors: dict[str, Tensor], found: Shapes) -> None:
    """Put the tensors into a network without storage; `found`: names and shapes as the file has them."""
    own = differences(shapes_of(tensors), shapes_of(network.state_dict()))
    if own:
        raise BackendUnavailable(f"{path}: list differs from that of a CosyVoice 3 {part}: {summary(own)}")
    published = differences(found, official(part))
    if published:
        logger.warning("%s: list differs from the published one, loaded all the same: %s", path, summary(published))
    network.load_state_dict(tensors, strict=True, assign=True)
    network.eval()


def foreign(path: Path, part: Part, found: Shapes) -> BackendUnavailable:
    """The error for a file whose sizes cannot even be deduced."""
    lines = differences(found, official(part))
    return BackendUnavailable(f"{path} is not a CosyVoice 3 {part}: list differs: {summary(lines)}")


def check_yaml(path: Path) -> None:
    """Refuse a model whose settings contradict what this code computes (a missing setting does not).

    The file may name Python objects to build: none is built. Raises BackendUnavailable.
    """
    try:
        settings = yaml.load(path.read_text("utf-8"), Loader=InertLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BackendUnavailable(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(settings, dict):
        raise BackendUnavailable(f"{path} holds no settings of a CosyVoice 3 model")
    wrong = [
        f"{name} is {settings[name]!r}, not {number}"
        for name, number in YAML_NUMBERS.items()
        if name in settings and settings[name] != number
    ]
    if wrong:
        raise BackendUnavailable(f"{path} is not that of a CosyVoice 3 model: {'; '.join(wrong)}")


class InertLoader(yaml.SafeLoader):
    """Reads tagged nodes as the plain data under the tag."""


def _plain(loader: InertLoader, _suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return node.value


InertLoader.add_multi_constructor("!", _plain)

"""The options of a cosyvoice backend, as config.yaml may give them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from backends.errors import InvalidInput

# A path is written as text in YAML, which strictness would refuse.
_Path = Annotated[Path, Field(strict=False)]


class CosyVoiceOptions(BaseModel):
    """Every option with its default; a key that is not here is an error, and so is a value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    model_dir: _Path
    """The folder of Fun-CosyVoice3-0.5B."""
    llm: _Path | None = None
    """The GGUF of the language model; None: the one in model_dir, the speech layout first."""
    voice: str = ""
    """Id of the default voice, warmed at start; empty: the oldest one."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Where flow and vocoder run; auto: cuda, else mps, else cpu."""
    dtype: Literal["float32", "float16"] = "float32"
    """Precision of the flow; float16 on cuda only."""
    cache_dtype: Literal["same", "float16"] = "same"
    """Precision of what the flow keeps of a voice and of finished speech."""
    gpu_layers: int | None = None
    """Layers of the language model on the GPU, -1 for all; None: all, and none where device is cpu."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the language model and the voice encoder; None: one per core, at most 8."""
    context: Annotated[int, Field(ge=256, le=32768)] = 4096
    """Positions of the language model: prompt and answer together. 12 KB each."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of requests that bring none; None: each sounds a little different."""
    streaming: bool = True
    """False: a piece is computed at once when all its tokens exist, as the published model does without streaming."""
    first_hop: Literal["normal", "early"] = "normal"
    """early: the first audio after fewer tokens where the voice's prompt allows it."""
    final_chunk: Literal["causal", "full"] = "causal"
    """full: the last chunk as the published model computes it, from nothing and not continuous with the rest."""
    max_cached_seconds: Annotated[float, Field(ge=1)] | None = 30.0
    """Finished speech that a new chunk of the same piece still sees (an approximation past that); None: all of it."""
    voice_cache_mb: Annotated[int, Field(ge=0)] = 2048
    """Memory on the device for voices that are ready; a voice of 5 s takes 721 MB in float32, 361 in float16."""
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 64
    """Host memory for the language model's state after the constant parts of prompts, about 0.5 MB each."""
    normalize: bool = True
    """Numbers and dates to words by the wetext package, where it is installed."""

    @model_validator(mode="after")
    def _half_precision_needs_cuda(self) -> "CosyVoiceOptions":
        if self.dtype == "float16" and self.device in ("cpu", "mps"):
            raise ValueError(f"dtype float16 needs device cuda, not {self.device}")
        return self


def parse(given: Mapping[str, Any], resolve: Callable[[str], Path] = Path) -> CosyVoiceOptions:
    """`resolve` makes a path absolute. Raises InvalidInput whose `param` is the option's name."""
    try:
        options = CosyVoiceOptions.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "dtype"
        known = ", ".join(CosyVoiceOptions.model_fields)
        reason = f"unknown option; options: {known}" if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidInput(f"{name}: {reason}", param=name) from error
    model_dir = resolve(str(options.model_dir))
    if not model_dir.is_dir():
        raise InvalidInput(f"model_dir: there is no folder {model_dir}", param="model_dir")
    llm = None if options.llm is None else resolve(str(options.llm))
    if llm is not None and not llm.is_file():
        raise InvalidInput(f"llm: there is no file {llm}", param="llm")
    return options.model_copy(update={"model_dir": model_dir, "llm": llm})

"""One llama.cpp model with one context, through the library's C functions.

Nothing here knows about speech: positions go in as token ids or as embeddings, the logits of the last position
come out. All positions belong to sequence 0. Not thread-safe: the owner holds a lock around every call.
"""

import ctypes
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from backends.errors import BackendUnavailable, Cancelled, SynthesisFailed

logger = logging.getLogger(__name__)

_NO_ROOM, _ABORTED = 1, 2  # answers of llama_decode: 0 is good, the rest are errors
_LOG_ERROR = 4


class LlamaFile:
    """What a GGUF file says about itself: metadata and vocabulary, read without its weights. Close it."""

    def __init__(self, path: Path) -> None:
        """Raises BackendUnavailable when llama.cpp cannot read the file."""
        self.path = path
        self._model = _open_model(path, vocab_only=True, gpu_layers=0)
        api = _library().api
        self._vocab = api.llama_model_get_vocab(self._model)
        self.rows = int(api.llama_vocab_n_tokens(self._vocab))
        # Asked for a text, a vocabulary without texts aborts the whole process.
        self.has_texts = bool(api.llama_vocab_type(self._vocab) != api.LLAMA_VOCAB_TYPE_NONE)

    def close(self) -> None:
        """Give the memory back; call once."""
        _library().api.llama_model_free(self._model)

    def get(self, key: str) -> str | None:
        """A metadata value as text, None where the file has no such key."""
        buffer = ctypes.create_string_buffer(1024)
        read = _library().api.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if read >= 0 else None

    def text(self, token: int) -> str:
        """The text of a vocabulary entry, "" where the vocabulary has none."""
        if not self.has_texts:
            return ""
        raw: bytes = _library().api.llama_vocab_get_text(self._vocab, token)
        return raw.decode(errors="replace")


class Llama:
    """Weights and a context for one sequence of at most `context` positions."""

    def __init__(self, path: Path, *, context: int, batch: int, threads: int, gpu_layers: int) -> None:
        """Raises BackendUnavailable. `gpu_layers` below 0 means all; `batch`: most positions of one computation."""
        api = _library().api
        self._model = _open_model(path, vocab_only=False, gpu_layers=gpu_layers)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context, batch, batch, 1
        params.n_outputs_max = 1  # else room for the scores of a whole batch is reserved on the device
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            api.llama_model_free(self._model)
            raise BackendUnavailable(
                f"{path}: llama.cpp cannot make a context of {context} positions: {_library().last_error()}"
            )
        self.context = int(api.llama_n_ctx(self._context))
        self.width = int(api.llama_model_n_embd(self._model))
        self.rows = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self.position = 0
        self._memory = api.llama_get_memory(self._context)
        self._batch_size = batch
        self._tokens = _Batch(batch, 0)
        self._embeddings = _Batch(batch, self.width)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give all memory back. The object is of no use afterwards."""
        if not self._closed:
            self._closed = True
            api = _library().api
            self._tokens.close()
            self._embeddings.close()
            api.llama_free(self._context)
            api.llama_model_free(self._model)

    def rewind(self, position: int) -> None:
        """Forget everything from `position` on."""
        if not _library().api.llama_memory_seq_rm(self._memory, 0, position, -1):
            raise SynthesisFailed(f"llama.cpp cannot go back to position {position}")
        self.position = position

    def decode_token(self, token: int) -> NDArray[np.float32]:
        """Append one token; the logits (rows,) of what comes next. The array is overwritten by the next call."""
        self._tokens.fill(self.position, tokens=[token])
        self._decode(self._tokens, 1)
        return self._logits()

    def decode_tokens(self, tokens: Sequence[int], stopped: Callable[[], bool]) -> NDArray[np.float32]:
        """Append several tokens; as `decode_token`. Raises Cancelled soon after `stopped()` turns true."""
        return self._prefill(self._tokens, len(tokens), lambda part: {"tokens": tokens[part]}, stopped)

    def decode_embeddings(self, rows: NDArray[np.float32], stopped: Callable[[], bool]) -> NDArray[np.float32]:
        """Append positions given as embeddings, shape (positions, width); as `decode_tokens`."""
        return self._prefill(self._embeddings, len(rows), lambda part: {"embeddings": rows[part]}, stopped)

    def save(self) -> bytes:
        """The state of all positions so far, for `restore`."""
        api = _library().api
        size = api.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        written = api.llama_state_seq_get_data(self._context, buffer, size, 0)
        return bytes(memoryview(buffer)[:written])

    def restore(self, state: bytes, position: int) -> None:
        """Replace everything by a saved state of `position` positions."""
        self.rewind(0)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if not _library().api.llama_state_seq_set_data(self._context, buffer, len(state), 0):
            raise SynthesisFailed("llama.cpp did not take a saved state back")
        self.position = position

    def _prefill(
        self, batch: "_Batch", count: int, columns: Callable[[slice], dict[str, Any]], stopped: Callable[[], bool]
    ) -> NDArray[np.float32]:
        api = _library().api
        # llama.cpp asks between any two operations of a computation. Only here: each question takes Python's
        # global lock some hundred times per computation, which is nothing for a long prompt and a lot for one token.
        abort = api.ggml_abort_callback(lambda _: stopped())
        api.llama_set_abort_callback(self._context, abort, None)
        try:
            for start in range(0, count, self._batch_size):
                part = slice(start, min(start + self._batch_size, count))
                if stopped():
                    raise Cancelled("cancelled while the prompt was read")
                batch.fill(self.position, **columns(part))
                self._decode(batch, part.stop - part.start)
        finally:
            api.llama_set_abort_callback(self._context, api.ggml_abort_callback(), None)
        return self._logits()

    def _decode(self, batch: "_Batch", count: int) -> None:
        answer = _library().api.llama_decode(self._context, batch.struct)
        if answer == _ABORTED:
            raise Cancelled("cancelled while the prompt was read")
        if answer == _NO_ROOM:
            raise SynthesisFailed(f"the context of {self.context} positions is full")
        if answer:
            raise SynthesisFailed(f"llama.cpp failed to decode ({answer}): {_library().last_error()}")
        self.position += count

    def _logits(self) -> NDArray[np.float32]:
        pointer = _library().api.llama_get_logits_ith(self._context, -1)
        if not pointer:
            raise SynthesisFailed("llama.cpp has no logits for the last position")
        return np.ctypeslib.as_array(pointer, shape=(self.rows,))


class _Batch:
    """A llama_batch that is allocated once; numpy views write into it."""

    def __init__(self, size: int, width: int) -> None:
        api = _library().api
        self.struct = api.llama_batch_init(size, width, 1)
        self._input: NDArray[Any]
        if width:
            self._input = np.ctypeslib.as_array(self.struct.embd, shape=(size * width,)).reshape(size, width)
        else:
            self._input = np.ctypeslib.as_array(self.struct.token, shape=(size,))
        self._positions = np.ctypeslib.as_array(self.struct.pos, shape=(size,))
        self._wanted = np.ctypeslib.as_array(self.struct.logits, shape=(size,))
        for index in range(size):
            self.struct.n_seq_id[index] = 1
            self.struct.seq_id[index][0] = 0

    def fill(self, position: int, *, tokens: Sequence[int] = (), embeddings: NDArray[np.float32] | None = None) -> None:
        """Put positions from `position` on into the batch; only the last one's logits are wanted."""
        rows = tokens if embeddings is None else embeddings
        count = len(rows)
        self._input[:count] = rows
        self._positions[:count] = np.arange(position, position + count)
        self._wanted[:count] = 0
        self._wanted[count - 1] = 1
        self.struct.n_tokens = count

    def close(self) -> None:
        _library().api.llama_batch_free(self.struct)


def _open_model(path: Path, *, vocab_only: bool, gpu_layers: int) -> Any:
    api = _library().api
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise BackendUnavailable(f"{path}: cannot be read ({error.strerror})") from error
    if magic != b"GGUF":
        raise BackendUnavailable(f"{path}: not a GGUF file (it begins with {magic!r})")
    _library().errors.clear()
    params = api.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = vocab_only, gpu_layers
    model = api.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise BackendUnavailable(
            f"{path}: llama.cpp cannot load it, perhaps it is truncated: {_library().last_error()}"
        )
    return model


class _Library:
    """The llama_cpp module, with its log sent to `logging` (as debug) instead of stderr."""

    def __init__(self) -> None:
        try:
            from llama_cpp import llama_cpp as api
        except ImportError as error:
            raise BackendUnavailable(f"llama-cpp-python is needed for the language model: {error}") from error
        self.api: Any = api
        self.errors: deque[str] = deque(maxlen=3)
        self._log = self.api.llama_log_callback(self._forward)  # the C side keeps only the bare pointer
        self.api.llama_log_set(self._log, ctypes.c_void_p(0))
        self.api.llama_backend_init()

    def last_error(self) -> str:
        """What the library last complained about."""
        return "; ".join(self.errors) or "it gave no reason"

    def _forward(self, level: int, text: bytes, _: Any) -> None:
        message = text.decode(errors="replace").strip()
        if level == _LOG_ERROR:
            self.errors.append(message)
        # Its errors become exceptions here; the rest is pages of shapes.
        logger.debug("%s", message)


@functools.cache
def _library() -> _Library:
    return _Library()

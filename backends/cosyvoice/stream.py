"""The hand-over of speech tokens from the thread that makes them to the thread that turns them into sound.

One condition guards the tokens, the end and the error together, so a reader never sees "done" without the last
token, nor a clean end where there was a failure. Tokens are handed over one by one; nobody polls.
"""

import threading
from collections.abc import Sequence

from backends.errors import Cancelled


class TokenStream:
    """Speech tokens of one utterance: one writer (`put`, then `close` once), one reader (`wait`, or `cancel` to leave)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._done = False
        self._error: BaseException | None = None
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether the reader has left. Advice for the writer, who may look without waiting."""
        return self._cancelled

    def put(self, token: int) -> None:
        """Hand over the next token. Raises Cancelled when the reader has left: stop working."""
        with self._changed:
            if self._done:
                raise RuntimeError("put() after close()")
            if self._cancelled:
                raise Cancelled("nobody reads these tokens any more")
            self._tokens.append(token)
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """No more tokens will come; `error` says why when that is not the natural end. Only the first call counts."""
        with self._changed:
            if not self._done:
                self._done, self._error = True, error
                self._changed.notify_all()

    def cancel(self) -> None:
        """The reader leaves: the writer's next `put` raises, and `wait` raises Cancelled at once."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def wait(self, at_least: int) -> tuple[Sequence[int], bool]:
        """All tokens so far and whether they are all there will be, once there are `at_least` or the end has come.

        Raises the writer's error as soon as it is known, and Cancelled after `cancel`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._done or len(self._tokens) >= at_least)
            if self._cancelled:
                raise Cancelled("the reader of these tokens has left")
            if self._error is not None:
                raise self._error
            return tuple(self._tokens), self._done

"""llama-swap's FIFO scheduler as plain rules: no loop, no clock. Numbers are those of `_decide`.

1. An unknown model is an error.  2. A model that is being loaded is joined.  3. A model that is resident,
costs nobody his place and is not being evicted is served at once, whoever waits for another: this is what
starves.  4. In the way of a load in progress: queue.  5. Loading would evict a model that has requests:
queue.  6. Else swap, then serve everyone who joined.

The queue is walked in order of arrival whenever a swap ends, and when a model's last request does.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.fakes.residency import Evicted


class SwapperError(Exception):
    """An error answer of the swapper: HTTP status and words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(eq=False)
class Job:
    """One request for one model. `decided` is told once: None to be served, or why not.

    `killed` is told when its model stops under it.
    """

    id: int
    model: str
    decided: Callable[[SwapperError | None], None]
    killed: Callable[[], None]


@dataclass(eq=False)
class Swap:
    """A load in progress: the model, those stopped for it, and everyone who joined."""

    model: str
    evicted: set[str]
    joined: list[Job] = field(default_factory=list)


class Scheduler:
    """Decides; `start` is asked to carry out a swap and reports back by `loaded`.

    `kills`: asked for another model, abort the running requests in the way, as llama-server's router does.
    """

    def __init__(
        self, limits: Mapping[str, int], evicted: Evicted, start: Callable[[Swap], None], *, kills: bool = False
    ) -> None:
        self._limits = limits
        self._evicted = evicted
        self._start = start
        self._kills = kills
        self.ready: set[str] = set()
        self.swaps: dict[str, Swap] = {}
        self.serving: dict[str, list[Job]] = {}
        self.queue: list[Job] = []
        self.reserved: Counter[str] = Counter()

    def arrive(self, job: Job) -> None:
        """A request has come. It may be decided at once or later."""
        if job.model not in self._limits:  # (1)
            job.decided(SwapperError(404, f"model {job.model!r} not found"))
            return
        if self.reserved[job.model] >= self._limits[job.model]:
            job.decided(SwapperError(429, f"too many requests for {job.model!r}"))
            return
        self.reserved[job.model] += 1
        if not self._decide(job):
            self.queue.append(job)

    def leave(self, job: Job) -> None:
        """A request is over: answered, failed, or its client has gone. A load goes on without those who joined."""
        if job in self.queue:
            self.queue.remove(job)
        elif job in self.serving.get(job.model, ()):
            self.serving[job.model].remove(job)
            self.reserved[job.model] -= 1
            if not self.serving[job.model]:
                self._walk()
            return
        elif (swap := self.swaps.get(job.model)) and job in swap.joined:
            swap.joined.remove(job)
        else:
            return  # refused or killed: it holds nothing any more
        self.reserved[job.model] -= 1

    def loaded(self, swap: Swap, error: SwapperError | None = None) -> None:
        """A swap has ended, well or with an error that everyone who joined gets."""
        if self.swaps.get(swap.model) is not swap:
            return  # unloaded meanwhile
        del self.swaps[swap.model]
        if error is None:
            self.ready.add(swap.model)
        for job in swap.joined:
            self._grant(job) if error is None else self._refuse(job, error)
        self._walk()

    def unload(self, models: set[str]) -> None:
        """Stop these now. Requests that run on them die, those that wait for them get an error."""
        error = SwapperError(503, "model unloaded")
        for model in models & self.swaps.keys():
            for job in self.swaps.pop(model).joined:
                self._refuse(job, error)
        for job in [job for job in self.queue if job.model in models]:
            self.queue.remove(job)
            self._refuse(job, error)
        for model in models:
            self._stop(model)
        self._walk()

    def _decide(self, job: Job) -> bool:
        """True when the job is served, joins a load or starts one; False when it has to queue."""
        model = job.model
        if model in self.swaps:  # (2)
            self.swaps[model].joined.append(job)
            return True
        evicted = self._evicted(model, self.ready | self.swaps.keys())
        in_the_way = any(
            other.model in evicted or model in other.evicted or evicted & other.evicted for other in self.swaps.values()
        )
        if model in self.ready and not evicted and not in_the_way:  # (3)
            self._grant(job)
            return True
        if in_the_way:  # (4)
            return False
        if not self._kills and any(self.serving.get(other) for other in evicted):  # (5)
            return False
        swap = Swap(model, evicted, [job])  # (6)
        self.swaps[model] = swap
        for other in evicted:
            self._stop(other)
        self._start(swap)
        return True

    def _walk(self) -> None:
        waiting, self.queue = self.queue, []
        blocked = [job for job in waiting if not self._decide(job)]
        self.queue = blocked + self.queue

    def _stop(self, model: str) -> None:
        self.ready.discard(model)
        for job in self.serving.pop(model, []):
            self.reserved[model] -= 1
            job.killed()

    def _grant(self, job: Job) -> None:
        self.serving.setdefault(job.model, []).append(job)
        job.decided(None)

    def _refuse(self, job: Job, error: SwapperError) -> None:
        self.reserved[job.model] -= 1
        job.decided(error)

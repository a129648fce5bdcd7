"""What the lease costs, beside asyncio.Lock and aiorwlock.

Uncontended: one task takes it and gives it back, again and again. Contended: 1,000 and 10,000 tasks wait, one writer in
ten; then all are served, and the cost of one is the whole divided by their number, its task and its timer included.
Times are CPU times of this process, contenders take turns within each round, and a ratio is the median of the rounds'
own ratios. As in timeit, the garbage collector is off meanwhile. (pyperf cannot pair contenders: it runs them one after
the other, each in processes of its own.)

The last table is who was granted when, where a writer comes after a reader that waits.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import aiorwlock

from bench._common import Report, Target, median, options
from proxy.lease import Hold, Lease, LeaseSettings
from proxy.line import READ, WRITE

Take = Callable[[bool], Any]
"""The async context manager of one use; the argument says whether it writes."""

LOCK, RWLOCK, FIFO, PHASES = "asyncio.Lock", "aiorwlock", "lease, fifo", "lease, phases"


def lock() -> Take:
    one = asyncio.Lock()
    return lambda writes: one


def rwlock() -> Take:
    one = aiorwlock.RWLock()
    return lambda writes: one.writer if writes else one.reader


def lease(order: Literal["fifo", "phases"]) -> Take:
    one = Lease("gpu0", LeaseSettings(order=order, max_waiting=100_000, slow_wait=1e9))
    return lambda writes: one.hold(
        id="request", model="tts" if writes else "chat", group="g", mode=WRITE if writes else READ
    )


CONTENDERS: dict[str, Callable[[], Take]] = {
    LOCK: lock,
    RWLOCK: rwlock,
    FIFO: lambda: lease("fifo"),
    PHASES: lambda: lease("phases"),
}


async def uncontended(take: Take, count: int) -> float:
    """CPU seconds for one acquire and release."""
    began = time.process_time()
    for _ in range(count):
        async with take(False):
            pass
    return (time.process_time() - began) / count


async def contended(take: Take, waiters: int) -> float:
    """CPU seconds for each of so many waiting tasks, from its creation to its end."""

    async def job(writes: bool) -> None:
        async with take(writes):
            pass

    began = time.process_time()
    async with take(True):
        jobs = [asyncio.create_task(job(number % 10 == 9)) for number in range(waiters)]
        await asyncio.sleep(0)
    await asyncio.gather(*jobs)
    return (time.process_time() - began) / waiters


async def rounds(
    count: int, measure: Callable[[Take], Awaitable[float]], names: tuple[str, ...] = tuple(CONTENDERS)
) -> dict[str, list[float]]:
    """Seconds of each contender, round by round; every other round in the opposite order."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        for name in names if number % 2 == 0 else reversed(names):
            gc.collect()
            gc.disable()
            found[name].append(await measure(CONTENDERS[name]()))
            gc.enable()
    return found


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the rounds' own ratios."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


async def grants(take: Take, arrivals: str) -> str:
    """In which order they get it: W and R, numbered as they come; the first holds until all have come."""
    order: list[str] = []
    everyone_is_here = asyncio.Event()

    async def job(name: str) -> None:
        async with take(name[0] == "W") as hold:
            order.append(name)
            if isinstance(hold, Hold):
                hold.opened()
            await everyone_is_here.wait()

    jobs = []
    for number, kind in enumerate(arrivals, 1):
        jobs.append(asyncio.create_task(job(f"{kind}{number}")))
        await asyncio.sleep(0)
    everyone_is_here.set()
    await asyncio.gather(*jobs)
    return " ".join(order)


async def measure(report: Report, *, quick: bool) -> None:
    """Fills the report."""
    loops, turns = (500, 3) if quick else (20_000, 15)
    alone = await rounds(turns, lambda take: uncontended(take, loops))
    report.add_table(
        "Uncontended acquire and release",
        ["", "us of CPU", "x asyncio.Lock"],
        [(name, 1e6 * median(times), ratio(times, alone[LOCK])) for name, times in alone.items()],
    )
    few, many = (50, 500) if quick else (1_000, 10_000)
    turns = 2 if quick else 7
    small = await rounds(turns, lambda take: contended(take, few))
    large = await rounds(turns, lambda take: contended(take, many))
    report.add_table(
        "Waiters served, one writer in ten: us of CPU for each",
        ["", f"{few:,} waiters", f"{many:,} waiters", "ratio"],
        [
            (name, 1e6 * median(small[name]), 1e6 * median(large[name]), ratio(large[name], small[name]))
            for name in small
        ],
    )
    rows = []
    for arrivals in ("WRW", "WRRWRW", "RWRW"):
        rows.append([" ".join(f"{kind}{number}" for number, kind in enumerate(arrivals, 1))])
        for name in (RWLOCK, FIFO, PHASES):
            rows[-1].append(await grants(CONTENDERS[name](), arrivals))
    report.add_table("Order of grants", ["they come", RWLOCK, FIFO, PHASES], rows)
    for name in (FIFO, PHASES):
        report.targets += [
            Target(f"{name}: uncontended, against asyncio.Lock", ratio(alone[name], alone[LOCK]), 3.0, unit="x"),
            Target(
                f"{name}: a waiter of {many:,}, against one of {few:,}", ratio(large[name], small[name]), 1.5, unit="x"
            ),
        ]
    report.notes += [
        "asyncio.Lock has no readers: in the second table all its waiters exclude each other.",
        "A lease makes a ticket for each use, knows its task, keeps times, counts and events; a lock does none of it.",
        "In the last table every answer begins with its grant, so that no room stays open for those who come later.",
    ]


def main() -> None:
    """The command."""
    arguments = options(__doc__ or "")
    report = Report("lease", "The lease, beside asyncio.Lock and aiorwlock", quick=arguments.quick)
    asyncio.run(measure(report, quick=arguments.quick))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()

"""Counters, gauges and histograms whose text is cheap to write.

prometheus_client builds a dictionary and sorts it for every line of every scrape, about 15 microseconds a line; a busy
server has a thousand lines, and they are written on the event loop, between the chunks of streams. Here a series keeps
the front of each of its lines as text, and an observation is one list index. `Registry` is a prometheus_client
collector as well, so that library's own writer and parser are the reference which the tests compare with.

Nothing here locks: call it from the event loop's thread only.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, Literal, Protocol, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]


class _Series(Protocol):
    def lines(self, out: list[str]) -> None: ...

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]: ...


S = TypeVar("S", bound=_Series)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(name: str, labels: dict[str, str]) -> str:
    """The part of a line before its value: `name{label="value"} `."""
    if not labels:
        return f"{name} "
    return name + "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "} "


def _bound(value: float) -> str:
    """A bucket's upper edge as Prometheus and prometheus_client write it: 1.0, not 1."""
    return repr(float(value))


class Value:
    """One series of a counter or a gauge. A counter's owner only calls `add`, with amounts >= 0."""

    __slots__ = ("_head", "_labels", "_name", "value")

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self._name, self._labels, self._head = name, labels, _head(name, labels)
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def lines(self, out: list[str]) -> None:
        out.append(f"{self._head}{self.value!r}\n")

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        yield self._name, self._labels, self.value


class Distribution:
    """One series of a histogram: a count for each bucket, made cumulative only when it is written."""

    __slots__ = ("_bounds", "_heads", "_labels", "_name", "_text", "counts", "sum")

    def __init__(self, name: str, labels: dict[str, str], bounds: Sequence[float]) -> None:
        self._name, self._labels, self._bounds = name, labels, bounds
        edges = [*map(_bound, bounds), "+Inf"]
        self._heads = [_head(f"{name}_bucket", {**labels, "le": edge}) for edge in edges]
        self._heads += [_head(f"{name}_count", labels), _head(f"{name}_sum", labels)]
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._text = ""  # as it was last written; most series do not change between two scrapes

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1  # an edge belongs to its own bucket: le is "at most"
        self.sum += value
        self._text = ""

    def lines(self, out: list[str]) -> None:
        if not self._text:
            cumulative = list(accumulate(self.counts))
            values = [*cumulative, cumulative[-1], self.sum]
            self._text = "".join([f"{head}{value!r}\n" for head, value in zip(self._heads, values, strict=True)])
        out.append(self._text)

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        cumulative = list(accumulate(self.counts))
        for edge, value in zip([*map(_bound, self._bounds), "+Inf"], cumulative, strict=True):
            yield f"{self._name}_bucket", {**self._labels, "le": edge}, value
        yield f"{self._name}_count", self._labels, cumulative[-1]
        yield f"{self._name}_sum", self._labels, self.sum


class Family(Generic[S]):
    """All series of one metric. `family(value, ...)`: the series with these label values, made when first asked for."""

    def __init__(
        self, kind: Kind, name: str, help: str, labels: Sequence[str], make: Callable[[str, dict[str, str]], S]
    ) -> None:
        self.kind, self.name, self.help, self.labels = kind, name, help, tuple(labels)
        self._make = make
        self._series: dict[tuple[str, ...], S] = {}
        self._header = f"# HELP {name} {help}\n# TYPE {name} {kind}\n"

    def __call__(self, *values: str) -> S:
        series = self._series.get(values)
        if series is None:
            labels = dict(zip(self.labels, values, strict=True))
            series = self._series[values] = self._make(self.name, labels)
        return series

    def lines(self, out: list[str]) -> None:
        out.append(self._header)
        for series in self._series.values():
            series.lines(out)

    def metric(self) -> Metric:
        """The same as prometheus_client sees it, whose counters are named without `_total`."""
        name = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        metric = Metric(name, self.help, self.kind)
        for series in self._series.values():
            for sample, labels, value in series.samples():
                metric.add_sample(sample, labels, value)
        return metric


class Registry(Collector):
    """The families of one server, in the order in which they were declared."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.families: list[Family[Value] | Family[Distribution]] = []

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Value]:
        """`name` ends in _total."""
        return self._values("counter", name, help, labels)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Value]:
        return self._values("gauge", name, help, labels)

    def histogram(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> Family[Distribution]:
        """`bounds`: the upper edges in rising order, without +Inf."""

        def make(full_name: str, values: dict[str, str]) -> Distribution:
            return Distribution(full_name, values, bounds)

        family = Family("histogram", self._prefix + name, help, labels, make)
        self.families.append(family)
        return family

    def _values(self, kind: Kind, name: str, help: str, labels: Sequence[str]) -> Family[Value]:
        family = Family(kind, self._prefix + name, help, labels, Value)
        self.families.append(family)
        return family

    def text(self) -> str:
        """Everything in Prometheus' text format 0.0.4."""
        out: list[str] = []
        for family in self.families:
            family.lines(out)
        return "".join(out)

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            yield family.metric()

"""Stand-ins with real interfaces: a model swapper, broken upstreams, a speech backend, and badly behaved clients."""

from tests.fakes.answers import speech, text, vector
from tests.fakes.clients import RawClient
from tests.fakes.faulty import Exchange, FaultyUpstream, refusing_url
from tests.fakes.gates import Gate
from tests.fakes.speech import FakeSpeech, spoken
from tests.fakes.swapper import Event, FakeModel, FakeSwapper, Received

__all__ = [
    "Event",
    "Exchange",
    "FakeModel",
    "FakeSpeech",
    "FakeSwapper",
    "FaultyUpstream",
    "Gate",
    "RawClient",
    "Received",
    "refusing_url",
    "speech",
    "spoken",
    "text",
    "vector",
]

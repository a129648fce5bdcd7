"""Where speech models run, as the voice routes and speech jobs see it: backends here, upstreams elsewhere."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from multidict import CIMultiDict

from backends.api import SpeechBackend
from proxy.body import Body
from proxy.forward import Outgoing
from proxy.line import Mode
from proxy.runtime import Runtime


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """A model that speaks: in the backend of that name, else at the upstream of that name."""

    id: str
    lease: str
    backend: str | None = None
    upstream: str | None = None

    @property
    def owner(self) -> str:
        """Where it comes from, in the words of `owned_by` in GET /v1/models."""
        return f"llama-lease:{self.backend}" if self.backend is not None else str(self.upstream)


class Places(Protocol):
    """What the rest of the proxy offers."""

    def models(self) -> Sequence[SpeechModel]:
        """The speech models that the configuration names, in its order."""
        ...

    def find(self, model: str) -> SpeechModel:
        """The place of a model, aliases included. Raises NotFound."""
        ...

    def backend(self, name: str) -> SpeechBackend:
        """A backend by name. Raises NotFound."""
        ...

    def hold(self, model: str, request_id: str) -> AbstractAsyncContextManager[Any]:
        """The lease for one piece of work on a model; inside, a backend is loaded. `opened()` of what it gives
        is called at the first result. Raises LeaseError and ModelUnavailable."""
        ...

    def position(self, model: str, request_id: str) -> int:
        """Place in the line of the model's lease, from 1; behind everybody for one that has not joined yet."""
        ...

    async def post(self, model: SpeechModel, path: str, fields: Mapping[str, Any], request_id: str) -> bytes:
        """JSON to the upstream of a model, inside its hold: the body of the answer. Raises UpstreamError."""
        ...

    async def get(self, model: SpeechModel, target: str, request_id: str) -> bytes:
        """The body of an upstream's answer to a GET, inside the model's hold. Raises UpstreamError."""
        ...


class RuntimePlaces:
    """`Places` of a running proxy; follows its configuration through reloads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def models(self) -> Sequence[SpeechModel]:
        """Those of backends, and those of upstreams that need the GPU alone: that is what speech does."""
        named = self._runtime.classifier.models()
        speaking = [model for model, _, group in named if group.backend is not None or group.mode is Mode.WRITE]
        return [self.find(model) for model in speaking]

    def find(self, model: str) -> SpeechModel:
        plan = self._runtime.plan("POST", "/v1/audio/speech", model)
        return SpeechModel(plan.model, self._runtime.lease_of(plan).name, plan.backend, plan.upstream)

    def backend(self, name: str) -> SpeechBackend:
        return self._runtime.backend(name)

    def hold(self, model: str, request_id: str) -> AbstractAsyncContextManager[Any]:
        return self._runtime.hold_model(model, request_id)

    def position(self, model: str, request_id: str) -> int:
        waiting = self._runtime.leases[self.find(model).lease].snapshot().waiting
        return next((waiter.position for waiter in waiting if waiter.id == request_id), len(waiting) + 1)

    async def post(self, model: SpeechModel, path: str, fields: Mapping[str, Any], request_id: str) -> bytes:
        headers = CIMultiDict({"Content-Type": "application/json"})
        body = Body.of(json.dumps(fields).encode())
        return await self._call(Outgoing("POST", path, path, headers, body, model.id, request_id), model)

    async def get(self, model: SpeechModel, target: str, request_id: str) -> bytes:
        path = target.partition("?")[0]
        return await self._call(Outgoing("GET", target, path, CIMultiDict(), None, model.id, request_id), model)

    async def _call(self, out: Outgoing, model: SpeechModel) -> bytes:
        assert model.upstream is not None
        return await self._runtime.upstreams[model.upstream].call(out)

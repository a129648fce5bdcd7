"""What a swapper's own configuration changes for the requests that go there."""

import json
from pathlib import Path

import pytest

from proxy import config as configuration
from proxy.errors import ConfigError
from proxy.line import Mode
from proxy.runtime import Runtime

SWAP = {
    "models": {
        "qwen": {"cmd": "x", "aliases": ["gpt-4"], "concurrencyLimit": 3},
        "vision": {"cmd": "x"},
    },
    "peers": {"attic": {"proxy": "http://192.0.2.1", "models": ["big"]}},
}
CONFIG = {
    "upstreams": {"swap": {"url": "http://127.0.0.1:9", "swap_config": "swap.yaml", "max_in_flight": 8}},
    "backends": {"voice": {"kind": "hibari"}},
    "groups": {
        "speech": {"mode": "write", "models": ["hibari", "tts-*"], "backend": "voice"},
        "chat": {"mode": "read", "models": ["*"], "upstream": "swap"},
    },
    "leases": {"gpu0": {"matrix": {"sets": {"all": "qwen | vision | voice"}}}},
}


@pytest.fixture
async def runtime(tmp_path: Path) -> Runtime:
    (tmp_path / "swap.yaml").write_text(json.dumps(SWAP))
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(CONFIG))
    runtime = Runtime(configuration.load(path))
    await runtime.start()
    yield runtime
    await runtime.stop()


def ticket(runtime: Runtime, model: str, path: str = "/v1/chat/completions"):
    return runtime.hold(runtime.plan("POST", path, model), "id").ticket


async def test_an_alias_of_the_swapper_waits_as_its_model(runtime: Runtime) -> None:
    assert ticket(runtime, "gpt-4").model == "qwen"


async def test_the_swappers_own_limit_holds_where_it_is_lower(runtime: Runtime) -> None:
    assert (ticket(runtime, "gpt-4").limit, ticket(runtime, "vision").limit) == (3, 8)


async def test_a_model_on_another_machine_takes_no_turn(runtime: Runtime) -> None:
    assert ticket(runtime, "attic/big").mode is Mode.NONE
    assert ticket(runtime, "qwen").mode is Mode.READ


async def test_whatever_a_backend_is_called_it_is_one_resident(runtime: Runtime) -> None:
    assert runtime.excludes("gpu0", "hibari", "qwen")
    assert ticket(runtime, "tts-hd", "/v1/audio/speech").model == "voice"


async def test_a_swappers_file_that_has_changed_is_read_again(runtime: Runtime, tmp_path: Path) -> None:
    changed = {"models": {"qwen": {"cmd": "x", "concurrencyLimit": 2}, "vision": {"cmd": "x"}}}
    (tmp_path / "swap.yaml").write_text(json.dumps(changed))
    runtime.apply(configuration.load(tmp_path / "config.yaml"))
    assert ticket(runtime, "qwen").limit == 2


async def test_a_swappers_file_that_is_broken_changes_nothing(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text("models: [")
    with pytest.raises(ConfigError, match=r"upstreams\.swap\.swap_config: .*swap\.yaml: cannot be read"):
        runtime.apply(configuration.load(tmp_path / "config.yaml"))
    assert ticket(runtime, "gpt-4").model == "qwen"


async def test_an_alias_of_one_swapper_is_no_name_under_another_lease(tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(json.dumps(SWAP))
    config = {
        "leases": {"gpu0": {}, "gpu1": {}},
        "upstreams": {
            "swap": {"url": "http://127.0.0.1:9", "lease": "gpu0", "swap_config": "swap.yaml"},
            "other": {"url": "http://127.0.0.1:9", "lease": "gpu1"},
        },
        "groups": {
            "own": {"mode": "read", "models": ["gpt-4"], "upstream": "other"},
            "rest": {"mode": "read", "models": ["*"], "upstream": "swap"},
        },
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    runtime = Runtime(configuration.load(tmp_path / "config.yaml"))
    await runtime.start()
    assert ticket(runtime, "gpt-4").model == "gpt-4"
    assert ticket(runtime, "qwen").limit == 3
    await runtime.stop()

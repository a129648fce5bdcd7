"""The real Prometheus on loopback, with the project's own configuration, but faster and pointed at a test's server."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.grafana.promql import GRAFANA, installed, load

STEP = "200ms"


def configuration(target: str) -> dict[str, Any]:
    """prometheus.yml with short intervals, another target, and its rule files found from anywhere."""
    config: dict[str, Any] = load("prometheus.yml")
    config["global"] = {"scrape_interval": STEP, "evaluation_interval": STEP}
    config["rule_files"] = [str(GRAFANA / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    return config


class Prometheus:
    """A client of Prometheus' HTTP API. Times are Unix seconds."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def get(self, path: str, **parameters: str) -> Any:
        async with self._session.get(f"{self._url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """Each series with the values that it had within the last minute, at most one a second."""
        now = float((await self.get("query", query="time()"))["result"][1])
        data = await self.get("query_range", query=expr, start=f"{now - 60}", end=f"{now}", step="1")
        assert data["resultType"] == "matrix"
        result: list[dict[str, Any]] = data["result"]
        return result

    async def rules(self) -> list[dict[str, Any]]:
        return [rule for group in (await self.get("rules"))["groups"] for rule in group["rules"]]

    async def alerts(self) -> dict[str, str]:
        """The alerts that are not at rest: name -> pending or firing."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in (await self.get("alerts"))["alerts"]}


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Runs until the block ends. `target`: host:port of the server to watch; `folder`: for its data."""
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration(target)))
    process = await asyncio.create_subprocess_exec(
        installed("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        address = await _address(process.stderr)
        draining = asyncio.create_task(process.stderr.read())  # else its log fills the pipe and it stops
        async with aiohttp.ClientSession() as session:
            yield Prometheus(session, f"http://{address}")
        draining.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(log: asyncio.StreamReader) -> str:
    """Where it listens, once it says that it is ready."""
    address, said = "", []
    while line := (await log.readline()).decode():
        said.append(line)
        if match := re.search(r'msg="Listening on".* address=(\S+)', line):
            address = match[1]
        if "Server is ready" in line and address:
            return address
    raise AssertionError("Prometheus ended: " + "".join(said[-5:]))

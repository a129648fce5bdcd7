"""The servers that are compared: how each is started in front of one upstream, and what its processes cost."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from bench._common import machine

LITELLM = "litellm[proxy]==1.108.7"
KEY = "bench-key"
_NGINX = """
daemon off; worker_processes 1; pid nginx.pid; error_log stderr warn; {user}
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  upstream tiny {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://tiny; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


@dataclass(frozen=True)
class Cost:
    """CPU seconds so far, and resident memory now (MiB), of a process and its descendants."""

    cpu: float
    memory: float


class Server:
    """A started server; use as a context manager, which ends it and its children."""

    def __init__(self, name: str, command: list[str], port: int, *, cwd: Path, cpu: int | None, env: Mapping[str, str]):
        self.name = name
        self.url = f"http://127.0.0.1:{port}/v1/chat/completions"
        if cpu is not None:
            command = ["taskset", "-c", str(cpu), *command]
        (cwd / "logs").mkdir(exist_ok=True)  # llama-lease watches the folder that its configuration is in
        self._log = (cwd / "logs" / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        self._port = port

    def wait(self, limit: float = 120.0) -> Self:
        """Until the port answers. Raises RuntimeError with the server's output when it ends or takes too long."""
        end = time.monotonic() + limit
        while time.monotonic() < end and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self
            time.sleep(0.05)
        self._log.seek(0)
        raise RuntimeError(f"{self.name} did not start:\n{self._log.read()[-3000:]}")

    def cost(self) -> Cost:
        """What its processes have used."""
        pids = list(_family(self._process.pid))
        return Cost(sum(map(_cpu, pids)), sum(map(_memory, pids)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: it and its children only
            self._process.wait()
        self._log.close()


@contextmanager
def contenders(names: list[str]) -> Iterator[dict[str, Server]]:
    """The upstream and these servers in front of it, running. Keys: "direct" and the names, in this order.

    With two cores or more the upstream (and whoever makes the load) has the first, the others share the second,
    on which only one of them works at a time.
    """
    cpu = (0, 1) if int(machine()["cores"]) > 1 and shutil.which("taskset") else (None, None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llama-lease-bench-")))
        root = Path(__file__).resolve().parent.parent
        python = {"PYTHONPATH": str(root)}
        port = free_port()
        command = [sys.executable, "-m", "bench.tiny_upstream", str(port)]
        upstream = Server("direct", command, port, cwd=folder, cpu=cpu[0], env=python)
        running = {"direct": stack.enter_context(upstream).wait()}
        for name in names:
            command, env, own_port = _COMMANDS[name](folder, port)
            server = Server(name, command, own_port, cwd=folder, cpu=cpu[1], env={**python, **env})
            running[name] = stack.enter_context(server).wait()
        yield running


def available(name: str) -> bool:
    """Whether this machine can run that contender (LiteLLM is installed on demand, see `install_litellm`)."""
    return {"nginx": _nginx_path() is not None, "litellm": litellm_path().exists()}.get(name, True)


def litellm_path() -> Path:
    """Where LiteLLM's own virtual environment has its command; its pins would fight with ours in one."""
    return Path(__file__).resolve().parent.parent / ".venv-litellm" / "bin" / "litellm"


def install_litellm() -> None:
    """Make that environment. Raises CalledProcessError when the package index cannot be reached."""
    folder = litellm_path().parent.parent
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", LITELLM], check=True)


def _nginx_path() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def _nginx(folder: Path, upstream: int) -> tuple[list[str], dict[str, str], int]:
    port = free_port()
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(_NGINX.format(upstream=upstream, port=port, user=user))
    return [_nginx_path() or "nginx", "-p", str(folder), "-c", "nginx.conf"], {}, port


def _llama_lease(folder: Path, upstream: int) -> tuple[list[str], dict[str, str], int]:
    port = free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "api_keys": [KEY],
        "data_dir": str(folder / "data"),
        "leases": {"gpu0": {}},
        "upstreams": {"tiny": {"url": f"http://127.0.0.1:{upstream}", "lease": "gpu0", "max_in_flight": 128}},
        "groups": {"chat": {"mode": "read", "models": ["m"], "upstream": "tiny"}},
    }
    (folder / "llama-lease.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "proxy", "serve", "--config", "llama-lease.yaml"], {}, port


def _bare_relay(folder: Path, upstream: int) -> tuple[list[str], dict[str, str], int]:
    port = free_port()
    return [sys.executable, "-m", "bench.bare_relay", str(port), str(upstream)], {}, port


def _litellm(folder: Path, upstream: int) -> tuple[list[str], dict[str, str], int]:
    port = free_port()
    place = {"model": "openai/m", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "m", "litellm_params": place}],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": KEY},
    }
    (folder / "litellm.yaml").write_text(yaml.safe_dump(config))
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": ""}
    command = [str(litellm_path()), "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
    return command, env, port


_COMMANDS = {"nginx": _nginx, "bare aiohttp relay": _bare_relay, "llama-lease": _llama_lease, "litellm": _litellm}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _family(pid: int) -> Iterator[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    yield pid
    above = [pid]
    while above:
        children = [child for child, parent in parents.items() if parent in above]
        yield from children
        above = children


def _stat(pid: int) -> list[str]:
    """Fields 3 and on of /proc/PID/stat (proc(5)); the name before them may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu(pid: int) -> float:
    stat = _stat(pid)
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    return int(_stat(pid)[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20

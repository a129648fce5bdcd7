"""The command line: serve, check, demo, and what belongs to single parts. Exit codes: 0 done, 1 failed, 2 misused."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import click

from backends.errors import BackendError
from proxy import __version__, logs
from proxy import config as configuration
from proxy.errors import ConfigError, ProxyError
from proxy.line import Policy

_CONFIG = click.option(
    "--config", "path", type=click.Path(path_type=Path), default=Path("config.yaml"), show_default=True,
    help="The configuration file.",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llama-lease")
def main() -> None:
    """A fair lease on one GPU, in front of llama-swap and of any other OpenAI-compatible model server."""


@main.command()
@_CONFIG
def serve(path: Path) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the configuration again."""
    from proxy.serve import serve as run

    settings = _load(path)
    logs.configure(settings.log.format, level=settings.log.level.upper())
    try:
        _run(run(settings))
    except ConfigError as error:
        raise click.ClickException(error.message) from None
    except OSError as error:
        raise click.ClickException(f"cannot listen on {settings.listen}: {error.strerror or error}") from None


@main.command()
@_CONFIG
@click.argument("model", required=False)
@click.argument("request_path", metavar="PATH", required=False)
def check(path: Path, model: str | None, request_path: str | None) -> None:
    """Validate a configuration and show where each model goes; with MODEL and PATH, explain one request."""
    from proxy import check as checks

    settings = _load(path)
    try:
        if model is not None:
            click.echo(checks.explain(settings, model, request_path or "/v1/chat/completions"))
            return
        click.echo(asyncio.run(checks.overview(settings)))
    except ConfigError as error:
        raise click.ClickException(error.message) from None
    except ProxyError as error:
        click.echo(f"{error.status}: {error.message}", err=True)
        sys.exit(1)


@main.command()
@click.option("--url", default="http://127.0.0.1:9292", show_default=True, help="A running llama-lease.")
@click.option("--api-key", default="", envvar="LLAMA_LEASE_API_KEY", help="Its key, where it wants one.")
@click.option("--chat", default="smollm2", show_default=True, help="The chat model.")
@click.option("--embedding", default="smollm2-embed", show_default=True, help="The embedding model; empty: none.")
@click.option("--speech", default="hibari", show_default=True, help="The speech model.")
@click.option("--streams", default=6, show_default=True, type=click.IntRange(1, 100), help="Chat streams.")
def demo(url: str, api_key: str, chat: str, embedding: str, speech: str, streams: int) -> None:
    """Overlapping chat streams with a speech request in between: who waits how long, and why that is fair."""
    from proxy import demo as demos

    try:
        click.echo(asyncio.run(demos.run(url, api_key, chat, embedding, speech, streams)))
    except demos.DemoFailed as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--config", "settings_path", type=click.Path(path_type=Path), help="Its groups, limits and residency.")
@click.option("--lease", help="The lease of --config to look at; default: its first.")
def simulate(path: Path, settings_path: Path | None, lease: str | None) -> None:
    """Replay a TRACE under llama-swap's order, fifo, phases, and phases with patience, side by side."""
    from proxy import simulate as simulator
    from proxy import trace as traces

    try:
        with path.open(encoding="utf-8") as lines:
            replayed = traces.read(lines, str(path))
        machine, policy = None, None
        if settings_path is not None:
            settings = configuration.load(settings_path)
            name = lease or next(iter(settings.leases))
            if name not in settings.leases:
                raise ConfigError(f"no lease is named '{name}'; there are: {', '.join(settings.leases)}")
            machine = simulator.Machine.configured(replayed, settings, name)
            section = settings.leases[name]
            policy = Policy("phases", section.slice, section.max_slice, section.patience)
        click.echo(simulator.render(simulator.run(replayed, machine, policy)))
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise click.ClickException(error.message) from None


@main.command()
@click.option("--url", default="http://127.0.0.1:9292", show_default=True, help="A running llama-lease.")
@click.option("--api-key", default="", envvar="LLAMA_LEASE_API_KEY", help="Its key, where it wants one.")
@click.option("--lease", default="", help="Which lease; default: the server's first.")
def trace(url: str, api_key: str, lease: str) -> None:
    """Write a trace of the last requests of a running server, for `simulate`. Models and times only, no prompts."""
    query = urlencode({"lease": lease} if lease else {})
    request = Request(f"{url.rstrip('/')}/lease/trace?{query}")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urlopen(request, timeout=30) as answer:
            click.echo(answer.read().decode(), nl=False)
    except HTTPError as error:
        raise click.ClickException(f"{url} answered {error.code}: {error.read().decode()[:300]}") from None
    except OSError as error:
        raise click.ClickException(f"no answer from {url}: {error}") from None


@main.command()
@click.argument("model_dir", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the GGUF files."
)
@click.option("--type", "kind", default="f16", show_default=True, help="Number format: f16, q8_0, ...")
def convert(model_dir: Path, out: Path, kind: str) -> None:
    """Convert CosyVoice 3's language model, MODEL_DIR/llm.pt, to GGUF for llama.cpp (docs/cosyvoice.md)."""
    try:
        from backends.cosyvoice.convert import convert as run
    except ImportError as error:
        raise click.ClickException(f"{error}; pip install 'llama-lease[cosyvoice]'") from None
    shown = ""

    def progress(file: str, done: int, total: int) -> None:
        nonlocal shown
        line = f"{file}: {100 * done // max(total, 1)} %"
        if line != shown:
            click.echo(f"\r{line}", nl=done >= total, err=True)
            shown = line

    try:
        for path in run(model_dir, out, kind, progress):
            click.echo(path)
    except BackendError as error:
        raise click.ClickException(str(error)) from None


def _load(path: Path) -> configuration.Config:
    try:
        return configuration.load(path)
    except ConfigError as error:
        raise click.ClickException(error.message) from None


def _run(work: Coroutine[None, None, None]) -> None:
    """asyncio.run, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)

"""Speech jobs on disk: one SQLite file for what is known, one file of raw samples for each job's audio.

The samples of a sentence are written first, then the row that counts them. After a crash the row says how much of the
audio file is whole sentences; whatever lies behind that is written over.
"""

import asyncio
import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiosqlite

from backends.audio import OUT_RATE

Status = Literal["queued", "running", "done", "failed", "cancelled"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    sentences INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    error TEXT,
    spec TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_of_owner ON jobs (owner, created);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (ended);
"""
_CHANGING = ("status", "started", "ended", "sentences", "samples", "tokens", "error")


class StoreInUse(Exception):
    """Another process works on the jobs of this folder."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is to be spoken; never changes. `fields` is the request's body, for a model at an upstream."""

    pieces: tuple[str, ...]
    voice: str
    instructions: str
    native_speed: float
    tempo: float
    response_format: str
    input_tokens: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Job:
    """One job. Times are Unix seconds. `samples`: of finished sentences, at OUT_RATE, before the tempo change."""

    id: str
    owner: str
    model: str
    created: float
    spec: JobSpec
    status: Status = "queued"
    started: float | None = None
    ended: float | None = None
    sentences: int = 0
    samples: int = 0
    tokens: int = 0
    error: dict[str, Any] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def over(self) -> bool:
        """No more will happen."""
        return self.status in ("done", "failed", "cancelled")

    @property
    def seconds(self) -> float:
        """Length of the finished audio, as it is sent."""
        return self.samples / OUT_RATE / self.spec.tempo

    def tell(self) -> None:
        """Wake everybody who waits for a change."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    @property
    def change(self) -> asyncio.Event:
        """Set at the next change; take it before looking, so that no change is missed."""
        return self._changed


class JobStore:
    """Opened once for a folder, by one process at a time."""

    def __init__(self, folder: Path, database: aiosqlite.Connection) -> None:
        self._folder = folder
        self._database = database

    @classmethod
    async def open(cls, folder: Path) -> "JobStore":
        """Make or open the store in `folder`. Raises StoreInUse, and OSError where it cannot be written."""
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        # The lock lasts until `close`, or the end of the process however it comes.
        database = await aiosqlite.connect(database_path(folder), isolation_level=None, timeout=0)
        try:
            await database.execute("PRAGMA locking_mode = EXCLUSIVE")
            await database.execute("PRAGMA journal_mode = WAL")
            await database.execute("PRAGMA synchronous = NORMAL")
            await database.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            await database.close()
            if "locked" in str(error):
                raise StoreInUse(f"another server works on the speech jobs in {folder}") from error
            raise OSError(f"{database_path(folder)}: {error}") from error
        except BaseException:
            await database.close()
            raise
        return cls(folder, database)

    async def close(self) -> None:
        await self._database.close()

    def audio(self, job: Job) -> Path:
        """The job's samples: OUT_RATE, mono, 16 bits. May not exist yet."""
        return self._folder / f"{job.id}.pcm"

    async def save(self, job: Job) -> None:
        """Write the whole row."""
        spec = {name: getattr(job.spec, name) for name in JobSpec.__slots__}
        error = json.dumps(job.error) if job.error is not None else None
        await self._database.execute(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (job.id, job.owner, job.model, job.status, job.created, job.started, job.ended, job.sentences, job.samples,
             job.tokens, error, json.dumps(spec)),
        )  # fmt: skip

    async def update(self, job: Job, **changes: Any) -> None:
        """Write what changes while a job runs: fields of Job by name. Only then does `job` show them, and tell."""
        now = {name: changes.get(name, getattr(job, name)) for name in _CHANGING}
        now["error"] = json.dumps(now["error"]) if now["error"] is not None else None
        columns = ", ".join(f"{name} = :{name}" for name in _CHANGING)
        await self._database.execute(f"UPDATE jobs SET {columns} WHERE id = :id", {**now, "id": job.id})
        for name, value in changes.items():
            setattr(job, name, value)
        job.tell()

    async def get(self, id: str) -> Job | None:
        return next(iter(await self._read("WHERE id = ?", (id,))), None)

    async def of_owner(self, owner: str, *, limit: int, before: float | None = None) -> list[Job]:
        """The newest first; `before`: only those created earlier than this."""
        if before is None:
            return await self._read("WHERE owner = ? ORDER BY created DESC LIMIT ?", (owner, limit))
        where = "WHERE owner = ? AND created < ? ORDER BY created DESC LIMIT ?"
        return await self._read(where, (owner, before, limit))

    async def unfinished(self) -> list[Job]:
        """The oldest first."""
        return await self._read("WHERE ended IS NULL ORDER BY created", ())

    async def ended_before(self, time: float) -> list[Job]:
        return await self._read("WHERE ended < ?", (time,))

    async def delete(self, job: Job) -> None:
        """Forget the job and its audio."""
        await self._database.execute("DELETE FROM jobs WHERE id = ?", (job.id,))
        await asyncio.to_thread(self.audio(job).unlink, missing_ok=True)

    async def _read(self, where: str, values: Iterable[Any]) -> list[Job]:
        async with self._database.execute(f"SELECT * FROM jobs {where}", values) as rows:
            return [_job(row) async for row in rows]


def database_path(folder: Path) -> Path:
    """The SQLite file of a store."""
    return folder / "jobs.sqlite3"


def _job(row: sqlite3.Row) -> Job:
    id, owner, model, status, created, started, ended, sentences, samples, tokens, error, spec = row
    fields = json.loads(spec)
    fields["pieces"] = tuple(fields["pieces"])
    return Job(
        id, owner, model, created, JobSpec(**fields), status, started, ended, sentences, samples, tokens,
        json.loads(error) if error is not None else None,
    )  # fmt: skip

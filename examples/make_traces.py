"""Writes light.jsonl, busy.jsonl and heavy.jsonl beside itself: an hour of chat, vision and speech on one GPU.

The requests of each model come independently of each other (Poisson), with the mean gaps below in seconds. Their work is
gamma-distributed with shape 2. Only one of the three models fits on the card. Run it from the project's folder:
`python -m examples.make_traces`. It is seeded: the files come out the same each time.
"""

from pathlib import Path

from proxy.line import Mode
from proxy.trace import Model, Trace, poisson

MODELS = {
    "chat": Model(Mode.READ, "chat", load=12.0),
    "vision": Model(Mode.READ, "vision", load=10.0),
    "speech": Model(Mode.WRITE, "speech", load=6.0),
}
WORKS = {"chat": 8.0, "vision": 6.0, "speech": 5.0}
GAPS = {
    "light": {"chat": 25.0, "vision": 200.0, "speech": 90.0},
    "busy": {"chat": 5.0, "vision": 90.0, "speech": 40.0},
    "heavy": {"chat": 2.5, "vision": 30.0, "speech": 15.0},
}
SEED = 1
HOUR = 3600.0


def trace(name: str, *, seed: int = SEED, seconds: float = HOUR) -> Trace:
    """The trace of one of the three loads."""
    return poisson(MODELS, GAPS[name], WORKS, seconds=seconds, seed=seed, exclusive=[list(MODELS)])


def main() -> None:
    for name in GAPS:
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(f"{line}\n" for line in trace(name).lines()), encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()

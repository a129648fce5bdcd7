"""Who waits how long for one GPU: llama-swap's order alone, and llama-lease in front of it (fifo, phases, patience).

`python -m bench.contention [--json PATH] [--quick] [--plot [PATH]]`. FakeSwapper follows llama-swap's rules; the
load goes over HTTP in real time at 1:20. With --plot only the picture is made (docs/contention.svg).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from bench._common import Report, Target, options, percentile
from bench._scenarios import POLICIES, SPEED, Played, Policy, Scenario, letters, of_trace, overlapping, play
from proxy import simulate

BUSY = Path(__file__).resolve().parent.parent / "examples" / "busy.jsonl"
GIVE_UP = (5, 60, 120)
COLUMNS = ("order", "requests for", "mean", "p50", "p95", "longest", "loads", "makespan",
           *(f"lost to {s} s" for s in GIVE_UP))  # fmt: skip
BETWEEN = (8.4, 24.9)
"""When speech or vision come: well between the starts of two chat streams, so that who came first is no luck."""
HTTP_ALLOWANCE = 0.050 * SPEED
"""50 ms of the wall's clock, on the fake's: what HTTP and the event loops may add to a wait."""

Runs = dict[str, list[Played]]


async def rounds(scenario: Scenario, policies: Sequence[Policy], count: int) -> Runs:
    """Play a scenario `count` times under each policy, in alternating order."""
    runs: Runs = {policy.name: [] for policy in policies}
    for number in range(count):
        for policy in policies[:: 1 if number % 2 == 0 else -1]:
            runs[policy.name].append(await play(scenario, policy))
    return runs


def rows(scenario: Scenario, runs: Runs) -> list[tuple[object, ...]]:
    """A table row for each order and kind of request; all rounds together."""
    found: list[tuple[object, ...]] = []
    for name, played in runs.items():
        asked = {o.arrival.model for run in played for o in run.outcomes}
        models = [model for model in scenario.loads if model in asked]
        for model in [*models, None] if len(models) > 1 else models:
            waits = [wait for run in played for wait in run.waits(model)]
            lost = [sum(wait > limit for wait in waits) / len(waits) for limit in GIVE_UP]
            last = percentile([float(len(run.loads)) for run in played], 0.5), max(run.makespan for run in played)
            found.append(
                (name, scenario.kind(model) if model else "all", sum(waits) / len(waits), percentile(waits, 0.5),
                 percentile(waits, 0.95), max(waits), *last, *(f"{share:.0%}" for share in lost))
            )  # fmt: skip
    return found


def worst_against_bound(played: Sequence[Played], model: str) -> float:
    """The largest of (wait - HTTP's allowance) / (rest of the longest stream that ran when it came + its load).

    Both as long as they really took: the machine's own hiccups lengthen a stream and a load as much as a wait.
    """
    ratios = []
    for run in played:
        for outcome in run.outcomes:
            if outcome.arrival.model == model:
                ran = [o.ended for o in run.outcomes if o.served <= outcome.sent < o.ended]
                loads = [ready - began for began, ready, name in run.loads if name == model and ready <= outcome.served]
                ratios.append(
                    (outcome.wait - HTTP_ALLOWANCE) / (max(ran, default=outcome.sent) - outcome.sent + loads[-1])
                )
    return max(ratios)


def lost(played: Sequence[Played], limit: float) -> int:
    """Requests that a client who gives up after `limit` seconds would have lost."""
    return sum(wait > limit for run in played for wait in run.waits())


async def measure(quick: bool) -> Report:
    """Play everything. Returns what was found."""
    report = Report("contention", "Who waits how long for one GPU", quick)
    seconds, count = (12.0, 1) if quick else (72.0, 2)
    phases, alone = POLICIES[2].name, POLICIES[0].name
    policies = (POLICIES[0], POLICIES[2]) if quick else POLICIES
    for model in ("t", "v"):
        scenario = overlapping(model, seconds, BETWEEN[:1] if quick else BETWEEN)
        runs = await rounds(scenario, policies, count)
        report.add_table(f"{scenario.name} (seconds)", COLUMNS, rows(scenario, runs))
        kind = scenario.kind(model)
        bound = worst_against_bound(runs[phases], model)
        claim = f"{kind}'s longest wait, less 50 ms of wall time, against the rest of the running stream + the load"
        report.targets.append(Target(claim, bound, 1.15, unit="x"))
        report.targets.append(Target(f"chat + {kind}: clients of 60 s lost", lost(runs[phases], 60), 0))
        report.targets.append(Target(f"chat + {kind}: the same, alone", lost(runs[alone], 60), 1, "at least"))
    scenario = letters("ABA" if quick else "ABAACABC")
    runs = await rounds(scenario, policies, 1)
    report.add_table(f"{scenario.name} within one load (seconds)", COLUMNS, rows(scenario, runs))
    report.targets.append(Target(f"loads for {scenario.name}", max(len(run.loads) for run in runs[phases]), 3))
    await trace(report, policies, 40.0 if quick else 600.0)
    return report


async def trace(report: Report, policies: Sequence[Policy], seconds: float) -> None:
    """The busy trace over HTTP, and the same by `simulate`: do they agree?"""
    scenario, arrivals = of_trace(BUSY, seconds)
    runs = await rounds(scenario, policies, 1)
    report.add_table(f"{scenario.name} (seconds)", COLUMNS, rows(scenario, runs))
    simulated = {row.policy: row for row in simulate.run(arrivals) if row.group == "all"}
    found, apart = [], {"means": 0.0, "p95": 0.0}
    for policy in policies:
        row, waits = simulated[policy.simulated], [wait for run in runs[policy.name] for wait in run.waits()]
        mean, p95 = sum(waits) / len(waits), percentile(waits, 0.95)
        apart["means"] = max(apart["means"], abs(mean / row.mean - 1))
        apart["p95"] = max(apart["p95"], abs(p95 / row.p95 - 1))
        loads = len(runs[policy.name][0].loads)
        found.append((policy.name, mean, row.mean, mean / row.mean, p95, row.p95, p95 / row.p95, loads, row.swaps))
    columns = ("order", "mean", "simulated", "ratio", "p95", "simulated", "ratio", "loads", "simulated")
    report.add_table("the same trace, over HTTP and simulated (seconds)", columns, found)
    for what, most in apart.items():
        report.targets.append(Target(f"{what} of the waits over HTTP, farthest from the simulated", most, 0.25))


async def plot(path: Path) -> None:
    """Draw chat streams with two speech requests among them, alone and behind llama-lease."""
    scenario = overlapping("t", 45.0, BETWEEN)
    runs = {
        "the model swapper alone: whoever wants the resident model is served at once": await play(
            scenario, POLICIES[0]
        ),
        "behind llama-lease: those who run finish, then it is speech's turn": await play(scenario, POLICIES[2]),
    }
    from bench._plot import draw  # matplotlib is for whoever draws

    draw(runs, path)
    print(f"wrote {path}")


def main() -> None:
    """The command."""
    picture = {"nargs": "?", "type": Path, "const": Path("docs/contention.svg"), "metavar": "PATH"}
    given = options(__doc__ or "", ("--plot", {**picture, "help": "only draw the picture"}))
    if given.plot:
        asyncio.run(plot(given.plot))
        return
    asyncio.run(measure(given.quick)).finish(given.json)


if __name__ == "__main__":
    main()

"""The pause of a load by the package before and by this one, alternated update by update: all replicas run at once, and
all but one of them wait."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

BENCH = Path(__file__).with_name("bench.py")


def start(package: str, transport: str, arguments: list[str]) -> Any:
    command = [sys.executable, str(BENCH), "--steer", "--blind", "--transports", transport, *arguments]
    environment = os.environ | {"PYTHONPATH": package}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    while process.stdout.readline().strip() != "ready":  # type: ignore[union-attr]
        assert process.poll() is None, f"{package} did not start"
    return process


def ask(process: Any, how: str = "") -> dict[str, Any]:
    process.stdin.write(how + "\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith("{"):
        assert process.poll() is None, "a replica ended"
    row: dict[str, Any] = json.loads(line)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="a checkout of the commit before")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--watched", type=int, default=0, help="further updates under a look at the memory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("bench", nargs="*", help="further arguments of bench.py, behind --")
    arguments = parser.parse_args()
    now = str(BENCH.parents[2])
    kinds = {"before": (arguments.before, "collective"), "collective": (now, "collective"),
             "shared_memory": (now, "shared_memory")}  # fmt: skip
    processes = {name: start(package, transport, arguments.bench) for name, (package, transport) in kinds.items()}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for number in range(arguments.updates):
        for name, process in processes.items():
            rows[name].append(ask(process))
            print(number, name, rows[name][-1], flush=True)
        pauses = {name: [row["pause"] for row in of][1:] or [0.0] for name, of in rows.items()}  # the first warms up
        ratios = {name: [b / a for a, b in zip(pauses["before"], pauses[name], strict=False) if a] for name in pauses}
        result = {
            "pause_seconds": {name: [round(p, 3) for p in of] for name, of in pauses.items()},
            "median": {name: round(median(of), 3) for name, of in pauses.items()},
            "over_before": {name: round(median(of), 3) for name, of in ratios.items() if of},
            "over_before_range": {name: [round(min(of), 3), round(max(of), 3)] for name, of in ratios.items() if of},
            "audit_largest": {name: max(row["audit"] for row in of) for name, of in rows.items()},
            "megabytes": round(rows["before"][0]["megabytes"], 1),
            "largest_bucket_mb": rows["before"][0]["largest_bucket_mb"], "arguments": arguments.bench,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in [name for name in kinds if name != "before"] if arguments.watched else ():
        seen = [ask(processes[name], "watch") for _ in range(arguments.watched)]
        result |= {
            f"{name}_updates": arguments.updates + arguments.watched,
            f"{name}_growth_mb": [max(of) for of in zip(*(r["growth_mb"] for r in seen), strict=True)],
            f"{name}_audit_largest": max(row["audit"] for row in [*rows[name], *seen]),
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, seen, flush=True)
    for process in processes.values():
        process.stdin.close()
    for process in processes.values():
        process.wait(60)


if __name__ == "__main__":
    main()

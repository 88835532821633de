"""Pull speed and latency of this library beside the machine's limit, by way of peers.py.

Two questions, each with its goal:

throughput   64 tensors x 128 scattered blocks of 64 KiB, against the best plain copy loop with two threads.
             A control pair, the same loop once more, tells how far the machine can be trusted.
latency      2 x 4 KiB with pauses, the prompt idle and then busy in Python.

Prints a table, and saves it with every row under benchmarks/results.

    python benchmarks/pulls.py            # about 20 minutes, what a goal is judged by
    python benchmarks/pulls.py --short    # about a minute, to see where one stands
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import cbuild

HERE = Path(__file__).parent
OURS = "llm_datadist"
LATENCY = ["--tensors", "2", "--blocks", "1", "--num-blocks", "4096", "--block-bytes", "4096", "--gap-us", "1000"]
LIMIT_S = 3600


def best_kernel() -> str:
    found = cbuild.kernels(cbuild.load())
    return next(name for name in ("avx512_nt_list", "avx2_nt_list", "memcpy") if name in found)


def peers(impls: list[str], rounds: int, quiet: float, *shape: str) -> list[dict]:
    """Run peers.py and give its rows; its own words go to stderr."""
    command = [sys.executable, str(HERE / "peers.py"), "--impl", *impls, "--rounds", str(rounds), "--quiet", str(quiet)]
    done = subprocess.run([*command, *shape], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [f"{row['impl']}: {row['failed']}" for row in rows if "failed" in row]
    if failed or done.returncode:
        raise SystemExit("\n".join(["peers.py failed", *failed]))
    return rows


def summaries(rows: list[dict]) -> dict[str, dict]:
    return {row["summary"]: row for row in rows if "summary" in row}


def throughput(rounds: int, quiet: float) -> list[dict]:
    limit = f"shm_c={best_kernel()}:2"
    control = f"{limit}@X=1"
    rows = peers([limit, control, OURS], rounds, quiet)
    print("\nthroughput, 64 tensors x 128 scattered blocks of 64 KiB (512 MiB)")
    print(f"  {'':<32} {'GB/s':>7} {'of limit':>9} {'rounds':>7}")
    for name, row in summaries(rows).items():
        print(f"  {name:<32} {row['GBps']:7.2f} {row.get('vs', float('nan')):9.3f} {row['rounds']:7}")
    checked = summaries(rows).get(control, {})
    valid = checked.get("rounds", 0) >= 25 and 0.96 <= checked.get("vs", 0) <= 1.04
    print(f"  {'a verdict can be taken' if valid else 'no verdict: too few quiet rounds, or the control is off'}")
    return rows


def latency(rounds: int, quiet: float, pulls: int) -> list[dict]:
    print("\nlatency, 2 x 4 KiB with 1 ms pauses, microseconds")
    print(f"  {'':<16} {'prompt':<8} {'median':>8} {'p99':>8}")
    rows = []
    for prompt, more in (("idle", []), ("busy", ["--busy-target"])):
        part = peers(["shm_c", OURS], rounds, quiet, *LATENCY, "--iters", str(pulls), *more)
        for name, row in summaries(part).items():
            print(f"  {name:<16} {prompt:<8} {row['p50_us']:8.1f} {row['p99_us']:8.1f}")
        rows += [dict(row, prompt=prompt) for row in part]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few rounds, loud ones too")
    short = parser.parse_args().short
    rounds, quiet = (7, 9.0) if short else (41, 0.15)

    os.environ.update(LLM_DATADIST_BACKEND="simulator", LLM_DATADIST_NAMESPACE=f"bench-{os.getpid()}")
    result = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "short": short,
        "throughput": throughput(rounds, quiet),
        "latency": latency(5 if short else 9, quiet, 100 if short else 300),
    }
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    file = folder / f"pulls-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nsaved in {file}")


if __name__ == "__main__":
    main()

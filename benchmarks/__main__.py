"""Measures and writes down: `python -m benchmarks`, or `python -m benchmarks limit methods --quick`.

Every part runs in a process of its own, so that none disturbs another and a failing one does no harm.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time

from . import report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"of {', '.join(report.PARTS)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, under 3 minutes")
    parser.add_argument("--venvs", help="where the peers' environments are, or will be made")
    parser.add_argument("--report", action="store_true", help="only write README.md from the latest results")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(report.PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(report.PARTS)}")
    if options.venvs:
        os.environ["FEDFLAT_BENCH_VENVS"] = os.path.abspath(options.venvs)
    if options.report:
        report.README.write_text(report.readme(report.load(quick=False)))
        return 0
    parts = options.parts or list(report.QUICK_PARTS if options.quick else report.PARTS)
    if len(parts) == 1:
        run(parts[0], options.quick)
        return 0
    flags = ["--quick"] if options.quick else []
    failed = [
        part
        for part in parts
        if subprocess.run(
            [sys.executable, "-m", __package__, part, *flags], cwd=report.HERE.parent
        ).returncode
    ]
    if failed:
        print(f"failed, their earlier results are kept: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def run(part: str, quick: bool) -> None:
    """Measure one part, show it and write it down."""
    from .machine import machine, versions

    print(f"{report.PARTS[part]} ({part})", flush=True)
    module, began, load = report.module(part), time.perf_counter(), os.getloadavg()[0]
    result = module.measure(quick)
    entry = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "load": round(load, 2),
        "machine": machine(),
        "versions": versions(),
        "result": result,
    }
    report.save(part, entry, quick)
    print("\n" + module.table(result) + "\n")
    if not quick:
        for target in module.targets(result):
            print(f"{'met   ' if target.met else 'MISSED'}  {target.wanted}: {target.measured}")


if __name__ == "__main__":
    sys.exit(main())

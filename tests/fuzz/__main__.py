# ruff: noqa: T201 - a command reports on standard output
"""Random cases by hand: `python -m tests.fuzz 100000 --seed 0 --workers 2`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

from tests.fuzz.cases import CHECKS, Tally, work

CHUNK = 50


def outcomes(options: argparse.Namespace) -> Iterator[tuple[int, list[Any], Tally]]:
    """Of all cases, chunk by chunk."""
    stop = options.start + options.count
    tasks = [
        (options.seed, start, min(CHUNK, stop - start), options.only)
        for start in range(options.start, stop, CHUNK)
    ]
    if options.workers == 1:
        yield from map(work, tasks)
        return
    with get_context("spawn").Pool(options.workers) as pool:
        yield from pool.imap_unordered(work, tasks)


def main() -> int:
    """Run, tell, and say by the exit code whether anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first case")
    parser.add_argument("--only", choices=CHECKS, help="one check")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="no programs of violations")
    options = parser.parse_args()
    began, done = time.monotonic(), 0
    kinds, refusals, checks = Counter[str](), Counter[str](), Counter[str]()
    for count, found, tally in outcomes(options):
        done += count
        refusals.update(tally.refusals)
        checks.update(tally.checks)
        for number, one in found:
            kinds[one.check] += 1
            print(f"case {number} ({one.check}): {one.detail}")
            print(f"  again: python -m tests.fuzz 1 --seed {options.seed} --start {number}")
            if not options.quiet:
                print("\n".join(f"    {line}" for line in one.program.splitlines()))
        if sys.stderr.isatty() or done % 1000 < CHUNK:
            rate = done / (time.monotonic() - began)
            print(f"{done} of {options.count}, {rate:.0f} a second", file=sys.stderr, flush=True)
    print(f"{done} cases in {time.monotonic() - began:.0f} s, seed {options.seed}, "
          f"from {options.start}: {sum(kinds.values())} violations")  # fmt: skip
    for title, counter in (("violations", kinds), ("checks", checks), ("refusals", refusals)):
        print(
            f"{title}: " + (", ".join(f"{n} {name}" for name, n in counter.most_common()) or "none")
        )
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())

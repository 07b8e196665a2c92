"""Times that may be compared: all candidates take turns within one run."""

import statistics
import time
from collections.abc import Callable, Mapping

BUDGET = 30.0
"""Seconds after which a candidate, having run at least once, sits out the remaining rounds."""

Times = dict[str, list[float]]


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """The seconds of every run; what disturbs the machine for a while disturbs all candidates."""
    times: Times = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, function in candidates.items():
            if sum(times[name]) <= budget:
                start = clock()
                function()
                times[name].append(clock() - start)
    return times


def shortest(times: Times) -> dict[str, float]:
    """The minimum of each candidate: other programs only ever add time, and so does warming up."""
    return {name: min(runs) for name, runs in times.items()}


def medians(times: Times) -> dict[str, float]:
    """The median of each candidate: a step of training never runs alone on a machine."""
    return {name: statistics.median(runs) for name, runs in times.items()}

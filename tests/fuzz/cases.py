"""A case is a number: what it is made of, and which checks it gets, follow from it alone."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from tests.fuzz import checks, exact, extremes, gradients
from tests.fuzz.outcomes import Refusal, Violation, judged
from tests.fuzz.programs import GENERAL, QUADRATIC, SHALLOW, random_method, random_program
from tests.fuzz.trial import Trial

FAMILIES = {GENERAL: 0.25, QUADRATIC: 0.1, SHALLOW: 0.1, extremes.NAME: 0.55}
COMMON: dict[str, Callable[[Trial], None]] = {
    "loop": checks.batch_is_loop,
    "float32": checks.single_is_double,
    "zero noise": checks.still,
    "jacobian": exact.linear_at_small_noise,
    "gradients": gradients.gradients,
}
SELDOM: dict[str, Callable[[Trial], None]] = {
    "series": checks.series_is_exact,
    "other methods": checks.other_methods,
}
RARE: dict[str, Callable[[Trial], None]] = {"default": checks.default}
OWN = {QUADRATIC: ("quadratic", exact.quadratic), SHALLOW: ("samples", exact.sampled)}
SOUND = "sound"
CHECKS = [
    SOUND,
    *COMMON,
    *SELDOM,
    *RARE,
    "quadratic",
    "samples",
    "extremes: sound",
    *extremes.CHECKS,
]
CHOSEN = 1
"""Checks of the common ones that a case gets."""
CHANCE = 0.08
"""Of a case to get one of the others, which take several runs."""
LITTLE = 0.03
"""Of a case to get one of the rare ones, which take very many."""


class Tally:
    """What happened in many cases."""

    def __init__(self) -> None:
        self.refusals: dict[str, int] = {}
        self.checks: dict[str, int] = {}

    def count(self, check: str) -> None:
        self.checks[check] = self.checks.get(check, 0) + 1

    def refuse(self, refusal: Refusal) -> None:
        self.refusals[refusal.kind] = self.refusals.get(refusal.kind, 0) + 1


def run(
    seed: int, number: int, only: str | None = None, tally: Tally | None = None
) -> Iterator[Violation]:
    """The violations of one case."""
    random = Random(f"{seed}:{number}")
    torch.manual_seed(random.randrange(2**31))  # of sketches
    family = random.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    tally = tally or Tally()
    if family == extremes.NAME:
        yield from extremes.run(random, only, tally)
        return
    program, given = random_program(random, family)
    trial = Trial(program, given, random_method(random), random)
    todo: list[tuple[str, Callable[[Trial], Any]]] = [(SOUND, checks.sound)]
    todo += random.sample(list(COMMON.items()), CHOSEN)
    if family in OWN:
        todo.append(OWN[family])
    todo += [one for one in SELDOM.items() if random.random() < CHANCE]
    own = Random(f"rare {seed}:{number}")  # which leaves the other checks as they were
    todo += [one for one in RARE.items() if own.random() < LITTLE]
    if only is not None:
        every = dict([*todo, *COMMON.items(), *SELDOM.items(), *RARE.items()])
        todo = [(only, every[only])] if only in every else []
    for name, check in todo:
        tally.count(name)
        found = judged(name, lambda check=check: check(trial), trial.text)
        if found is not None:
            yield found
            if found.check.startswith(SOUND):
                return
        if name == SOUND and isinstance(trial.result, Refusal):
            tally.refuse(trial.result)


def work(task: tuple[int, int, int, str | None]) -> tuple[int, list[Any], Tally]:
    """Some cases in a row; here, as the workers of a pool do not see what `__main__` defines."""
    torch.set_num_threads(1)
    seed, start, count, only = task
    tally, found = Tally(), []
    for number in range(start, start + count):
        found += [(number, one) for one in run(seed, number, only, tally)]
    return count, found, tally

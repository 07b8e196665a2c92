"""Progress bars of a propagation, of evaluations of a model, and of stages; for `with` blocks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from tqdm import tqdm

from covprop.carriers import Work
from covprop.methods.plan import RESULT, Step, short_name

FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
"""Without planned seconds, which are not those that pass."""


@final
class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Advances by the planned time of each operation, and inside of one that repeats a step."""

    def __init__(self, steps: Sequence[Step], rates: Work) -> None:
        """rates: seconds of each kind of work."""
        self._steps = [(step, step.counts.seconds(rates)) for step in steps]
        total = sum(seconds for _, seconds in self._steps)
        self._bar = tqdm(total=total, unit="s", bar_format=FORMAT)
        self._inside = False
        self._done, self._shown = 0, 0.0

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._pass_results()
        self._bar.close()

    def _pass_results(self) -> None:
        """What a pass writes out at its end is no operation of the model."""
        while self._is_next(RESULT):
            self._bar.update(self._steps[self._done][1])
            self._done += 1

    def run(self, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """Run an operation, then advance by what was planned for it."""
        del args, kwargs
        name = short_name(function)
        if not self._inside:
            self._pass_results()
        if self._inside or not self._is_next(name):
            return proceed()
        self._inside, self._shown = True, 0.0
        self._bar.set_postfix_str(f"{self._steps[self._done][0].module} {name}".strip())
        result = proceed()
        self._inside = False
        while self._is_next(name):
            self._bar.update(self._steps[self._done][1] - self._shown)  # for each of its results
            self._done, self._shown = self._done + 1, 0.0
            if not isinstance(result, list | tuple):
                break
        return result

    def _is_next(self, name: str) -> bool:
        return self._done < len(self._steps) and self._steps[self._done][0].operation == name

    def advance(self, share: float) -> None:
        """Such a share of the operation that runs is done."""
        if self._inside:
            more = share * self._steps[self._done][1]
            self._shown += more
            self._bar.update(more)


@final
class PointBar(AbstractContextManager["PointBar"]):
    """Counts evaluations of a model."""

    def __init__(self) -> None:
        self._bar = tqdm(unit="point", unit_scale=True)

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, more: int, total: int) -> None:
        """So many more evaluations, of so many in all."""
        self._bar.total = total
        self._bar.update(more)


@final
class StageBar(AbstractContextManager["StageBar"]):
    """Counts named stages of a longer computation; invisible if not shown."""

    def __init__(self, total: int, shown: bool, unit: str = "stage") -> None:
        self._bar = tqdm(total=total, unit=unit, disable=not shown)
        self._started = False

    def __exit__(self, *error: object) -> None:
        self.begin("")
        self._bar.close()

    def begin(self, name: str) -> None:
        """Start a stage, which completes the one before."""
        if self._started:
            self._bar.update()
        self._started = True
        self._bar.set_postfix_str(name)

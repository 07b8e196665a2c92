"""Progress bars of a propagation, of evaluations of a model, and of stages; for `with` blocks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from tqdm import tqdm

from covprop.methods.plan import Step, short_name


@final
class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Advances by the planned work of each operation."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self._bar = tqdm(total=sum(step.work for step in steps), unit="FLOP", unit_scale=True)
        self._inside = False
        self._done = 0

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def run(self, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """Run an operation, then advance by what was planned for it."""
        del args, kwargs
        name, steps = short_name(function), self._steps
        planned = self._done < len(steps) and steps[self._done].operation == name
        if self._inside or not planned:
            return proceed()
        self._inside = True
        self._bar.set_postfix_str(f"{steps[self._done].module} {name}".strip())
        result = proceed()
        self._inside = False
        while self._done < len(steps) and steps[self._done].operation == name:
            self._bar.update(steps[self._done].work)  # once for each of its results
            self._done += 1
            if not isinstance(result, list | tuple):
                break
        return result


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

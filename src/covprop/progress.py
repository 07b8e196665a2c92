"""A bar that shows how far a propagation has come."""

from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from covprop.plan import Step, short_name


class ProgressBar:
    """Advances by the planned work of each operation; for a `with` block."""

    def __init__(self, steps: Sequence[Step]) -> None:
        """Know the steps in their order."""
        self._steps = list(steps)
        self._bar = tqdm(total=sum(step.work for step in steps), unit="FLOP", unit_scale=True)
        self._inside = False
        self._done = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],  # noqa: ARG002
        kwargs: dict[str, Any],  # noqa: ARG002
        proceed: Callable[[], Any],
    ) -> Any:
        """Run an operation, then advance by what was planned for it."""
        name, steps = short_name(function), self._steps
        planned = self._done < len(steps) and steps[self._done].operation == name
        if self._inside or not planned:
            return proceed()
        self._inside = True
        self._bar.set_postfix_str(f"{steps[self._done].module} {name}".strip())
        result = proceed()
        self._inside = False
        while self._done < len(steps) and steps[self._done].operation == name:
            self._bar.update(steps[self._done].work)  # as many as it has results
            self._done += 1
            if not isinstance(result, list | tuple):
                break
        return result


class PointBar:
    """Counts evaluations of a model; for a `with` block."""

    def __init__(self) -> None:
        """Begin without knowing how many there will be."""
        self._bar = tqdm(unit="point", unit_scale=True)

    def __enter__(self) -> "PointBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, more: int, total: int) -> None:
        """So many more, of so many."""
        self._bar.total = total
        self._bar.update(more)


class StageBar:
    """Counts stages of a longer work by name; for a `with` block, and invisible if not shown."""

    def __init__(self, total: int, shown: bool, unit: str = "stage") -> None:
        """Know how many there will be, and what they are called."""
        self._bar = tqdm(total=total, unit=unit, disable=not shown)
        self._begun = False

    def __enter__(self) -> "StageBar":
        return self

    def __exit__(self, *error: object) -> None:
        self.begin("")
        self._bar.close()

    def begin(self, name: str) -> None:
        """A stage begins, and the one before it is done."""
        if self._begun:
            self._bar.update()
        self._begun = True
        self._bar.set_postfix_str(name)

"""A figure: a number with the target it is held against."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Figure:
    """What was measured, and what was hoped for; without a target it is reported only."""

    name: str
    reached: float
    at_least: float | None = None
    at_most: float | None = None

    def record(self) -> dict[str, Any]:
        """As JSON, with the verdict: True, False, or None where there is no target."""
        verdict: bool | None = None
        target = ""
        if self.at_least is not None:
            target, verdict = f"at least {self.at_least:g}", self.reached >= self.at_least
        if self.at_most is not None:
            target, verdict = f"at most {self.at_most:g}", self.reached <= self.at_most
        return {"figure": self.name, "target": target, "reached": self.reached, "met": verdict}


def outcome(figures: Iterable[Figure], **facts: Any) -> dict[str, Any]:
    """What a benchmark returns: its figures, and the numbers they were made from."""
    return {"figures": [figure.record() for figure in figures], **facts}

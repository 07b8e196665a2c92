"""Everything that a page is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from covprop.comparison import Comparison, ComparisonRow
from covprop.gaussian import Gaussian
from covprop.report.page.choice import Choice
from covprop.robustness.result import Robustness
from covprop.steps import Trace


@final
@dataclass(frozen=True)
class Findings:
    """What is known of a network and its input; all but the input may be missing."""

    x: Gaussian
    given: Gaussian | None
    trace: Trace | None
    comparison: Comparison | None
    robustness: Robustness | None
    names: Sequence[str]
    """Of the outputs, or none."""

    def __post_init__(self) -> None:
        """An analysis is of the same inputs."""
        found = self.robustness
        if found is not None and found.label.shape != self.x.batch_shape:
            raise ValueError(
                f"the robustness is of a batch of shape {tuple(found.label.shape)} and x has "
                f"{tuple(self.x.batch_shape)}; give the x that was analysed"
            )

    @cached_property
    def row(self) -> ComparisonRow | None:
        """Of the comparison: the method that made the output, else the first that ran."""
        if self.comparison is None:
            return None
        known = [row for row in self.comparison.rows if row.agreement is not None]
        made = None if self.given is None else self.given.method
        same = [row for row in known if made is not None and row.method == made]
        return next(iter([*same, *known]), None)

    @cached_property
    def y(self) -> Gaussian | None:
        """The output that was given, or that the trace or the comparison has."""
        if self.given is not None:
            return self.given
        if self.trace is not None and isinstance(self.trace.output, Gaussian):
            return self.trace.output
        return None if self.row is None else self.row.gaussian

    @cached_property
    def sampled(self) -> Gaussian | None:
        """What sampling found of the same output."""
        truth = None if self.comparison is None else self.comparison.reference.gaussian
        same = truth is not None and self.y is not None and truth.mean.shape == self.y.mean.shape
        return truth if same else None

    @cached_property
    def choice(self) -> Choice:
        """What of the output is shown, or else of the input."""
        return Choice.of(self.x) if self.y is None else Choice.of(self.y, self.names)

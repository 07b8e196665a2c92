"""Everything that a page is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from covprop.comparison import Comparison, ComparisonRow
from covprop.gaussian import Gaussian
from covprop.report.page.choice import OUTPUTS, Batch, Choice, numbers_of
from covprop.report.page.pictures import SIDE
from covprop.robustness.result import Robustness
from covprop.steps import Trace

PICTURES = 3
"""Of an input: mean, noise, sensitivity."""


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
        """There is something to show, and an analysis is of the same inputs."""
        if not self.x.mean.numel() or (self.given is not None and not self.given.mean.numel()):
            raise ValueError("there is nothing to report on: the batch or the event is empty")
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
    def inputs(self) -> Choice:
        """What of the input is shown."""
        wide = max(SIDE**2, OUTPUTS)
        numbers = PICTURES * min(self.x.event_shape.numel(), wide)
        if self.y is not None:
            numbers += numbers_of(self.y.event_shape.numel())
        found = self.robustness
        risk = None if found is None else found.misclassification.probability
        return Choice.of(self.x, Batch.of(self.x.batch_shape, numbers, risk))

    @cached_property
    def outputs(self) -> Choice | None:
        """What of the output is shown: that of the same inputs."""
        if self.y is None:
            return None
        batch = self.inputs.batch
        if batch.shape != tuple(self.y.batch_shape):
            batch = Batch.of(self.y.batch_shape, numbers_of(self.y.event_shape.numel()))
        return Choice.of(self.y, batch, self.names)

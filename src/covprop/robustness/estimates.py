"""Probabilities with their errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from covprop.text_table import in_digits


@final
@dataclass(frozen=True)
class Probabilities:
    """Probabilities, and how far each may be off.

    Attributes:
        probability: The probabilities.
        stderr: One standard error of the integration or of the samples; zero if the result is
            exact.
        assumption: Estimated error from assumptions about the logits: their moments and the shape
            of their distribution. Zero if nothing is assumed, None if it is not known.

    Example:
        y = cp.Gaussian.isotropic(torch.tensor([1.0, 0.0, 0.0, 0.0]), stddev=0.5)
        p = cp.robustness.class_probabilities(y)
        print(p.probability, p.stderr)
    """

    probability: Tensor
    stderr: Tensor
    assumption: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Probabilities":
        """Apply a function to every tensor."""
        known = None if self.assumption is None else function(self.assumption)
        return Probabilities(function(self.probability), function(self.stderr), known)

    def __getitem__(self, index: Any) -> "Probabilities":
        return self.map(lambda tensor: tensor[index])

    @property
    def error(self) -> Tensor:
        """The total error of each, as far as it is known."""
        return self.stderr if self.assumption is None else self.stderr + self.assumption

    def written(self, place: Any = ()) -> str:
        """One of them with its error: 0.241 ± 0.01."""
        value, error = float(self.probability[place]), float(self.error[place])
        return in_digits(value) + ("" if error == 0 else f" ± {in_digits(error, 1)}")

    def explained(self, place: Any = ()) -> str:
        """One with both errors: 0.241 ± 0.01 (assumed distribution) ± 2e-06 (integration)."""
        one = self[place]
        if one.assumption is None or float(one.assumption) == 0 or float(one.stderr) == 0:
            return one.written()
        first, second = (in_digits(float(part), 1) for part in (one.assumption, one.stderr))
        value = in_digits(float(one.probability))
        return f"{value} ± {first} (assumed distribution) ± {second} (integration)"

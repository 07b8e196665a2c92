"""How much of the variance of an output comes from which input."""

from covprop.attribution.budget import UncertaintyBudget, uncertainty_budget

__all__ = ["UncertaintyBudget", "uncertainty_budget"]


def __dir__() -> list[str]:
    return list(__all__)

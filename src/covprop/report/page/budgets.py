"""How much noise decisions take, in a figure and in a sentence."""

import numpy as np

from covprop.report.table import in_percent, in_percent_unlike
from covprop.robustness.budget import NO_NOISE
from covprop.robustness.result import Robustness


def budget_figure(found: Robustness) -> tuple[str, str]:
    """A number, and what it is: of one input, or of the typical one of a batch."""
    budget, target = found.budget, in_percent(found.budget.target)
    if found.label.numel() == 1:
        if not bool(budget.exists):
            return "none", budget.reason[0]
        kept = f"this noise, and it keeps its label with {target}"
        return f"{_typical(found)} ×", f"{kept}{_doubt(found)}"
    typical = _typical(found)
    if typical is None:
        return "none", NO_NOISE
    kept = f"this noise, and {_half(found)} keep their label with {target}"
    return f"{typical} ×", f"{kept}{_doubt(found)}"


def budget_sentence(found: Robustness, name: str) -> str:
    """The same in words; name: of the label of a single input."""
    budget, target = found.budget, in_percent(found.budget.target)
    typical = _typical(found)
    if found.label.numel() > 1:
        half = _half(found)
        return f"There is no budget: {NO_NOISE}." if typical is None else (
            f"{half[0].upper()}{half[1:]} keep their label with {target} up to {typical} times "
            f"this noise{_doubt(found)}."
        )  # fmt: skip
    if not bool(budget.exists):
        return f"Noise budget for {target}: {budget.reason[0]}."
    grow = f"may grow {typical} times" if float(budget.level) >= 1 else (
        f"would have to shrink to {typical} of itself"
    )  # fmt: skip
    return f"The noise {grow} to keep {name} with {target}{_doubt(found)}."


def _typical(found: Robustness) -> str | None:
    """The budget that at least half of the inputs with noise have, or None if none has noise."""
    levels = found.budget.level.flatten()
    count = int((~levels.isnan()).sum())
    if not count:
        return None
    place = int(levels.argsort()[(count - 1) // 2])  # NaN last
    return found.budget.written(tuple(map(int, np.unravel_index(place, found.label.shape))))


def _half(found: Robustness) -> str:
    noisy = " with noise" if bool(found.budget.level.isnan().any()) else ""
    return f"half of the inputs{noisy}"


def _doubt(found: Robustness) -> str:
    """What samples say against it; of a batch, of how many inputs, and of the worst of them."""
    wrong = (~found.budget_agrees).flatten()
    if not bool(wrong.any()):
        return ""
    shares = found.budget_sampled.probability.double().flatten()[wrong]
    if found.label.numel() == 1:
        return f" by propagation; {found.budget_remark((0,) * found.label.dim())}"
    lowest = in_percent_unlike(float(shares.min()), found.budget.target)
    return (
        f", by propagation; samples disagree about {int(wrong.sum()):,} of {wrong.numel():,} "
        f"budgets and keep a label with {lowest} there at the least"
    )

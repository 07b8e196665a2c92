"""Which orders of its series an activation uses, seen while it is used."""

import copy
from collections.abc import Callable
from typing import Any

from covprop.activations import Activation
from covprop.activations.correlated import Correlated
from covprop.activations.rescaled import Rescaled
from covprop.methods import LayerwiseMethod, Series

DIRECT = 0
"""The order of pairs that a formula without a series has done."""


def observed(
    activation: Activation, method: LayerwiseMethod, note: Callable[[int], None]
) -> Activation:
    """A copy of an activation that notes the order of each series that the method makes of it.

    `Series` asks for as many coefficients as it has terms; `Exact` chooses for each block of pairs.
    """
    seen = copy.copy(activation)
    if isinstance(method, Series):
        moments = activation.moments

        def noting_moments(mean: Any, variance: Any, order: int) -> Any:
            note(order)
            return moments(mean, variance, order)

        object.__setattr__(seen, "moments", noting_moments)
    elif isinstance(activation, Rescaled):
        object.__setattr__(seen, "inner", observed(activation.inner, method, note))
    elif isinstance(activation, Correlated):
        split, direct = activation.split, activation.direct

        def noting_split(*block: Any) -> Any:
            order, apart = split(*block)
            if order:
                note(order)
            return order, apart

        def noting_direct(*block: Any) -> Any:
            note(DIRECT)
            return direct(*block)

        object.__setattr__(seen, "split", noting_split)
        object.__setattr__(seen, "direct", noting_direct)
    return seen

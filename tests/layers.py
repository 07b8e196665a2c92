"""`propagate` and `joint` by Gaussian layers, unless another method is given.

What a rule, a carrier or a structure does is tested by the method that has nothing else in it; the
default, `cp.Auto`, chooses among several.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import covprop as cp

LAYERS = cp.GaussianLayers()
propagate = partial(cp.propagate, method=LAYERS)


def joint(module: Callable[..., Any], x: cp.Gaussian, method: Any = LAYERS) -> cp.Gaussian:
    return cp.joint(module, x, method)

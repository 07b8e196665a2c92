"""`propagate` and `joint` by Gaussian layers, unless another method is given.

What a rule, a carrier or a structure does is tested by the method that has nothing else in it; the
default, `cp.Auto`, chooses among several.
"""

from functools import partial

import covprop as cp

propagate = partial(cp.propagate, method=cp.GaussianLayers())
joint = partial(cp.joint, method=cp.GaussianLayers())

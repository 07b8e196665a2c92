"""Ways to treat nonlinearities."""

from covprop.methods.assumed import AssumedDensity
from covprop.methods.base import LayerwiseMethod
from covprop.methods.exact import Exact
from covprop.methods.series import Series

__all__ = ["AssumedDensity", "Exact", "LayerwiseMethod", "Series"]

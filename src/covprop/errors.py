"""What covprop raises; every message is one sentence that says what to do."""


class CovpropError(Exception):
    """The base of every error that covprop defines."""


class InvalidGaussian(CovpropError, ValueError):
    """A mean and covariance that do not describe a Gaussian."""


class UnsupportedOperation(CovpropError, NotImplementedError):
    """An operation on an in-flight Gaussian that has no rule, or that no rule could do right."""


class BatchDimensionError(UnsupportedOperation):
    """An operation that would mix, move or drop a batch dimension."""


class QuadratureError(CovpropError, ArithmeticError):
    """A function whose moments quadrature cannot find to the accuracy promised."""


class MomentOverflow(CovpropError, OverflowError):
    """An activation whose moments are too large for the dtype."""


class InconsistentBranches(CovpropError, ArithmeticError):
    """Branches whose approximate dependence gives a negative variance."""


class ToleranceNotReached(CovpropError, ArithmeticError):
    """A series whose error bound stays above the tolerance at the largest order."""

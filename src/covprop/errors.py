"""What covprop raises; every message is one sentence that says what to do."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket


class CovpropError(Exception):
    """The base of every error that covprop defines."""

    layer: nn.Module | None = None
    """The module that it is about, where another was running."""


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


class TooLarge(CovpropError, MemoryError):
    """A propagation whose covariances do not fit into the memory that is free."""


class ToleranceNotReached(CovpropError, ArithmeticError):
    """A series whose error bound stays above the tolerance at the largest order."""


class TrainingDiverged(CovpropError, ArithmeticError):
    """A training whose loss is no longer a number."""


class InvalidFile(CovpropError, ValueError):
    """A file that is damaged, or of something else."""


class LostRank(CovpropError, RuntimeError):
    """A process among several that ended before its share was done; one of the others says so."""

    def __init__(self, message: str, speaker: int = 0) -> None:
        """speaker: the rank that tells it."""
        super().__init__(message)
        self.speaker = speaker


class ApproximationWarning(UserWarning):
    """An approximation that is likely to be rough for this input."""


def calling_module() -> nn.Module | None:
    """The innermost module that is being called.

    Of frames, those of torch's own call alone are looked into: what is looked into lives as long as
    its frame, and these hold their arguments anyway.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a message: torch's own name for it, where it is torch's."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return f"torch.ops.{function}"
    name = getattr(function, "__name__", None) or repr(function)
    home = getattr(function, "__module__", None) or getattr(
        getattr(function, "__objclass__", None), "__name__", ""
    )
    home = "torch.Tensor" if home in ("TensorBase", "_TensorBase", "torch._tensor") else home
    home = "torch.nn.functional" if home == "torch._C._nn" else home
    return f"{home}.{name}" if home else name

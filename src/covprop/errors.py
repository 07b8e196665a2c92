"""What covprop raises and warns of; every message is one sentence that says what to do."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from covprop.modules import calling_modules, path_of

P = ParamSpec("P")
R = TypeVar("R")


class CovpropError(Exception):
    """The base of every error that covprop defines."""

    layer: nn.Module | None = None
    """The module that it is about, where another was running."""


class InvalidGaussian(CovpropError, ValueError):
    """A mean and covariance that do not describe a Gaussian."""


class UnsupportedOperation(CovpropError, NotImplementedError):
    """An operation without a rule, or one that no rule can compute correctly."""


class MissingAttribute(UnsupportedOperation, AttributeError):
    """An attribute of tensors that an in-flight Gaussian does not have; `hasattr` is false."""


class RandomDraws(UnsupportedOperation):
    """Random numbers that a model draws itself, which a method takes as constants."""


class BatchDimensionError(UnsupportedOperation):
    """An operation that would mix, move or drop a batch dimension."""


class OutsideDomain(UnsupportedOperation):
    """A function of a Gaussian that reaches where the function has no value or no moments."""


class QuadratureError(CovpropError, ArithmeticError):
    """A function whose moments quadrature cannot compute accurately."""


class MomentOverflow(CovpropError, OverflowError):
    """Moments that are too large for the dtype, infinite or NaN."""


class InconsistentBranches(CovpropError, ArithmeticError):
    """Branches whose approximate dependence gives a negative variance.

    Args:
        message: What happened, and what to do.
        elements: Which elements of the batch have a negative variance, (*batch); None if that is
            not known.
    """

    def __init__(self, message: str, elements: Tensor | None = None) -> None:
        """Keep both."""
        super().__init__(message)
        self.elements = elements


class TooLarge(CovpropError, MemoryError):
    """A propagation whose covariances do not fit into free memory."""


class ToleranceNotReached(CovpropError, ArithmeticError):
    """A series whose error bound stays above the tolerance at the largest order."""


class TrainingDiverged(CovpropError, ArithmeticError):
    """A training whose loss became NaN or infinite."""


class InvalidFile(CovpropError, ValueError):
    """A file that is damaged, or of another kind."""


class LostRank(CovpropError, RuntimeError):
    """A process among several that ended before its share was done; one of the others says so."""

    def __init__(self, message: str, speaker: int = 0) -> None:
        """speaker: the rank that tells it."""
        super().__init__(message)
        self.speaker = speaker


class ApproximationWarning(UserWarning):
    """An approximation that is probably inaccurate for this input."""


class BatchWarning(UserWarning):
    """The first dimension of a Gaussian looks like a batch, and was not given as one."""


class DropoutWarning(UserWarning):
    """Dropout in training mode, whose masks are random."""


_approximations: ContextVar[list[str] | None] = ContextVar("approximations", default=None)


@contextmanager
def approximations_ignored() -> Iterator[list[str]]:
    """Without `ApproximationWarning`s of this thread, whose texts are in the list.

    warnings.catch_warnings is of all threads.
    """
    texts: list[str] = []
    before = _approximations.set(texts)
    try:
        yield texts
    finally:
        _approximations.reset(before)


def warn_user(message: str, category: type[Warning] = UserWarning, every_time: bool = False) -> str:
    """Warn at the line that called covprop, and name the module that was running.

    Python shows a text once for each line by default: with the path, each module has its own;
    every_time: it forgets that it has shown it. The text is returned.
    """
    path = _running_path()
    text = message if path is None else f"in {path}: {message}"
    ignored = _approximations.get()
    if issubclass(category, ApproximationWarning) and ignored is not None:
        ignored.append(text)
        return text
    line = _callers_frame()
    warnings.warn_explicit(
        text,
        category,
        line.f_code.co_filename,
        line.f_lineno,
        module=line.f_globals.get("__name__"),
        registry={} if every_time else line.f_globals.setdefault("__warningregistry__", {}),
    )
    return text


DECORATORS = ("torch", "contextlib")
"""Packages whose frames stand between a decorated function of covprop and its caller."""


def _callers_frame() -> FrameType:
    """The frame that called the outermost function of covprop, or that one if none did."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    packages = [_home(frame).partition(".")[0] for frame in frames]
    outermost = max(i for i, package in enumerate(packages) if package == __package__)
    beyond = range(outermost + 1, len(frames))
    return frames[next((i for i in beyond if packages[i] not in DECORATORS), outermost)]


def _running_path() -> str | None:
    """The path of the innermost module that covprop runs, within the outermost that it runs."""
    running = calling_modules(lambda frame: _home(frame) == f"{__package__}.methods.call")
    if running is None:  # covprop runs none: these are the caller's
        return None
    paths = (path_of(layer, running[-1]) for layer in running)
    return next((path for path in paths if path is not None), None)


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a message: torch's own name for it, where it is torch's."""
    function = inspect.unwrap(function)
    if isinstance(function, OpOverload | OpOverloadPacket):
        return f"torch.ops.{function}"
    if hasattr(function, "formula"):  # a composed function
        return str(function.formula)
    if isinstance(function, partial) and not hasattr(function, "__name__"):
        return name_of(function.func)
    name = getattr(function, "__name__", None) or repr(function)
    home = getattr(function, "__module__", None) or getattr(
        getattr(function, "__objclass__", None), "__name__", ""
    )
    home = "torch.Tensor" if home in ("TensorBase", "_TensorBase", "torch._tensor") else home
    home = "torch.nn.functional" if home == "torch._C._nn" else home
    public = name.lstrip("_")
    if public != name and getattr(sys.modules.get(str(home)), public, None) is function:
        name = public  # torch.nn.functional.threshold, whose argument has its name
    return f"{home}.{name}" if home else name


def positional_deprecated(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Take keyword arguments by position as well, with a `DeprecationWarning` at the caller's line.

    Args:
        names: The keyword arguments, in the order that they could once be given in after the
            positional ones.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = [item.kind for item in inspect.signature(function).parameters.values()]
        count = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            named = dict(zip(names, args[count:], strict=False))
            if not named or len(args) > count + len(names) or named.keys() & kwargs.keys():
                return function(*args, **kwargs)  # right, or Python's own error
            words = ", ".join(f"{keyword}=..." for keyword in named)
            warnings.warn(
                f"cp.{name} takes {' and '.join(named)} by keyword: write {words}",
                DeprecationWarning,
                stacklevel=2,
            )
            return function(*args[:count], **kwargs, **named)  # type: ignore[arg-type]

        return wrapped

    return decorate

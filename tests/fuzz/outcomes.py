"""What a case comes to: an answer, a refusal, or a violation that says how to see it again."""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import covprop as cp


@dataclass(frozen=True)
class Violation:
    """Something that must not be: which check, what was found, and what is allowed."""

    check: str
    detail: str
    program: str = ""


@dataclass(frozen=True)
class Refusal:
    """An error of covprop's own, which is an answer."""

    kind: str
    message: str


class Wrong(Exception):
    """A check that failed."""


def answer(call: Callable[[], Any]) -> Any:
    """The result of a call, or its refusal; any other exception or warning goes on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", cp.ApproximationWarning)
        try:
            return call()
        except cp.CovpropError as error:
            return Refusal(type(error).__name__, str(error))


def judged(name: str, check: Callable[[], Any], program: Callable[[], str]) -> Violation | None:
    """Run a check; what it raises is a violation."""
    try:
        check()
    except Wrong as error:
        return Violation(name, str(error), program())
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in place if "covprop" in frame.filename] or list(place)
        where = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"
        detail = f"{type(error).__name__} at {where}: {str(error)[:300]}"
        return Violation(f"{name}: raised", detail, program())
    return None


def compare(what: str, actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> None:
    """|actual - expected| <= allowed everywhere, else Wrong with the worst entry."""
    if actual.shape != expected.shape:
        raise Wrong(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    error = (actual.detach().double() - expected.detach().double()).abs()
    allowed = allowed.detach().double().expand(error.shape)
    error = torch.where(actual.detach().double() == expected.detach().double(), 0.0, error)
    if bool((error <= allowed).all()):
        return
    ratio = (error / allowed.clamp(min=1e-300)).nan_to_num(nan=torch.inf)
    at = int(ratio.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), error.shape))
    raise Wrong(
        f"{what} at {index}: {float(actual.reshape(-1)[at])!r}, expected "
        f"{float(expected.reshape(-1)[at])!r}, off by {float(error.reshape(-1)[at]):.2e} where "
        f"{float(allowed.reshape(-1)[at]):.2e} is allowed"
    )

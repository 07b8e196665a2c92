"""Methods by their names on the command line: `cumulants`, `series:4`, `auto:0.01`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from covprop.methods.auto import Auto
from covprop.methods.base import Method, is_method
from covprop.methods.comparison.piecewise import PiecewiseLinear
from covprop.methods.comparison.published import Wu2019
from covprop.methods.control import ControlVariate
from covprop.methods.cumulants import Cumulants
from covprop.methods.layerwise import AssumedDensity, GaussianLayers
from covprop.methods.linearized import Linearized, Unscented
from covprop.methods.montecarlo import MonteCarlo
from covprop.methods.quasi_monte_carlo import QuasiMonteCarlo
from covprop.methods.series import Series
from covprop.methods.sketched import Sketched
from covprop.methods.split import MAX_COMPONENTS, Split

MOST_SAMPLES = 10**9  # each is a run of the network; a thousand times more give two more digits
MOST_TANGENTS = 10**6  # each goes through the network as a sample does
MOST_TERMS = 512  # after which a series gives up a tolerance, too


class MethodChoice(NamedTuple):
    """How a method is made from the text after the colon and a seed, and what that text is.

    shared: whether processes that share a batch take the same points, as one would for all of it.
    """

    make: Callable[[str, int | None], Method]
    option: str = ""
    shared: bool = False


def _count(text: str, most: int, what: str) -> list[Any]:
    """The number in an option as an argument of a method, or no argument."""
    if not text:
        return []
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is no whole number")
    if len(text.lstrip("0")) > len(str(most)) or int(text) > most:
        raise ValueError(f"it takes {most:,} {what} at most")
    return [int(text)]


def _sampling(
    make: Callable[..., Method], most: int, what: str
) -> Callable[[str, int | None], Method]:
    """With a generator of its own, or torch's if there is no seed."""

    def made(text: str, seed: int | None) -> Method:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return make(*_count(text, most, what), generator=generator)

    return made


def _series(text: str, _: int | None) -> Method:
    """An order if it is a whole number, else a tolerance."""
    if not text or text.isdigit():
        return Series(*_count(text, MOST_TERMS, "terms"))
    return Series(tolerance=float(text))


def _piecewise(text: str, _: int | None) -> Method:
    """A ReLU by its number among the calls, or by the name of its module."""
    number = text.removeprefix("-").isdigit()
    return PiecewiseLinear((int(text) if number else text) if text else None)


def _points(text: str, seed: int | None) -> Method:
    """With a number of points, or without."""
    method = QuasiMonteCarlo(*_count(text, MOST_SAMPLES, "points"))
    return method if seed is None else replace(method, seed=seed)


def _auto(text: str, seed: int | None) -> Method:
    """With a tolerance, or without."""
    method = Auto(float(text) if text else None)
    return method if seed is None else replace(method, seed=seed)


METHODS: dict[str, MethodChoice] = {
    "auto": MethodChoice(_auto, "TOLERANCE", shared=True),
    "gaussian-layers": MethodChoice(lambda *_: GaussianLayers()),
    "cumulants": MethodChoice(lambda *_: Cumulants()),
    "split": MethodChoice(
        lambda text, _: Split(*_count(text, MAX_COMPONENTS, "components")), "COMPONENTS"
    ),
    "sketched": MethodChoice(_sampling(Sketched, MOST_TANGENTS, "tangents"), "TANGENTS"),
    "series": MethodChoice(_series, "ORDER or TOLERANCE"),
    "quasimontecarlo": MethodChoice(_points, "POINTS", shared=True),
    "montecarlo": MethodChoice(_sampling(MonteCarlo, MOST_SAMPLES, "samples"), "SAMPLES"),
    "controlvariate": MethodChoice(_sampling(ControlVariate, MOST_SAMPLES, "samples"), "SAMPLES"),
    "linearized": MethodChoice(lambda *_: Linearized()),
    "unscented": MethodChoice(lambda *_: Unscented()),
    "wu2019": MethodChoice(lambda *_: Wu2019()),
    "piecewise": MethodChoice(_piecewise, "LAYER"),
    "assumed": MethodChoice(lambda *_: AssumedDensity()),
}
FORMER_NAMES = {"exact": "gaussian-layers"}


def _letters(name: str) -> str:
    """Of the names of a method, such as `quasi-monte-carlo` and `QuasiMonteCarlo`, the same."""
    return name.lower().replace("-", "").replace("_", "")


_SPELLINGS = {_letters(name): name for name in METHODS} | FORMER_NAMES
METHOD_NAMES = ", ".join(
    f"{name}[:{choice.option}]" if choice.option else name for name, choice in METHODS.items()
)


def parse_method(text: str, seed: int | None = None, rank: int = 0) -> Method:
    """The method of a name such as `series:4`.

    Args:
        text: The name, and after a colon its option.
        seed: Of what it draws; torch's own generator and the default seeds without it.
        rank: Of this process among several, which draw other numbers unless they share points.

    Raises:
        ValueError: Where it is no method.
    """
    name, _, option = text.partition(":")
    choice = METHODS.get(_SPELLINGS.get(_letters(name), ""))
    if choice is None:
        raise ValueError(f"{text!r} is no method; there are {METHOD_NAMES}")
    if option and not choice.option:
        raise ValueError(f"the method {name} takes no option, so {option!r} says nothing")
    own = seed if seed is None or choice.shared else seed + rank
    try:
        return choice.make(option, own)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no method: {error}") from error


def is_name(given: object) -> bool:
    """Whether it is the name of a method, with its option or without."""
    return isinstance(given, str) and _letters(given.partition(":")[0]) in _SPELLINGS


def as_method(given: Any) -> Method:
    """A method as it is, or that of a name; a sentence for anything else."""
    if isinstance(given, str):
        return parse_method(given)
    if isinstance(given, Method):
        return given
    if is_method(given):
        name = given.__name__
        raise TypeError(f"a method is an object, and cp.{name} is a class: write cp.{name}()")
    raise TypeError(
        "a method is an object such as cp.GaussianLayers() or cp.Series(order=4), or a name such "
        f"as 'cumulants', not {given!r}"
    )

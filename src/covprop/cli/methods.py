"""Methods by name: `exact`, `series:4`, `montecarlo:10000` ..., in one table."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from covprop.cli.refusals import Refusal, quoted, sentence
from covprop.methods import (
    AssumedDensity,
    ControlVariate,
    Exact,
    Linearized,
    Method,
    MonteCarlo,
    PiecewiseLinear,
    Series,
    Sketched,
    Split,
    Unscented,
    Wu2019,
)
from covprop.methods.split import MOST

MOST_SAMPLES = 10**9
"""Each costs a run of the network, and a thousand times more are worth two more digits."""
MOST_TANGENTS = 10**6
"""Of a sketch: each goes through the network as a sample does."""
MOST_TERMS = 512
"""Of a series; a tolerance is given up after as many, too."""


class Choice(NamedTuple):
    """How a method is made of what follows the colon, and what that is."""

    make: Callable[[str, int], Method]
    option: str = ""


def _whole(text: str, most: int, what: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{quoted(text)} is no whole number")
    if len(text.lstrip("0")) > len(str(most)) or int(text) > most:
        raise ValueError(f"it takes {most:,} {what} at most")
    return int(text)


def _series(text: str, seed: int) -> Method:
    """An order if it is a whole number, else a tolerance."""
    del seed
    if not text:
        return Series()
    if text.isdigit():
        return Series(order=_whole(text, MOST_TERMS, "terms"))
    return Series(tolerance=float(text))


def _sampled(text: str, seed: int) -> Method:
    generator = torch.Generator().manual_seed(seed)
    if not text:
        return MonteCarlo(generator=generator)
    return MonteCarlo(_whole(text, MOST_SAMPLES, "samples"), generator)


def _controlled(text: str, seed: int) -> Method:
    generator = torch.Generator().manual_seed(seed)
    if not text:
        return ControlVariate(generator=generator)
    return ControlVariate(_whole(text, MOST_SAMPLES, "samples"), generator=generator)


def _sketched(text: str, seed: int) -> Method:
    generator = torch.Generator().manual_seed(seed)
    if not text:
        return Sketched(generator=generator)
    return Sketched(_whole(text, MOST_TANGENTS, "tangents"), generator=generator)


def _split(text: str, seed: int) -> Method:
    del seed
    return Split(_whole(text, MOST, "components")) if text else Split()


def _piecewise(text: str, seed: int) -> Method:
    """A ReLU by its number among the calls, or by the name of its module."""
    del seed
    number = text.removeprefix("-").isdigit()
    return PiecewiseLinear((int(text) if number else text) if text else None)


METHODS: dict[str, Choice] = {
    "exact": Choice(lambda *_: Exact()),
    "split": Choice(_split, "COMPONENTS"),
    "sketched": Choice(_sketched, "TANGENTS"),
    "series": Choice(_series, "ORDER or TOLERANCE"),
    "montecarlo": Choice(_sampled, "SAMPLES"),
    "controlvariate": Choice(_controlled, "SAMPLES"),
    "linearized": Choice(lambda *_: Linearized()),
    "unscented": Choice(lambda *_: Unscented()),
    "wu2019": Choice(lambda *_: Wu2019()),
    "piecewise": Choice(_piecewise, "LAYER"),
    "assumed": Choice(lambda *_: AssumedDensity()),
}
NAMES = ", ".join(
    f"{name}[:{choice.option}]" if choice.option else name for name, choice in METHODS.items()
)


def method(text: str, seed: int) -> Method:
    """The method of a name such as `series:4`."""
    name, _, option = text.partition(":")
    choice = METHODS.get(name.lower())
    if choice is None:
        raise Refusal(f"{quoted(text)} is no method; there are {NAMES}")
    if option and not choice.option:
        raise Refusal(f"the method {name} takes no option, so {quoted(option)} says nothing")
    try:
        return choice.make(option, seed)
    except (ValueError, OverflowError) as error:
        raise Refusal(f"{quoted(text)} is no method: {sentence(error)}") from error

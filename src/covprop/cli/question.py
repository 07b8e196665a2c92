"""What is asked: a model and a Gaussian, read from what the user named; and how it is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from covprop.cli import models
from covprop.cli.gaussians import Input, gaussian
from covprop.cli.refusals import Refusal, named, sentence
from covprop.errors import CovpropError
from covprop.gaussian import Gaussian

NO_MEMORY = "can't allocate memory"
"""What torch says of an allocation that failed."""


@final
@dataclass(frozen=True)
class Question:
    """A model and its input."""

    name: str
    module: Any
    x: Gaussian


def asked(
    name: str, given: Input, weights: str | None, allow_pickle: bool, output: str | None
) -> Question:
    """Read everything that was named, the model first."""
    model = models.load(name, weights, allow_pickle)
    with running():
        x = gaussian(given, model.expected)
    module = model.module if output is None else Picked(model.module, output)
    return Question(model.name, module, x)


@contextmanager
def running() -> Iterator[None]:
    """What covprop refuses, or a model does not bear, becomes one sentence."""
    try:
        yield
    except Refusal:
        raise
    except CovpropError as error:
        text, plan, _ = sentence(error).partition(" The plan:")
        raise Refusal(f"{text} (covprop plan shows it all)" if plan else text) from error
    except MemoryError as error:
        raise Refusal("there is not enough memory for this") from error
    except Exception as error:  # a model from a file may fail in any way
        if NO_MEMORY in str(error):
            raise Refusal("there is not enough memory for this") from error
        if isinstance(error, ValueError) and _is_ours(error):
            raise Refusal(sentence(error)) from error
        raise Refusal(f"the model does not take this input: {named(error)}") from error


def _is_ours(error: Exception) -> bool:
    """Whether covprop itself refused an argument, and not a function that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("covprop.")


@final
class Picked(nn.Module):
    """One output of a model that returns several."""

    def __init__(self, model: Any, output: str) -> None:
        """By its number, or by its key in a dict."""
        super().__init__()
        self.model, self._output = model, output

    def forward(self, x: Any) -> Any:
        """The output, or a refusal that says which there are."""
        result = self.model(x)
        found: dict[str, Any] = {}
        if isinstance(result, dict):
            found = {str(key): value for key, value in result.items()}
        elif isinstance(result, list | tuple):
            found = {str(number): value for number, value in enumerate(result)}
        if self._output not in found:
            if not found:
                raise Refusal("the model has one output only, so leave out --output")
            listed = ", ".join(found)
            raise Refusal(f"the model has no output {self._output!r}; there are {listed}")
        return found[self._output]


def one(result: Any) -> Gaussian:
    """A result that is one Gaussian."""
    if isinstance(result, Gaussian):
        return result
    if isinstance(result, dict):
        raise Refusal(f"the model returns {', '.join(map(str, result))}; choose one with --output")
    if isinstance(result, list | tuple):
        raise Refusal(
            f"the model returns {len(result)} values; choose one with --output, from 0 to "
            f"{len(result) - 1}"
        )
    raise Refusal("the output of the model does not depend on its input")

"""What options name: a model and its Gaussian input, and a method."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

import torch
import typer
from torch import Tensor, nn

from covprop.cli import arrays, models
from covprop.cli.archive import Expected
from covprop.cli.output import Refusal, describe_error, quoted, raised_in, sentence
from covprop.errors import CovpropError
from covprop.flow.nests import parts
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.methods.names import parse_method

OUT_OF_MEMORY = "can't allocate memory"  # torch's words

MODEL = (
    "A torch.export archive (.pt2), an ONNX file (.onnx), or package.module:factory, a function "
    "without arguments that makes the network (found as python -m finds it)."
)
MEAN = "The mean of the input: .npy, .npz, .csv or .pt; FILE.npz:NAME takes one of several arrays."
COVARIANCE = (
    "The covariance of the input, (n, n), also for every input of a batch, or (*batch, n, n)."
)
STDDEV = "Instead: independent noise of this standard deviation, or these."
VARIANCE = "The same as variance."
BATCH_DIMS = "How many leading dimensions of the mean are a batch."
SHAPE = "The shape of the mean, if the file has another."
WEIGHTS = "Weights for package.module:factory: .safetensors, or .pt."
OUTPUT = "Which output, of a model that returns several."
PICKLE = "Load pickles too, which can run any code: only from who you trust."


@final
@dataclass(frozen=True)
class Request:
    """A model and its input."""

    name: str
    module: Any
    x: Gaussian


def read_request(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)],
    mean: Annotated[str, typer.Option(metavar="FILE", help=MEAN, show_default=False)],
    covariance: Annotated[str | None, typer.Option(metavar="FILE", help=COVARIANCE)] = None,
    stddev: Annotated[str | None, typer.Option(metavar="X|FILE", help=STDDEV)] = None,
    variance: Annotated[str | None, typer.Option(metavar="X|FILE", help=VARIANCE)] = None,
    batch_dims: Annotated[int, typer.Option(min=0, metavar="N", help=BATCH_DIMS)] = 0,
    shape: Annotated[str | None, typer.Option(metavar="1,8,8", help=SHAPE)] = None,
    weights: Annotated[str | None, typer.Option(metavar="FILE", help=WEIGHTS)] = None,
    output: Annotated[str | None, typer.Option(metavar="N|NAME", help=OUTPUT)] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help=PICKLE)] = False,
) -> Request:
    """Read the model, then its input."""
    name, module, expected = models.load(model, weights, allow_pickle)
    given = {"stddev": stddev, "variance": variance, "covariance": covariance}
    noise = [(name, text) for name, text in given.items() if text is not None]
    if len(noise) != 1:
        raise Refusal(
            "give the noise as one of --stddev NUMBER|FILE, --variance NUMBER|FILE and "
            "--covariance FILE"
        )
    (kind, text), *_ = noise
    with running():
        center = _mean(mean, shape, batch_dims, expected)
        if kind == "covariance":
            x = _correlated(text, center, batch_dims)
        else:
            x = _independent(kind, text, center, batch_dims)
    return Request(name, module if output is None else SelectedOutput(module, output), x)


@contextmanager
def running() -> Iterator[None]:
    """Turn errors of covprop and of the model into one sentence."""
    try:
        yield
    except Refusal:
        raise
    except CovpropError as error:
        text, plan, _ = sentence(error).partition(" The plan:")
        raise Refusal(f"{text} (covprop plan shows it all)" if plan else text) from error
    except Exception as error:  # a model from a file may fail in any way
        if isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error):
            raise Refusal("there is not enough memory for this") from error
        module = raised_in(error)[0].f_globals.get("__name__", "")
        if isinstance(error, ValueError) and module.startswith("covprop."):  # about an argument
            raise Refusal(sentence(error)) from error
        raise Refusal(f"the model does not take this input: {describe_error(error)}") from error


@final
class SelectedOutput(nn.Module):
    """One output of a model that returns several, by its number, key or name of a field."""

    def __init__(self, model: Any, output: str) -> None:
        super().__init__()
        self.model, self._output = model, output

    def forward(self, x: Any) -> Any:
        """The output, or a refusal that lists the outputs."""
        outputs = parts(self.model(x))
        if not outputs:
            raise Refusal("the model has one output only, so leave out --output")
        if self._output not in outputs:
            listed = ", ".join(outputs)
            raise Refusal(f"the model has no output {self._output!r}; there are {listed}")
        return outputs[self._output]


def single_output(result: Any) -> Gaussian:
    """A result that is one Gaussian."""
    if isinstance(result, Gaussian):
        return result
    if isinstance(result, list | tuple):
        raise Refusal(
            f"the model returns {len(result)} values; choose one with --output, from 0 to "
            f"{len(result) - 1}"
        )
    if outputs := parts(result):
        raise Refusal(f"the model returns {', '.join(outputs)}; choose one with --output")
    raise Refusal("the output of the model does not depend on its input")


def _mean(name: str, shape: str | None, batch_dims: int, expected: Expected) -> Tensor:
    """The mean, in the shape and dtype that the model takes."""
    values = arrays.load(name)
    takes_matrix = expected.shape is not None and len(expected.shape) == arrays.MATRIX
    if not batch_dims and not takes_matrix:
        values = _vector(name, values)
    if shape is not None:
        values = _reshaped(name, values, shape)
    sizes = tuple(values.shape)
    if not values.numel():
        raise Refusal(f"{name} is empty: it has shape {sizes}")
    if batch_dims > len(sizes):
        raise Refusal(f"a mean of shape {sizes} cannot have {batch_dims} batch dimensions")
    expected.check(values.shape)
    return _converted(values, expected.dtype or values.dtype, name)


def _reshaped(name: str, values: Tensor, text: str) -> Tensor:
    words = text.replace("x", ",").split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", word) for word in words):
        raise Refusal(f"--shape takes whole numbers such as 1,8,8 and not {quoted(text)}")
    shape = [int(word) for word in words]
    count = math.prod(shape)
    if count != values.numel():
        raise Refusal(f"--shape {text} has {count:,} elements, and {name} {values.numel():,}")
    return values.reshape(shape)


def _vector(name: str, values: Tensor) -> Tensor:
    """A .csv file always has rows and columns; one row or one column is a vector."""
    is_table = Path(name).suffix.lower() == ".csv"
    return values.flatten() if is_table and 1 in values.shape else values


def _converted(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    result = values.to(dtype)
    if not bool(torch.isfinite(result).all()):
        raise Refusal(f"{name} has numbers that are too large for {dtype}, the model's dtype")
    return result


WORDS = {"stddev": "standard deviation", "variance": "variance"}


def _independent(kind: str, text: str, mean: Tensor, batch_dims: int) -> Gaussian:
    """One number for all, one for each element of an event or of the mean."""
    event = mean.shape[batch_dims:]
    try:
        values = torch.tensor(float(text), dtype=torch.float64)
    except ValueError:
        values = _vector(text, arrays.load(text))
    if not bool(torch.isfinite(values).all()):
        raise Refusal(f"--{kind} takes a finite number or a file, and not {quoted(text)}")
    if values.dim() == 1 and values.numel() == event.numel():
        values = values.reshape(event)
    if values.shape not in (torch.Size(()), event, mean.shape):
        raise Refusal(
            f"{text} has shape {tuple(values.shape)}; {WORDS[kind]}s are one number, or have "
            f"the shape {tuple(event)} of the input"
        )
    if bool((values < 0).any()):
        raise Refusal(f"--{kind} {text}: a {WORDS[kind]} cannot be negative")
    noise = {kind: _converted(values, mean.dtype, f"--{kind} {text}").expand(mean.shape)}
    return Gaussian.diagonal(mean, **noise, batch_dims=batch_dims)


def _correlated(name: str, mean: Tensor, batch_dims: int) -> Gaussian:
    """One covariance for every Gaussian of the batch, or one for each."""
    matrix = arrays.load(name)
    shape = tuple(matrix.shape)
    if matrix.dim() < arrays.MATRIX or shape[-1] != shape[-2]:
        raise Refusal(
            f"{name} has shape {shape}, and a covariance (n, n); give standard deviations with "
            "--stddev"
        )
    batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
    if shape[:-2] not in ((), tuple(batch)) or shape[-1] != size:
        wanted = f"({size}, {size})" + (f" or {(*batch, size, size)}" if batch_dims else "")
        raise Refusal(
            f"{name} has shape {shape}, and the mean has shape {tuple(mean.shape)} with "
            f"{batch_dims} batch dimensions, so the covariance has {wanted}"
        )
    matrix = _converted(matrix, mean.dtype, name)
    if matrix.dim() == arrays.MATRIX and batch_dims:
        Gaussian(mean[(0,) * batch_dims], matrix)  # checked once, not for each
        return Gaussian(mean, matrix.expand(*batch, size, size), validate_args=False)
    return Gaussian(mean, matrix)


def method(text: str, seed: int, rank: int = 0) -> Method:
    """The method of a name such as `series:4`, for a process of several."""
    try:
        return parse_method(text, seed, rank)
    except ValueError as error:
        raise Refusal(sentence(error)) from error

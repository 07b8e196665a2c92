"""`--report FILE.html`: a page with everything that a command found, and the way through layers."""

from pathlib import Path

import torch

from covprop.cli.question import Question, running
from covprop.cli.refusals import Refusal
from covprop.comparison import Comparison
from covprop.gaussian import Gaussian
from covprop.methods import LayerwiseMethod
from covprop.report import page
from covprop.robustness import Robustness
from covprop.steps import Trace
from covprop.trace import trace

SUFFIX = ".html"
SAMPLES = 2000
"""Through every layer, to see where its output is not Gaussian."""


def write(
    path: Path,
    question: Question,
    y: Gaussian | None,
    seed: int,
    *,
    comparison: Comparison | None = None,
    robustness: Robustness | None = None,
) -> None:
    """A page, there as a whole or not at all."""
    layers = None if y is None else layers_of(question, y.method, seed)
    try:
        page.write(
            path, model_name=question.name, x=question.x, y=y, trace=layers,
            comparison=comparison, robustness=robustness,
        )  # fmt: skip
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {error.strerror or error}") from error


def layers_of(question: Question, method: object, seed: int) -> Trace | None:
    """The Gaussian after every operation, if the method goes from one to the next."""
    if not isinstance(method, LayerwiseMethod):
        return None
    generator = torch.Generator(question.x.device).manual_seed(seed)
    with running():
        return trace(
            question.module, question.x, method=method, samples=SAMPLES, generator=generator
        )

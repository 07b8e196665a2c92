"""`covprop robustness`: how a classifier decides under noise, and whether that is good enough."""

import re
import sys
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.cli import arrays
from covprop.cli.answers import Answer
from covprop.cli.question import Question, one, running
from covprop.cli.refusals import ExitCode, Refusal, quoted
from covprop.cli.shares import one_analysis, shared
from covprop.methods import Method, MonteCarlo
from covprop.propagate import propagate
from covprop.ranks import Ranks
from covprop.report.table import Table
from covprop.robustness import Robustness, analyse
from covprop.robustness.analysis import SAMPLES

__all__ = ["SAMPLES", "Settings", "answer", "run"]


@final
@dataclass(frozen=True)
class Settings:
    """What is asked of a classifier."""

    label: str | None
    probability: float
    samples: int
    radius: float | None
    norm: str
    seed: int


NORMS = {"2": 2.0, "inf": torch.inf}


def run(question: Question, method: Method, settings: Settings, ranks: Ranks) -> Robustness:
    """The analysis, with a bar on a terminal; all its randomness comes from the seed."""
    if settings.norm not in NORMS:
        raise Refusal(f"--norm is 2 or inf, and not {quoted(settings.norm)}")
    check_logits(question)
    generator = torch.Generator(question.x.device).manual_seed(settings.seed + ranks.rank)
    torch.manual_seed(settings.seed + ranks.rank)  # for models that draw random numbers themselves
    label = None if settings.label is None else labels(settings.label)

    def work(question: Question, part: slice) -> Robustness:
        own = label[part] if label is not None and label.dim() else label
        with running():
            return analyse(
                question.module, question.x, own, method=method, probability=settings.probability,
                samples=settings.samples, radius=settings.radius, norm=NORMS[settings.norm],
                generator=generator, progress=ranks.rank == 0 and sys.stderr.isatty(),
            )  # fmt: skip

    return shared(question, ranks, work, one_analysis)


def check_logits(question: Question) -> None:
    """Refuse what is no row of logits; a batch that was not named is what it mostly is."""
    with running():
        shape = one(propagate(question.module, question.x, method=MonteCarlo(2))).event_shape
    if shape and shape.numel() != shape[-1]:
        dims = len(question.x.batch_shape) + 1
        raise Refusal(
            f"the model returns {tuple(shape)} for this mean, and logits have the shape (classes,);"
            f" if the mean is a batch of inputs, say --batch-dims {dims}"
        )


def labels(text: str) -> Tensor:
    """One class number, several with commas between them, or those of a file."""
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text):
        numbers = torch.tensor([int(word) for word in text.split(",")])
        return numbers if "," in text else numbers[0]
    if arrays.array_name(text).path.suffix.lower() not in arrays.READERS:
        raise Refusal(
            f"--label {text}: a label is a class number from 0, several with commas between them, "
            f"or a file of them ({', '.join(arrays.READERS)})"
        )
    values = arrays.load(text)
    numbers = values.long()
    if not torch.equal(numbers.to(values.dtype), values):
        raise Refusal(f"{text} holds numbers that are no class numbers")
    return numbers.flatten() if values.dim() == arrays.MATRIX and 1 in values.shape else numbers


def answer(question: Question, found: Robustness, required: float | None, as_json: bool) -> Answer:
    """The table; no is the answer if a label is kept with less than the required probability.

    Where samples disagree with propagation, they are right, and they decide.
    """
    wrong = torch.where(
        found.agrees,
        found.misclassification.probability,
        found.sampled_misclassification.probability,
    )
    kept = float(1 - wrong.max())
    told = {"model": question.name, **found.record(), "required_probability": required}
    told["lowest_probability"] = kept
    parts: list[str | Table] = [found.table]
    code = ExitCode.FINE
    if required is not None:
        enough = kept >= required
        code = ExitCode.FINE if enough else ExitCode.NO
        told["enough"] = enough
        word = "at least" if enough else "less than"
        parts.append(
            f"the label is kept with probability {kept:.4g}, {word} the required {required:g}"
        )
    return Answer(told, tuple(parts), as_json, code)

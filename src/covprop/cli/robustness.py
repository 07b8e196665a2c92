"""`covprop robustness`: how a classifier decides under noise, and whether that is good enough."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covprop.cli import arrays
from covprop.cli.output import ExitCode, Refusal, Result, quoted
from covprop.cli.propagation import distribute
from covprop.cli.request import Request, running, single_output
from covprop.methods import MonteCarlo
from covprop.propagate import propagate
from covprop.ranks import Ranks
from covprop.robustness import NoiseBudget, Robustness, analyse
from covprop.text_table import Table

NORMS = {"2": 2.0, "inf": torch.inf}


def run(
    request: Request, ranks: Ranks, seed: int, label: str | None, norm: str, **options: Any
) -> Robustness:
    """The analysis with these options of `analyse`; all its randomness comes from the seed."""
    if norm not in NORMS:
        raise Refusal(f"--norm is 2 or inf, and not {quoted(norm)}")
    _check_logits(request)
    generator = torch.Generator(request.x.device).manual_seed(seed + ranks.rank)
    torch.manual_seed(seed + ranks.rank)  # for models that draw random numbers themselves
    labels = None if label is None else _labels(label)

    def work(request: Request, part: slice) -> Robustness:
        own = labels[part] if labels is not None and labels.dim() else labels
        bar = sys.stderr.isatty() and not ranks.rank
        with running():
            return analyse(
                request.module, request.x, own, norm=NORMS[norm], generator=generator,
                progress=bar, **options,
            )  # fmt: skip

    return distribute(request, ranks, work, _joined)


def _check_logits(request: Request) -> None:
    """Refuse output that is no row of logits; most often a batch was not declared as one."""
    with running():
        y = single_output(propagate(request.module, request.x, method=MonteCarlo(2)))
    shape = y.event_shape
    if shape and shape.numel() != shape[-1]:
        dims = len(request.x.batch_shape) + 1
        raise Refusal(
            f"the model returns {tuple(shape)} for this mean, and logits have the shape (classes,);"
            f" if the mean is a batch of inputs, say --batch-dims {dims}"
        )


def _labels(text: str) -> Tensor:
    """One class number, several with commas between them, or those of a file."""
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text):
        numbers = torch.tensor([int(word) for word in text.split(",")])
        return numbers if "," in text else numbers[0]
    if arrays.split_name(text)[0].suffix.lower() not in arrays.READERS:
        raise Refusal(
            f"--label {text}: a label is a class number from 0, several with commas between them, "
            f"or a file of them ({', '.join(arrays.READERS)})"
        )
    values = arrays.load(text)
    numbers = values.long()
    if not torch.equal(numbers.to(values.dtype), values):
        raise Refusal(f"{text} holds numbers that are no class numbers")
    return numbers.flatten() if values.dim() == arrays.MATRIX and 1 in values.shape else numbers


def result(request: Request, analysis: Robustness, required: float | None, as_json: bool) -> Result:
    """The table; the answer is no if a label is kept with less than the required probability.

    Where samples disagree with propagation, samples decide.
    """
    wrong = torch.where(
        analysis.agrees,
        analysis.misclassification.probability,
        analysis.sampled_misclassification.probability,
    )
    kept = float(1 - wrong.max())
    record = {"model": request.name, **analysis.record(), "required_probability": required}
    record["lowest_probability"] = kept
    parts: list[str | Table] = [analysis.table]
    code = ExitCode.OK
    if required is not None:
        enough = kept >= required
        code = ExitCode.OK if enough else ExitCode.NO
        record["enough"] = enough
        word = "at least" if enough else "less than"
        parts.append(
            f"the label is kept with probability {kept:.4g}, {word} the required {required:g}"
        )
    return Result(record, tuple(parts), as_json, code)


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate analyses of batches, field by field."""
    first = parts[0]
    if isinstance(first, NoiseBudget):
        return _joined_budgets(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        values = {name: _joined([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(first, **values)
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(parts))
    return first  # the same for all: a name, a number of samples, a norm


def _joined_budgets(parts: Sequence[NoiseBudget]) -> NoiseBudget:
    """Levels that were tried for one part are missing, as NaN, from the others."""
    longest = max(len(part.levels) for part in parts)

    def padded(name: str) -> Tensor:
        tables = [getattr(part, name) for part in parts]
        rows = [(longest - len(table), *table.shape[1:]) for table in tables]
        pairs = zip(tables, rows, strict=True)
        return torch.cat([torch.cat([t, t.new_full(shape, torch.nan)]) for t, shape in pairs], 1)

    return dataclasses.replace(
        parts[0],
        level=torch.cat([part.level for part in parts]),
        stddev=torch.cat([part.stddev for part in parts]),
        reason=tuple(reason for part in parts for reason in part.reason),
        probability=torch.cat([part.probability for part in parts]),
        levels=padded("levels"),
        probabilities=padded("probabilities"),
    )

"""The same by sampling: the network itself on draws of its input."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from covprop.errors import ApproximationWarning, UnsupportedOperation, warn_user
from covprop.gate import check_module
from covprop.gaussian import Gaussian
from covprop.methods import Network
from covprop.methods.roots import Root
from covprop.robustness.probabilities import Probabilities

Model = nn.Module | Callable[..., Any]

DRAWN = 2**20
"""Numbers that are drawn at a time."""
PROBED = 4
"""Points beside the mean that tell probabilities from logits."""


class Classifier:
    """A network as a function from inputs (*batch, *event) to logits (*batch, classes)."""

    def __init__(self, model: Model, x: Gaussian) -> None:
        """Look at it; a batch norm that would learn is refused, as `cp.propagate` does."""
        if isinstance(model, nn.Module):
            check_module(model, x)
        self.network = Network(model, [x])
        if len(self.network.outputs) != 1:
            raise UnsupportedOperation(
                f"a classifier returns one tensor of logits, and this model "
                f"{len(self.network.outputs)} that depend on the input; wrap it in a function that "
                "picks one"
            )

    @property
    def classes(self) -> int:
        """How many; a single logit decides between two."""
        return max(2, self.network.outputs[0].event_shape.numel())

    def refuse_randomness(self) -> None:
        """Raise if the decision is drawn."""
        if self.network.draws:
            raise UnsupportedOperation(
                "the model draws random numbers, as dropout does, and has no decision of its own; "
                "call model.eval(), or give a label"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (*batch, classes); a single one stands against 0."""
        return _with_zero(self.network(x)[0])

    def decision(self) -> Tensor:
        """The class without noise, (*batch,)."""
        self.refuse_randomness()
        with torch.no_grad():
            return self(self.network.means[0]).argmax(-1)

    def at(self, points: Tensor) -> Tensor:
        """Logits (count, *batch, classes) at points (count, *batch, *event)."""
        return _with_zero(self.network.at([points])[0])

    def warn_of_probabilities(self, x: Gaussian) -> None:
        """Warn if outputs are probabilities at the mean and at points around it, so no logits."""
        if self.network.outputs[0].event_shape.numel() == 1:
            return  # log-odds between 0 and 1 look just the same
        own = torch.Generator(x.device).manual_seed(0)  # so that nobody's numbers change
        width = torch.where(x.stddev > 0, x.stddev, 1)
        points = [x.mean]
        for _ in range(PROBED):
            noise = torch.randn(x.mean.shape, dtype=x.dtype, device=x.device, generator=own)
            points.append(x.mean + width * noise)
        rounding = math.sqrt(torch.finfo(x.dtype).eps)
        with torch.no_grad():
            outputs = torch.stack([self(point) for point in points])
        if bool((outputs >= 0).all() & ((outputs.sum(-1) - 1).abs() < rounding).all()):
            warn_user(
                "the outputs of the model are probabilities, as behind a softmax, and logits are "
                "wanted: noise makes them less Gaussian, and the expected softmax is that of a "
                "softmax; leave the last softmax out",
                ApproximationWarning,
            )


def _with_zero(logits: Tensor) -> Tensor:
    return torch.nn.functional.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits


@torch.no_grad()
def sampled_probabilities(
    model: Model, x: Gaussian, samples: int = 10_000, generator: torch.Generator | None = None
) -> Probabilities:
    """How often each class had the largest logit in samples of the input, (*batch, classes).

    Classes that tie share alike. The standard error is that of a share k / n with one more of
    either kind, sqrt(q (1 - q) / n), q = (k + 1) / (n + 2): never zero, as no sample is certain.
    """
    check_samples(samples)
    return wins(Classifier(model, x), x, samples, generator)


def check_samples(samples: int) -> None:
    """Refuse what is no number of samples."""
    if type(samples) is not int or samples < 1:
        raise ValueError(f"samples is a whole number from 1, not {samples!r}")


def check_inputs(x: Gaussian) -> None:
    """Refuse a batch without inputs."""
    if not x.batch_shape.numel():
        raise ValueError(
            f"there are no inputs: the batch has shape {tuple(x.batch_shape)}; give at least one"
        )


def refuse_inference_mode(function: str) -> None:
    """Raise where torch gives no gradients, whoever asks for them."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedOperation(
            f"robustness.{function} needs gradients, and torch.inference_mode() gives none; use "
            "torch.no_grad() instead"
        )


@torch.no_grad()
def wins(
    classifier: Classifier, x: Gaussian, samples: int, generator: torch.Generator | None
) -> Probabilities:
    """The same for a classifier that has been looked at; x may be another than it has seen."""
    root = Root.of(x)
    drawn = max(1, DRAWN // max(1, x.batch_shape.numel() * root.width))
    count: Tensor | None = None
    left = samples
    while left:
        some = min(left, drawn, classifier.network.step)
        numbers = torch.randn(
            (some, *x.batch_shape, root.width), dtype=x.dtype, device=x.device, generator=generator
        )
        logits = classifier.at(x.mean + root.times(numbers))
        best = (logits == logits.amax(-1, keepdim=True)).double()
        shares = (best / best.sum(-1, keepdim=True)).sum(0)
        count = shares if count is None else count + shares
        left -= some
    assert count is not None
    guess = (count + 1) / (samples + 2)
    stderr = (guess * (1 - guess) / samples).sqrt()
    return Probabilities((count / samples).to(x.dtype), stderr.to(x.dtype))


def label_share(found: Probabilities, label: Tensor) -> Probabilities:
    """Of the label alone, (*batch,)."""
    index = label[..., None]
    return Probabilities(
        found.probability.gather(-1, index)[..., 0], found.stderr.gather(-1, index)[..., 0]
    )

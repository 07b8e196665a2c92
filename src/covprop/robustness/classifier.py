"""A network as a classifier of plain inputs: its decisions, samples of them, and near inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from covprop.diagnostics.verdict import allowed_errors
from covprop.errors import ApproximationWarning, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.methods import Network, Root
from covprop.propagate import check_gaussian, check_module
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import check_count, class_numbers

Model = nn.Module | Callable[..., Any]

CHUNK = 2**20
"""Random numbers that are drawn at a time."""
PROBES = 4
"""Points besides the mean that tell probabilities from logits."""
_TINY = torch.finfo(torch.float32).tiny


class Classifier:
    """A network as a function from inputs (*batch, *event) to logits (*batch, classes)."""

    def __init__(self, model: Model, x: Gaussian) -> None:
        """Inspect the model; a batch norm in training mode is refused, as by `cp.propagate`."""
        check_gaussian(x)
        if isinstance(model, nn.Module):
            check_module(model.named_modules(), x)
        self.network = Network(model, [x])
        if len(self.network.outputs) != 1:
            raise UnsupportedOperation(
                f"a classifier returns one tensor of logits, and this model "
                f"{len(self.network.outputs)} that depend on the input; wrap it in a function that "
                "picks one"
            )
        self.logits = self.network.outputs[0].event_shape.numel()
        self.classes = max(2, self.logits)  # a single logit decides between two

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (*batch, classes); a single one is compared with 0."""
        return self._compared(self.network(x)[0])

    def _compared(self, logits: Tensor) -> Tensor:
        return functional.pad(logits, (1, 0)) if self.logits == 1 else logits

    def refuse_randomness(self) -> None:
        """Raise if the model's output is random."""
        if self.network.draws:
            raise UnsupportedOperation(
                "the model draws random numbers, as dropout does, and has no decision of its own; "
                "call model.eval(), or give a label"
            )

    def decision(self) -> Tensor:
        """The class without noise, (*batch,)."""
        self.refuse_randomness()
        with torch.no_grad():
            return self(self.network.means[0]).argmax(-1)

    def labels(self, label: int | Tensor | None) -> Tensor:
        """Validated labels (*batch,), by default the decision without noise."""
        if label is None:
            return self.decision()
        device = self.network.means[0].device
        return class_numbers(label, self.network.batch_shape, self.classes, device)

    def warn_of_probabilities(self, x: Gaussian) -> None:
        """Warn if the outputs are probabilities at the mean and around it, and so not logits."""
        if self.logits == 1:
            return  # log-odds between 0 and 1 look just the same
        own = torch.Generator(x.device).manual_seed(0)  # so that nobody's numbers change
        width = torch.where(x.stddev > 0, x.stddev, 1)
        shape = (PROBES, *x.mean.shape)
        noise = torch.randn(shape, dtype=x.dtype, device=x.device, generator=own)
        rounding = math.sqrt(torch.finfo(x.dtype).eps)
        with torch.no_grad():
            outputs = torch.stack([self(point) for point in (x.mean, *(x.mean + width * noise))])
        if bool((outputs >= 0).all() & ((outputs.sum(-1) - 1).abs() < rounding).all()):
            warn_user(
                "the outputs of the model are probabilities, as behind a softmax, and logits are "
                "wanted: noise makes them less Gaussian, and the expected softmax is that of a "
                "softmax; leave the last softmax out",
                ApproximationWarning,
            )

    @torch.no_grad()
    def sampled(
        self, x: Gaussian, samples: int, generator: torch.Generator | None
    ) -> Probabilities:
        """Shares of the classes in samples of x, which may be wider than the x of construction."""
        root = Root.of(x)
        step = max(1, CHUNK // max(1, x.batch_shape.numel() * root.width))
        step = min(step, self.network.step)
        count = torch.zeros((), dtype=torch.float64, device=x.device)
        for start in range(0, samples, step):
            numbers = root.standardised(min(step, samples - start), generator)
            logits = self._compared(self.network.at([x.mean + root.times(numbers)])[0])
            best = (logits == logits.amax(-1, keepdim=True)).double()
            count = count + (best / best.sum(-1, keepdim=True)).sum(0)
        guess = (count + 1) / (samples + 2)
        stderr = (guess * (1 - guess) / samples).sqrt()
        return Probabilities((count / samples).to(x.dtype), stderr.to(x.dtype))


@torch.no_grad()
def sampled_probabilities(
    model: Model, x: Gaussian, samples: int = 10_000, generator: torch.Generator | None = None
) -> Probabilities:
    """Estimate by Monte Carlo how often each class has the largest logit, (*batch, classes).

    Classes that tie share equally. The standard error of a share k / n is sqrt(q (1 - q) / n) with
    q = (k + 1) / (n + 2), as if one more sample of either kind had been seen. So it is never zero.

    Args:
        model: Returns logits; a single one is the log-odds of class 1.
        x: The Gaussian input.
        samples: Number of samples of each input.
        generator: Draws them; torch's global one by default.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(4), stddev=0.1)
        print(cp.robustness.sampled_probabilities(nn.Linear(4, 3), x, 1000).probability)
    """
    check_count("samples", samples)
    return Classifier(model, x).sampled(x, samples, generator)


def label_share(shares: Probabilities, label: Tensor) -> Probabilities:
    """The probability of the label, (*batch,), of those of all classes."""
    index = label[..., None]
    parts = (shares.probability, shares.stderr)
    return Probabilities(*(part.gather(-1, index)[..., 0] for part in parts))


def agrees_with_samples(ours: Probabilities, sampled: Probabilities, samples: int) -> Tensor:
    """Which probabilities differ from sampled shares by no more than chance explains.

    By the standard of `cp.compare`: chance makes any one of all of them look wrong with a
    probability of about 0.01. The standard error of a share is the larger of that of the samples
    and of what ours predicts, sqrt(p (1 - p) / n), since a class that was not seen says little; and
    at least 1 / n.
    """
    p, share = ours.probability.double(), sampled.probability.double()
    expected = (p * (1 - p)).clamp(min=0) / samples
    variance = torch.maximum(sampled.stderr.double().square(), expected)
    variance = variance.clamp(min=1 / samples**2) + ours.stderr.double().square()
    return (p - share).abs() <= allowed_errors(p.numel()) * variance.sqrt()


def widened(ours: Probabilities, sampled: Probabilities) -> Probabilities:
    """With errors of the assumption that are at least what samples show beyond chance."""
    if ours.assumption is None:
        return ours
    shown = (ours.probability - sampled.probability).abs() - 2 * sampled.stderr - ours.stderr
    return replace(ours, assumption=torch.maximum(ours.assumption, shown.to(ours.assumption)))


def check_inputs(x: Gaussian) -> None:
    """Raise if it is no Gaussian, or the batch is empty."""
    check_gaussian(x)
    if not x.batch_shape.numel():
        raise ValueError(
            f"there are no inputs: the batch has shape {tuple(x.batch_shape)}; give at least one"
        )


def refuse_inference_mode(function: str) -> None:
    """Raise where torch records no gradients even if asked for them."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedOperation(
            f"robustness.{function} needs gradients, and torch.inference_mode() gives none; use "
            "torch.no_grad() instead"
        )


@final
@dataclass(frozen=True)
class Ball:
    """{mean + shift : |shift| <= radius in the norm, low <= mean + shift <= high}.

    Args:
        radius: One number, or one for each of a batch.
        norm: 2 (Euclidean) or math.inf (the largest element).
        bounds: (low, high) of every element, within which the centre has to be.

    Example:
        ball = cp.robustness.Ball(0.1, norm=math.inf, bounds=(0.0, 1.0))
    """

    radius: float | Tensor
    norm: float = 2.0
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.norm not in (2.0, math.inf):
            raise ValueError(f"the norm of a ball is 2 or math.inf, not {self.norm!r}")
        radius = torch.as_tensor(self.radius)
        if not bool(((radius >= 0) & torch.isfinite(radius)).all()):
            raise ValueError("the radius of a ball is finite and not negative")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds are (low, high) with low < high, not {self.bounds!r}")

    def check(self, centre: Tensor) -> None:
        """Raise if the centre is out of bounds."""
        if self.bounds is None:
            return
        low, high = self.bounds
        if not bool(((centre >= low) & (centre <= high)).all()):
            raise ValueError(
                f"the input goes from {float(centre.min()):g} to {float(centre.max()):g}, beyond "
                f"the bounds {self.bounds}"
            )

    def direction(self, gradient: Tensor, batch_dims: int) -> Tensor:
        """The steepest step of length 1 in the norm; 0 where the gradient is 0."""
        if self.norm == math.inf:
            return torch.sign(gradient)
        length = _length(gradient, batch_dims)
        return gradient / torch.where(length > 0, length, 1)

    def project(self, point: Tensor, centre: Tensor, batch_dims: int) -> Tensor:
        """The nearest point of the ball, clamped to the bounds, which keeps it in the ball."""
        shift, radius = point - centre, self.at(centre, batch_dims)
        if self.norm == math.inf:
            shift = torch.maximum(torch.minimum(shift, radius), -radius)
        else:
            length = _length(shift, batch_dims)
            shift = shift * torch.where(length > radius, radius / length.clamp(min=_TINY), 1)
        moved = centre + shift
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def random(self, centre: Tensor, batch_dims: int, generator: torch.Generator | None) -> Tensor:
        """A point of the ball: a uniform direction and share of the radius, or a uniform point."""
        radius = self.at(centre, batch_dims)
        options: Any = {"dtype": centre.dtype, "device": centre.device, "generator": generator}
        if self.norm == math.inf:
            shift = radius * (2 * torch.rand(centre.shape, **options) - 1)
        else:
            normal = torch.randn(centre.shape, **options)
            share = torch.rand(radius.shape, **options)
            shift = self.direction(normal, batch_dims) * radius * share
        return self.project(centre + shift, centre, batch_dims)

    def at(self, centre: Tensor, batch_dims: int) -> Tensor:
        """The radius in a shape that broadcasts with inputs (*batch, *event)."""
        radius = torch.as_tensor(self.radius, dtype=centre.dtype, device=centre.device)
        batch, event = centre.shape[:batch_dims], (1,) * (centre.dim() - batch_dims)
        if radius.dim() and radius.shape != batch:
            raise ValueError(
                f"the radius has shape {tuple(radius.shape)} and the batch {tuple(batch)}; give "
                "one number, or one for each"
            )
        return radius.expand(batch).reshape(*batch, *event)


def _length(vector: Tensor, batch_dims: int) -> Tensor:
    """Euclidean norm of each of the batch, in a shape that broadcasts with it."""
    batch = vector.shape[:batch_dims]
    norm = vector.reshape(*batch, -1).norm(dim=-1)
    return norm.reshape(*batch, *(1,) * (vector.dim() - batch_dims))

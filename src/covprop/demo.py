"""`python -m covprop.demo`: a classifier of handwritten digits behind a noisy sensor.

Trains a small network on the digits that ship with scikit-learn, carries sensor noise through it
analytically, and asks what an engineer would: is the answer right, how often will the network be
wrong, which pixels matter, how much noise can it take? Ends with a report to look at.
"""

import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import covprop as cp
from covprop import robustness
from covprop.report import page

SEED = 0
NOISE = 0.1
"""Standard deviation of the sensor, where pixels go from 0 to 1."""
CORRELATION_LENGTH = 1.5
"""Pixels over which the sensor blurs its noise."""
IMAGES = 40
SAMPLES = 20_000
EPOCHS = 60
BATCH = 64
SHOWN = 5
TRACED = 2_000
"""Samples through every layer."""
SHADES = " .:-=+*#%@"
REPORT = Path("covprop-demo.html")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (rows, 1, 8, 8) and labels: train, then test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order[: -len(order) // 4], order[-len(order) // 4 :]
    return images[train], labels[train], images[test], labels[test]


def network() -> nn.Module:
    """A convolutional network with batch norm, as users have them."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.GELU(),
        nn.Linear(32, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Plain training by cross-entropy."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()


def sensor_covariance(side: int = 8) -> Tensor:
    """Noise whose correlation falls with the distance of two pixels."""
    axis = torch.arange(side, dtype=torch.float64)
    places = torch.cartesian_prod(axis, axis)
    distance = torch.cdist(places, places)
    return (NOISE**2 * torch.exp(-((distance / CORRELATION_LENGTH) ** 2) / 2)).float()


def main(report: Path = REPORT) -> dict[str, Any]:
    """Train, propagate, compare, decide, report; prints as it goes, and returns the numbers."""
    torch.manual_seed(SEED)
    train_images, train_labels, test_images, test_labels = digits()
    model = network()
    started = time.perf_counter()
    train(model, train_images, train_labels)
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
    print(f"trained on {len(train_images)} digits in {time.perf_counter() - started:.0f} s;")
    print(f"accuracy on {len(test_images)} others without noise: {accuracy:.1%}\n")

    x = cp.Gaussian(test_images[:IMAGES], sensor_covariance().expand(IMAGES, -1, -1))
    labels = test_labels[:IMAGES]
    started = time.perf_counter()
    with torch.no_grad():
        y = cp.propagate(model, x)
    seconds = time.perf_counter() - started
    print(f"y = cp.propagate(model, x): {IMAGES} images in {seconds:.1f} s, each with the mean and")
    print(f"full covariance of its 10 logits for sensor noise of standard deviation {NOISE}.\n")

    wrong = robustness.misclassification_probability(y, labels).probability
    riskiest = wrong.argsort(descending=True)[: min(SHOWN, IMAGES)]
    decisions = decide(model, x, labels, riskiest)
    least = int(riskiest[0])
    explain(model, x[least], least, int(labels[least]), report)
    return {
        "accuracy": float(accuracy), "noise": NOISE, "images": IMAGES, "samples": SAMPLES,
        "seconds": seconds, "decisions": decisions, "report": str(report),
    }  # fmt: skip


def decide(
    model: nn.Module, x: cp.Gaussian, labels: Tensor, chosen: Tensor
) -> list[dict[str, Any]]:
    """How often the network will be wrong about the least certain images, and their budgets."""
    analysis = robustness.analyse(
        model, x[chosen], labels[chosen], samples=SAMPLES, generator=_generator()
    )
    print(f"the {len(chosen)} least certain of them, against {SAMPLES:,} samples of each:")
    print("                     P(not the label)    99 % noise budget,   attack of the")
    print("image  label  says   analytic  sampled   times this noise     same length")
    decisions = []
    analytic, sampled = analysis.misclassification, analysis.sampled_misclassification
    for place, image in enumerate(chosen.tolist()):
        decision, robust = int(analysis.predicted[place]), bool(analysis.adversary.robust[place])
        level = float(analysis.budget.level[place])
        print(
            f"{image:5d}  {labels[image]:5d}  {decision:4d}   {analytic.probability[place]:8.3f}  "
            f"{sampled.probability[place]:7.3f}   {level:16.2f}     "
            f"{'finds none' if robust else 'fools it'}"
        )
        decisions.append({
            "image": image, "label": int(labels[image]), "decision": decision,
            "misclassification": float(analytic.probability[place]),
            "sampled": float(sampled.probability[place]), "noise_budget": level,
            "holds_against_attack": robust,
        })  # fmt: skip
    return decisions


def explain(model: nn.Module, x: cp.Gaussian, image: int, label: int, report: Path) -> None:
    """One image in detail: can the numbers be trusted, which pixels matter; the report."""
    x = cp.Gaussian(x.mean[None], x.covariance_matrix[None])  # a batch of one, for convolutions
    print(f"\nimage {image}, against sampling:")
    methods = (cp.GaussianLayers(), cp.Split(), cp.Linearized())
    comparison = cp.compare(model, x, methods=methods, samples=SAMPLES, generator=_generator())
    analysis = robustness.analyse(model, x, label, samples=SAMPLES, generator=_generator())
    print(f"\nimage {image}, and where more noise would do most harm:")
    for row, heat in zip(x.mean[0, 0], analysis.sensitivity[0, 0].abs(), strict=True):
        print(f"    {_shaded(row)}    {_shaded(heat / analysis.sensitivity.abs().max())}")
    layers = cp.trace(model, x, samples=TRACED, generator=_generator())
    page.write(
        report, model_name=f"digits classifier, test image {image}", x=x, trace=layers,
        comparison=comparison, robustness=analysis,
    )  # fmt: skip
    print(f"\nall of it, to look at: {report}")


def _shaded(row: Tensor) -> str:
    return "".join(2 * SHADES[min(int(value * len(SHADES)), len(SHADES) - 1)] for value in row)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


if __name__ == "__main__":
    main()

"""`python -m covprop.demo`: a classifier of handwritten digits behind a noisy sensor.

Trains a small network on the digits that ship with scikit-learn, carries sensor noise through it
analytically, and checks the answer against sampling.
"""

import math
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import covprop as cp
from covprop.kernels.normal import cumulative

SEED = 0
NOISE = 0.1
"""Standard deviation of the sensor, where pixels go from 0 to 1."""
CORRELATION_LENGTH = 1.5
"""The sensor blurs its noise over this many pixels."""
IMAGES = 40
SAMPLES = 20_000
EPOCHS = 60
BATCH = 64
SHOWN = 5


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


def main() -> dict[str, Any]:
    """Train, propagate, compare; prints as it goes, and returns the numbers."""
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
    started = time.perf_counter()
    with torch.no_grad():
        y = cp.propagate(model, x)
    seconds = time.perf_counter() - started
    print(f"y = cp.propagate(model, x): {IMAGES} images in {seconds:.1f} s, each with the mean and")
    print(f"full covariance of its 10 logits for sensor noise of standard deviation {NOISE}.\n")
    decisions = report(model, x, y, test_labels)
    return {
        "accuracy": float(accuracy), "noise": NOISE, "images": IMAGES, "samples": SAMPLES,
        "seconds": seconds, "decisions": decisions,
    }  # fmt: skip


@torch.no_grad()
def report(
    model: nn.Module, x: cp.Gaussian, y: cp.Gaussian, labels: Tensor
) -> list[dict[str, Any]]:
    """The least certain decisions, and how far sampling agrees."""
    best = y.mean.argmax(1)
    margin, spread = margins(y, best)
    flip = cumulative(-margin / spread)  # of the runner-up beating the winner
    riskiest = flip.argsort(descending=True)[:SHOWN]
    generator = torch.Generator().manual_seed(SEED)
    print(f"the {SHOWN} least certain decisions, analytic against {SAMPLES} samples:")
    print("                         P(runner-up wins)    std of the 10 logits,")
    print("image  label  decision   analytic  sampled    analytic / sampled")
    told = []
    for i in riskiest.tolist():
        samples = model(x[i].sample(SAMPLES, generator))
        rivals = y.mean[i].clone()
        rivals[best[i]] = -math.inf
        wins = (samples[:, rivals.argmax()] > samples[:, best[i]]).float().mean()
        ratio = y.stddev[i] / samples.std(0)
        print(
            f"{i:5d}  {labels[i]:5d}  {best[i]:8d}   {flip[i]:8.3f}  {wins:7.3f}    "
            f"{ratio.min():.3f} ... {ratio.max():.3f}"
        )
        told.append(
            {"image": i, "label": int(labels[i]), "decision": int(best[i]),
             "flip_probability": float(flip[i]), "flip_frequency": float(wins),
             "stddev_ratio": [float(ratio.min()), float(ratio.max())]}
        )  # fmt: skip
    print("\nWhat differs is sampling error and the Gaussian assumption between layers.")
    return told


def margins(y: cp.Gaussian, best: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the winner's logit less the runner-up's."""
    rows = torch.arange(len(best))
    means = y.mean.clone()
    means[rows, best] = -math.inf
    rival = means.argmax(1)
    covariance = y.covariance_matrix
    variance = (
        covariance[rows, best, best]
        + covariance[rows, rival, rival]
        - 2 * covariance[rows, best, rival]
    )
    return y.mean[rows, best] - y.mean[rows, rival], variance.sqrt()


if __name__ == "__main__":
    main()

"""The networks of the `field` experiment by class, their Gaussian inputs and true moments."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeAlias, final

import torch
from torch import nn

import covprop as cp
from experiments import corpus, random_networks
from experiments.corpus import Built, Case
from experiments.corpus_networks import Fit, Tabular, table
from experiments.corpus_truth import Truth
from experiments.options import Options
from experiments.randomness import seeded

NOISES = (0.1, 0.3, 1.0)
"""Of the spread of inputs."""
SMOKE_POINTS = 2**13
SMOKE = ("random MLP", "strided CNN")
"""Networks that are not trained first."""
WIDTH, DEPTH = 32, 4
"""Of the random network."""

Make: TypeAlias = Callable[[float, str], Built]


@final
class Network(NamedTuple):
    """What is measured, and the family of the corpus that its truth takes the points of."""

    make: Make
    family: str


def _fitted(target: str, width: int, depth: int) -> Network:
    return Network(partial(_with_noise, corpus.fitted, Fit(target, width, depth)), corpus.TRAINED)


def _tabular(name: str, *more: object) -> Network:
    network = Tabular(name, *more)  # type: ignore[arg-type]
    return Network(partial(_with_noise, corpus.tabulated, network), corpus.TABULAR)


def _architecture(kind: str) -> Network:
    return Network(partial(_with_noise, corpus.architecture, kind), corpus.ARCHITECTURE)


def _with_noise(make: Callable[..., Built], network: object, noise: float, name: str) -> Built:
    return make(network, noise, name)


def random_relus(noise: float, name: str) -> Built:
    """He's weights, no biases, no ReLU after the last layer; standard normal points."""
    with seeded("field", WIDTH, DEPTH):
        model = random_networks.wide(WIDTH, DEPTH).double()[:-1]
    with seeded("field", name):
        mean = torch.randn(WIDTH, dtype=torch.float64)
    return model, cp.Gaussian.isotropic(mean, stddev=noise)


def strided(noise: float, name: str) -> Built:
    """A chain of convolutions without pooling, Kaiming's weights, an image of a digit."""
    with seeded("field", "strided"):
        layers = (
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        for layer in layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    model = nn.Sequential(*layers).double().eval().requires_grad_(requires_grad=False)
    rows, _ = table("digits")
    with seeded("field", name):
        image = rows[int(torch.randint(len(rows), ()))].reshape(1, 1, 8, 8)
    return model, cp.Gaussian.isotropic(image, stddev=noise * float(rows.std()), batch_dims=1)


CLASSES: dict[str, dict[str, Network]] = {
    "small MLP": {
        "random MLP": Network(random_relus, corpus.TABULAR),
        "diabetes": _tabular("diabetes"),
        "diabetes, tanh": _tabular("diabetes", (32, 32), "Tanh"),
    },
    "trained classifier": {
        "digits": _tabular("digits"),
        "digits, SiLU": _tabular("digits", (100, 100, 100), "SiLU"),
        "breast cancer": _tabular("breast_cancer"),
    },
    "CNN": {
        "strided CNN": Network(strided, corpus.TABULAR),
        "digits CNN": Network(corpus.convolved, corpus.TABULAR),
        "VGG": _architecture("VGG"),
    },
    "ResNet": {
        "ResNet, basic": _architecture("ResNet, basic"),
        "ResNet, bottleneck": _architecture("ResNet, bottleneck"),
    },
    "transformer": {"ViT": _architecture("ViT")},
    "recurrent": {"LSTM": _architecture("LSTM")},
    "few inputs": {
        "pendulum": _fitted("pendulum", 25, 4),
        "cruise": _fitted("cruise", 20, 5),
        "collision": _fitted("collision", 50, 6),
        "ishigami": _fitted("ishigami", 40, 5),
    },
}
NETWORKS = {name: network for group in CLASSES.values() for name, network in group.items()}
CLASS_OF = {name: label for label, group in CLASSES.items() for name in group}


@cache
def case(name: str, noise: float, index: int) -> Case:
    """One network at one point; all noises have the same point."""
    network = NETWORKS[name]
    make = partial(network.make, noise, f"field/{name}/{index}")
    return Case(f"field/{name}/{noise}/{index}", network.family, noise, make)


@lru_cache(maxsize=1)
def prepared(name: str, noise: float, index: int, smoke: bool) -> tuple[Built, Truth]:
    """Network, input and true moments; the methods of one case come one after another."""
    one = case(name, noise, index)
    return one.build(), one.truth(SMOKE_POINTS if smoke else None)


def keys(options: Options, inputs: int) -> list[tuple[str, float, int]]:
    """Networks, noises and points, in the order in which they are measured."""
    names, noises = (SMOKE, NOISES[1:2]) if options.smoke else (NETWORKS, NOISES)
    return [(name, noise, index) for index in range(inputs) for name in names for noise in noises]

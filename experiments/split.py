"""`split`: narrower Gaussians in place of one, on trained digit classifiers under strong noise.

Errors of the standard deviations (and means) of the logits, by how many components and directions
`cp.Split` has, over exact propagation on a fully connected network and over sketches on a
convolutional one, both trained on the digits that ship with scikit-learn. Noise is independent, its
deviation 0.3 or 0.5 where pixels go from 0 to 1. The truth is sampled, with a control variate.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import covprop as cp
from covprop import demo
from experiments import drawing
from experiments.options import Options
from experiments.randomness import seed_of, seeded
from experiments.table import Table

NAME = "split"
NOISES = (0.3, 0.5)
SAMPLES, SMOKE_SAMPLES = 2**17, 2**10
IMAGES = {"MLP": 20, "CNN": 10}
TANGENTS = 64
REPEATS, FORWARDS = 2, 50
"""The fastest of so many runs of a method, and of the network itself, is the time that counts."""
SMOKE_ROWS = 64
MILLI = 1e3


@final
class Way(NamedTuple):
    """A method of the tables: nodes for each direction, and what is propagated with."""

    nodes: int
    directions: int
    sketched: bool = False

    @property
    def components(self) -> int:
        """In all."""
        return int(self.nodes**self.directions)

    def method(self, generator: torch.Generator) -> Any:
        """The method itself."""
        base = cp.Sketched(TANGENTS, generator=generator) if self.sketched else cp.Exact()
        return base if self.components == 1 else cp.Split(self.nodes, self.directions, base)

    def words(self) -> str:
        """As a row is called."""
        base = f"Sketched({TANGENTS})" if self.sketched else "Exact()"
        if self.components == 1:
            return base
        return f"{base}, {' x '.join([str(self.nodes)] * self.directions)}"


ONE = Way(1, 1)
MORE_NODES = (ONE, Way(3, 1), Way(9, 1), Way(27, 1))
MORE_DIRECTIONS = (ONE, Way(3, 1), Way(3, 2), Way(3, 3), Way(3, 4))
SKETCHES = tuple(Way(nodes, count, sketched=True) for nodes, count in ((1, 1), (3, 1), (3, 2)))
LINES: dict[str, dict[str, tuple[Way, ...]]] = {
    "MLP": {"one direction, more nodes": MORE_NODES, "3 nodes, more directions": MORE_DIRECTIONS,
            "9 nodes, more directions": (ONE, Way(9, 1), Way(9, 2))},
    "CNN": {"GaussianLayers(), 3 nodes, more directions": MORE_DIRECTIONS[:3],
            f"Sketched({TANGENTS}), 3 nodes, more directions": SKETCHES},
}  # fmt: skip
"""By network, the lines of the figure; what is on one is in the table."""
STYLES = ((drawing.VERMILION, "s"), (drawing.BLUE, "o"), (drawing.ORANGE, "^"))


def ways(network: str) -> list[Way]:
    """Each once, by the number of components."""
    found = dict.fromkeys(way for line in LINES[network].values() for way in line)
    return sorted(found, key=lambda way: (way.sketched, way.components, way.directions))


def settings(options: Options) -> dict[str, Any]:
    """What results depend on."""
    samples = SMOKE_SAMPLES if options.smoke else SAMPLES
    return {"seed": options.seed, "smoke": options.smoke, "samples": samples,
            "tangents": TANGENTS, "dtype": "float32"}  # fmt: skip


def units(options: Options) -> list[str]:
    """Network, noise, image."""
    return [
        f"{network}/{noise}/{image}"
        for network, count in IMAGES.items() for noise in NOISES[: 1 if options.smoke else None]
        for image in range(1 if options.smoke else options.instances or count)
    ]  # fmt: skip


def fully_connected() -> nn.Sequential:
    """Three hidden layers of 100 units."""
    widths = (64, 100, 100, 100)
    hidden = [layer for ends in pairwise(widths) for layer in (nn.Linear(*ends), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], 10))


def convolutional() -> nn.Sequential:
    """Three convolutions, 832 units, and a hidden layer of 32."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


MAKERS: dict[str, Callable[[], nn.Sequential]] = {"MLP": fully_connected, "CNN": convolutional}


@cache
def trained(network: str, seed: int, rows: int | None) -> tuple[nn.Sequential, float]:
    """A network and its accuracy on test images; rows: of the training data, all if None."""
    images, labels, test, answers = demo.digits()
    with seeded(seed, NAME, network), torch.enable_grad():
        model = MAKERS[network]()
        demo.train(model, images[:rows], labels[:rows])
    model.requires_grad_(requires_grad=False).eval()
    return model, float((model(test).argmax(1) == answers).float().mean())


def measure(key: str, options: Options) -> dict[str, Any]:
    """One image by every way, and by sampling."""
    network, noise, image = key.split("/")
    model, accuracy = trained(network, options.seed, SMOKE_ROWS if options.smoke else None)
    mean = demo.digits()[2][int(image)][None]
    x = cp.Gaussian.isotropic(mean, stddev=float(noise), batch_dims=1)
    generator = torch.Generator().manual_seed(seed_of(options.seed, NAME, key))
    sampling = cp.ControlVariate(settings(options)["samples"], generator=generator)
    truth = cp.propagate(model, x, sampling)
    assert truth.covariance_stderr is not None
    stderr = truth.covariance_stderr.diagonal(dim1=-2, dim2=-1) / truth.variance / 2
    forward = fastest(partial(model, mean), FORWARDS)[1]
    found: dict[str, Any] = {}
    for way in ways(network):
        propagate = partial(cp.propagate, model, x, way.method(generator))
        y, seconds = fastest(propagate, 1 if options.smoke else REPEATS)
        found[way.words()] = {
            "stddev": _rounded(y.stddev / truth.stddev - 1),
            "mean": _rounded((y.mean - truth.mean) / truth.stddev),
            "passes": round(seconds / forward, 1),
        }
    return {**found, "accuracy": round(accuracy, 4), "stderr": _rounded(stderr),
            "milliseconds of a forward pass": round(MILLI * forward, 4)}  # fmt: skip


def fastest(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result, and the seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - started)
    return result, min(times)


def grouped(record: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Images by network and noise."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for key, result in record["results"].items():
        network, noise, _ = key.split("/")
        groups[network, noise].append(result)
    return groups


def error(images: Iterable[dict[str, Any]], way: Way, moment: str) -> float:
    """The average size over images and logits."""
    return float(np.mean(np.abs([image[way.words()][moment] for image in images])))


def tables(record: dict[str, Any]) -> list[Table]:
    """A table for each network."""
    groups = grouped(record)
    return [_table(network, {n: groups[network, n] for one, n in groups if one == network})
            for network in LINES if any(network == one for one, _ in groups)]  # fmt: skip


def _table(network: str, by_noise: dict[str, list[dict[str, Any]]]) -> Table:
    header = ["", "components"]
    for noise in by_noise:
        header += [f"std off by, noise {noise}", "means off by"]
    rows = []
    for way in ways(network):
        cells = [
            f"{error(images, way, moment):{form}}"
            for images in by_noise.values() for moment, form in (("stddev", ".2%"), ("mean", ".4f"))
        ]  # fmt: skip
        passes = [image[way.words()]["passes"] for images in by_noise.values() for image in images]
        rows.append([way.words(), str(way.components), *cells, f"{np.median(passes):.0f}"])
    images = [image for part in by_noise.values() for image in part]
    sampled = " and ".join(
        f"{np.mean([image['stderr'] for image in part]):.2%} (noise {noise})"
        for noise, part in by_noise.items()
    )
    forward = np.median([image["milliseconds of a forward pass"] for image in images])
    note = (
        f"Averages of |std / true std - 1| and of |mean - true mean| / true std over "
        f"{len(images) // len(by_noise)} test images and 10 logits; the standard error of the true "
        f"std is {sampled}. Accuracy without noise {images[0]['accuracy']:.1%}. The last column is "
        f"time in forward passes of one image, {forward:.2f} ms each."
    )
    return Table(network, [*header, "forward passes"], rows, note)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Errors of standard deviations over components, a panel for each network and noise."""
    groups = grouped(record)
    columns = 2
    figure, axes = drawing.panels(-(-len(groups) // columns), columns, width=4.2, height=2.9)
    for panel, ((network, noise), images) in zip(axes.flat, groups.items(), strict=True):
        _lines(panel, network, images)
        panel.set_title(f"{network}, noise {noise}", fontsize=drawing.FONT)
        panel.set_xlabel("components")
        panel.legend(frameon=False, fontsize=drawing.FONT - 1, loc="lower left")
    figure.supylabel("error of standard deviations, %", fontsize=drawing.FONT + 1)
    return {NAME: figure}


def _lines(panel: Axes, network: str, images: list[dict[str, Any]]) -> None:
    for (label, line), (colour, marker) in zip(LINES[network].items(), STYLES, strict=False):
        counts = [way.components for way in line]
        errors = [100 * error(images, way, "stddev") for way in line]
        panel.plot(counts, errors, color=colour, marker=marker, markersize=4, label=label)
    panel.set(xscale="log", yscale="log", xlim=(0.8, 100), ylim=(0.3, 6))
    panel.set_xticks([3**power for power in range(5)], [str(3**power) for power in range(5)])
    panel.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    panel.minorticks_off()


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.flatten().tolist()]

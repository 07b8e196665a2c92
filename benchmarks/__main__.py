"""`python -m benchmarks [--only NAME ...] [--smoke] [--load N] [--out FILE]`: figures as JSON.

Every time is compared with others of the same run. `python -m benchmarks.render` makes a table and
plots of the file.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    accuracy,
    bayes,
    cumulants,
    environment,
    layers,
    mnist,
    networks,
    plans,
    recurrent,
    scaling,
    sketched,
)
from experiments.record import write

OUT = Path(__file__).parent / "out"
SEED = 0

BENCHMARKS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "layers": layers.moderate,
    "correlated-layers": layers.correlated,
    "far-means": layers.far_means,
    "fc-4": networks.fc4,
    "batch": networks.batch,
    "cnn-8": networks.cnn8,
    "mnist": mnist.run,
    "cost": scaling.cost,
    "memory": scaling.matrices,
    "accuracy": accuracy.run,
    "cumulants": cumulants.run,
    "recurrent": recurrent.run,
    "planned-time": plans.run,
    "bayes-step": bayes.step,
    "bayes-deep": bayes.deep,
    "bayes-members": bayes.members,
    "sketched-mnist": sketched.mnist,
    "sketched-resnet18": sketched.resnet18,
    "sketched-max-pooling": sketched.max_pooling,
    "sketched-resnet50": sketched.resnet50,
    "sketched-units": sketched.growth,
}


@torch.no_grad()
def measured(name: str, smoke: bool) -> dict[str, Any]:
    """The outcome of one benchmark, or the error that ended it, with the load around it."""
    torch.manual_seed(SEED)
    before = environment.load()
    try:
        result = BENCHMARKS[name](smoke)
    except Exception as error:  # the other benchmarks are still worth having
        result = {"figures": [], "failure": f"{type(error).__name__}: {error}"}
    if smoke:  # at these sizes a target means nothing
        result["figures"] = [{**figure, "met": None} for figure in result["figures"]]
    return {"about": BENCHMARKS[name].__doc__, "load": [before, environment.load()], **result}


def show(name: str, result: dict[str, Any]) -> None:
    """Print the figures of one benchmark."""
    print(name, flush=True)
    for figure in result["figures"]:
        verdict = {True: "met", False: "MISSED", None: ""}[figure["met"]]
        target = figure["target"]
        print(f"  {figure['figure']:<60} {figure['reached']:>10.3g}  {target} {verdict}")
    if result.get("failure"):
        print(f"  failed: {result['failure']}")
    sys.stdout.flush()


BUSY = "import torch\nx = torch.randn(700, 700)\nwhile True:\n    x = torch.tanh(x @ x)"
"""What each of the other programs does: arithmetic and memory."""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many other processes run meanwhile, one thread each."""
    command = [sys.executable, "-c", "import torch\ntorch.set_num_threads(1)\n" + BUSY]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> int:
    """Measure one after another and write after each; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--smoke", action="store_true", help="seconds, to see that it works")
    parser.add_argument(
        "--load", type=int, default=0, metavar="N", help="other processes that run meanwhile"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    path = arguments.out or OUT / ("smoke.json" if smoke else "benchmarks.json")
    settings = {
        "seed": SEED, "smoke": smoke, "other processes": arguments.load, **environment.describe()
    }  # fmt: skip
    results: dict[str, Any] = {}
    with busy(arguments.load):
        for name in arguments.only:
            results[name] = measured(name, smoke)
            write(path, settings, results)
            show(name, results[name])
    return int(any(result.get("failure") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

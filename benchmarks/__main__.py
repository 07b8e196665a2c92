"""`python -m benchmarks [--only NAME ...] [--smoke] [--out FILE]`: figures as JSON.

Every time is compared with others of the same run. `python -m benchmarks.render` makes a table and
plots of the file.
"""

import argparse
import sys
from collections.abc import Callable
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


def main() -> int:
    """Measure one after another and write after each; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--smoke", action="store_true", help="seconds, to see that it works")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    path = arguments.out or OUT / ("smoke.json" if smoke else "benchmarks.json")
    settings = {"seed": SEED, "smoke": smoke, **environment.describe()}
    results: dict[str, Any] = {}
    for name in arguments.only:
        results[name] = measured(name, smoke)
        write(path, settings, results)
        show(name, results[name])
    return int(any(result.get("failure") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

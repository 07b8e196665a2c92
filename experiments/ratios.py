"""The paper's measure of tightness: Monte Carlo's moment over the analytic one, over instances."""

from typing import Any, NamedTuple, final

import numpy as np

from experiments.ratio_methods import SAMPLED


@final
class Ratio(NamedTuple):
    """Average and standard deviation over instances."""

    average: np.ndarray  # (outputs,)
    spread: np.ndarray

    def words(self, output: int = 0) -> str:
        """As the paper prints it."""
        return f"{self.average[output]:.3f} ± {self.spread[output]:.3f}"


def ratio(instances: list[dict[str, Any]], method: str, moment: str) -> Ratio:
    """Monte Carlo / analytic, for each output; infinite where a method knows no variance."""
    sampled = np.array([instance[SAMPLED][moment] for instance in instances])
    analytic = np.array([instance[method][moment] for instance in instances])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sampled / analytic
        spread = ratios.std(0, ddof=1) if len(ratios) > 1 else np.full(ratios.shape[1], np.nan)
    return Ratio(ratios.mean(0), spread)


def noise(instances: list[dict[str, Any]], moment: str) -> np.ndarray:
    """What sampling alone would spread a perfect method by: the r.m.s. relative standard error."""
    relative = np.array([
        np.array(instance[SAMPLED][f"{moment} stderr"]) / np.array(instance[SAMPLED][moment])
        for instance in instances
    ])  # fmt: skip
    return np.sqrt(np.square(relative).mean(0))


def seconds(instances: list[dict[str, Any]], method: str) -> float:
    """The median over instances."""
    return float(np.median([instance[method]["seconds"] for instance in instances]))

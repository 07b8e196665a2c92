"""Table 3: Bayesian networks for the nine UCI regression sets, by the paper's protocol and ours.

One hidden layer of 50 units (protein 100), batches of 10, 50 epochs (protein 25), AdamW; all splits
of a set are trained together. The learning rate of each set and mode (and the prior, of the honest
protocol) is the best for held-out training rows of the first split. Log-likelihoods of the test
rows, in nats for each, in the units of the target; higher is better.

With one hidden layer and known inputs, pre-activations are independent whatever the mode, so that
covariances off the diagonal are never used: this table cannot show what better ones are worth.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from covprop import bayes
from experiments import drawing, pbp, regression, uci
from experiments.options import Options
from experiments.regression import DIAGONAL, EXACT, MCVI, SERIES, WU, Recipe
from experiments.table import Table

NAME = "table3"
MODES = (EXACT, SERIES, WU, DIAGONAL, MCVI)
RATES = (1e-3, 3e-3, 5e-3, 7e-3, 1e-2)
"""Those of the paper's appendix."""
FOLDS = 4
"""Random ninths of the first split's training rows that a learning rate is judged by."""
PAPER, HONEST, LONG = "paper", "honest", "long"
PROTOCOLS = {
    PAPER: "the published loss (KL times 1e-3 over the batch size), prior and initial weights, "
           "each split's best epoch by its test rows, log p(t | E[f]) without the variance of the "
           "outputs (MCVI: E[log p(t | f)] of 10 draws), averaged over batches of ten and then "
           "over batches; mean ± standard deviation over splits",
    HONEST: "the ELBO, prior and learning rate chosen by held-out training rows, the rate falling "
            "to zero in the second half, last epoch, the density log E[p(t | f)] of the test rows; "
            "mean ± standard error over splits",
    LONG: "the same with ten times the epochs, prior and rate chosen anew: the paper's epochs are "
          "few for the ELBO",
}  # fmt: skip
XAVIER = {"Xavier": bayes.XavierPrior()}
PRIORS: dict[str, dict[str, bayes.Prior]] = {
    PAPER: XAVIER,
    HONEST: {**XAVIER, "wide He": bayes.WideHePrior(), "empirical Bayes": bayes.EmpiricalBayes()},
}
"""Among which held-out rows choose: all that were ever tried."""
PRIORS[LONG] = PRIORS[HONEST]
COOLDOWN, LONGER = 0.5, 10
"""The share of the steps in which an honest rate falls; epochs of the long protocol for one."""
PUBLISHED_KL = 1e-3
"""The paper's lambda; its code also divides the divergence by the batch size."""
SETS = (
    "yacht", "boston", "energy", "concrete", "wine", "kin8nm", "power", "naval", "protein",
)  # fmt: skip
"""From small to large."""
LONG_SETS, LONGEST = SETS[:4], f"{EXACT}, {LONGER} times the epochs"
"""What the long protocol is run for, with the exact mode, and what that is called."""
SMOKE_SETS, SMOKE_SPLITS, SMOKE_EPOCHS = ("yacht", "naval"), 3, 2


@final
class Published(NamedTuple):
    """A row of the paper's table 3, and of table 2 of Wu et al. (2019)."""

    proposed: str
    dvi: str
    mcvi: str
    wu_dvi: str
    wu_ddvi: str
    wu_mcvi: str


PUBLISHED = {
    "boston": Published("-2.31 ± 0.19", "-2.33 ± 0.19", "-2.40 ± 0.23",
                        "-2.41 ± 0.02", "-2.42 ± 0.02", "-2.46 ± 0.02"),
    "concrete": Published("-2.98 ± 0.11", "-2.99 ± 0.11", "-3.04 ± 0.10",
                          "-3.06 ± 0.01", "-3.07 ± 0.02", "-3.07 ± 0.01"),
    "energy": Published("-1.27 ± 0.21", "-1.30 ± 0.22", "-1.40 ± 0.18",
                        "-1.01 ± 0.06", "-1.06 ± 0.06", "-1.03 ± 0.04"),
    "kin8nm": Published("1.11 ± 0.03", "1.11 ± 0.03", "1.20 ± 0.03",
                        "1.13 ± 0.00", "1.13 ± 0.00", "1.14 ± 0.00"),
    "naval": Published("5.81 ± 0.16", "5.73 ± 0.22", "5.92 ± 0.24",
                       "6.29 ± 0.04", "6.22 ± 0.06", "5.94 ± 0.05"),
    "power": Published("-2.82 ± 0.04", "-2.82 ± 0.04", "-2.82 ± 0.04",
                       "-2.80 ± 0.00", "-2.80 ± 0.00", "-2.80 ± 0.00"),
    "protein": Published("-2.97 ± 0.01", "-2.97 ± 0.02", "-3.05 ± 0.02",
                         "-2.85 ± 0.01", "-2.84 ± 0.01", "-2.87 ± 0.01"),
    "wine": Published("-0.91 ± 0.07", "-0.92 ± 0.07", "-0.94 ± 0.07",
                      "-0.90 ± 0.01", "-0.91 ± 0.02", "-0.92 ± 0.01"),
    "yacht": Published("-0.25 ± 0.20", "-0.23 ± 0.22", "-0.53 ± 0.19",
                       "-0.47 ± 0.03", "-0.47 ± 0.03", "-0.68 ± 0.03"),
}  # fmt: skip
PBP, OWN = "PBP", "own"
"""Probabilistic backpropagation, by its own protocol: 40 passes, nothing to choose."""
PUBLISHED_PBP = {
    "boston": ("-2.57 ± 0.09", "3.01 ± 0.18"), "concrete": ("-3.16 ± 0.02", "5.67 ± 0.09"),
    "energy": ("-2.04 ± 0.02", "1.80 ± 0.05"), "kin8nm": ("0.90 ± 0.01", "0.10 ± 0.00"),
    "naval": ("3.73 ± 0.01", "0.01 ± 0.00"), "power": ("-2.84 ± 0.01", "4.12 ± 0.03"),
    "protein": ("-2.97 ± 0.00", "4.73 ± 0.01"), "wine": ("-0.97 ± 0.01", "0.64 ± 0.01"),
    "yacht": ("-1.63 ± 0.02", "1.02 ± 0.05"),
}  # fmt: skip
"""Log-likelihoods and errors of Hernandez-Lobato & Adams (2015), as table 1 of Gal & Ghahramani
(2016) prints them."""
STYLES = {
    EXACT: (0.36, drawing.BLACK, "o"), LONGEST: (0.18, drawing.PURPLE, "*"),
    SERIES: (0.18, drawing.BLUE, "s"), WU: (0.0, drawing.GREEN, "^"),
    DIAGONAL: (-0.18, drawing.ORANGE, "D"), MCVI: (-0.36, drawing.VERMILION, "v"),
}  # fmt: skip
"""Where it is drawn, and how."""


def settings(options: Options) -> dict[str, Any]:
    """Seed and recipe; which sets and protocols are run is no setting."""
    return {
        "seed": options.seed, "smoke": options.smoke, "rates": RATES, "folds": FOLDS,
        "batch": 10, "weight decay": Recipe((), 1).decay, "dtype": "float32",
        "priors": {way: list(PRIORS[way]) for way in PROTOCOLS}, "paper's lambda": PUBLISHED_KL,
        "honest cooldown": COOLDOWN, "long epochs": LONGER,
    }  # fmt: skip


def units(options: Options) -> list[str]:
    """Set, mode, protocol; small sets first."""
    chosen = options.datasets or (SMOKE_SETS if options.smoke else SETS)
    protocols = [way for way in PROTOCOLS if options.protocol in (None, way)]
    return [
        f"{each}/{mode}/{way}" for each in chosen for mode in MODES for way in protocols
        if way != LONG or (each in LONG_SETS and mode == EXACT)
    ] + [f"{each}/{PBP}/{OWN}" for each in chosen if options.protocol in (None, OWN)]  # fmt: skip


def recipe(name: str, protocol: str, prior: str, rows: int, smoke: bool) -> Recipe:
    """The paper's network, and the divergence's temperature for so many training rows."""
    large = name == "protein"
    base = Recipe((8,) if smoke else (100,) if large else (50,),
                  SMOKE_EPOCHS if smoke else 25 if large else 50)  # fmt: skip
    published = rows * PUBLISHED_KL / base.batch
    base = replace(base, prior=PRIORS[protocol][prior])
    if protocol == PAPER:
        return replace(base, kl_temperature=published, at_prior=True)
    epochs = base.epochs * (LONGER if protocol == LONG else 1)
    return replace(base, epochs=epochs, cooldown=COOLDOWN)


def measure(key: str, options: Options) -> dict[str, Any]:
    """Choose the learning rate by held-out training rows, then train on every split."""
    name, mode, protocol = key.split("/")
    most = SMOKE_SPLITS if options.smoke else None
    seed = (options.seed, NAME, name)
    if mode == PBP:
        return _backpropagated(name, seed, most, options)
    held_out = uci.validation(name, FOLDS, options.data, most, options.seed)
    score = _paper_score if protocol == PAPER else _honest_score
    scored = {}
    for prior in PRIORS[protocol]:
        way = recipe(name, protocol, prior, held_out.train.y.shape[1], options.smoke)
        found_rates = regression.search(held_out, way, mode, RATES, seed, score)
        scored |= {f"{prior}, {rate}": value for rate, value in found_rates.items()}
    prior, chosen = max(scored, key=scored.__getitem__).split(", ")
    rate = float(chosen)
    data = uci.standard(name, options.data, most)
    way = recipe(name, protocol, prior, data.train.y.shape[1], options.smoke)
    trained = regression.train(data, way, mode, rate, seed)
    found, rounded = trained.scores, regression.rounded
    at_mean, published = found["at the mean"], found["by batches"]
    return {
        "prior": prior, "rate": rate, "held out": scored,
        "best": rounded(regression.best(published)),
        "best epoch": (published.argmax(0) + 1).tolist(),
        "best of all rows": rounded(regression.best(at_mean)),
        "best expected": rounded(regression.best(found["expected"])),
        "last": rounded(at_mean[-1]), "curve": rounded(at_mean.mean(1)),
        **{score: rounded(found[score]) for score in ("density", "rmse", "coverage")},
        "seconds": trained.seconds, "milliseconds of a step": trained.step,
    }  # fmt: skip


def _backpropagated(
    name: str, seed: tuple[object, ...], most: int | None, options: Options
) -> dict[str, Any]:
    """Probabilistic backpropagation on every split, with as many hidden units."""
    way = recipe(name, HONEST, next(iter(PRIORS[HONEST])), 1, options.smoke)
    data = uci.standard(name, options.data, most)
    epochs = SMOKE_EPOCHS if options.smoke else pbp.EPOCHS
    found, rounded = pbp.train(data, way.hidden, seed, epochs), regression.rounded
    return {
        "density": rounded(found.density), "rmse": rounded(found.rmse),
        "coverage": rounded(found.coverage), "seconds": found.seconds,
        "milliseconds of a step": found.step,
    }  # fmt: skip


def _paper_score(found: dict[str, Tensor]) -> Tensor:
    return regression.best(found["at the mean"])


def _honest_score(found: dict[str, Tensor]) -> Tensor:
    return found["density"]


def grouped(record: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by protocol, set and mode; long ones as another mode of the honest protocol."""
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for key, result in record["results"].items():
        name, mode, protocol = key.split("/")
        if protocol == LONG:
            protocol, mode = HONEST, LONGEST
        groups[protocol][name][mode] = result
    return {
        protocol: {name: groups[protocol][name] for name in SETS if name in groups[protocol]}
        for protocol in PROTOCOLS if protocol in groups
    }  # fmt: skip


def tables(record: dict[str, Any]) -> list[Table]:
    """Both protocols beside what was published; what their choices are worth; errors and time."""
    groups = grouped(record)
    found = []
    if PAPER in groups:
        header = ["", *MODES, "paper: proposed", "paper: DVI", "paper: MCVI"]
        rows = [
            [name, *_cells(by_mode, MODES, "best", error=False), *PUBLISHED[name][:3]]
            for name, by_mode in groups[PAPER].items()
        ]
        found.append(Table("The paper's protocol", header, rows, f"{PROTOCOLS[PAPER]}."))
    if HONEST in groups:
        modes = (*MODES, LONGEST)
        header = ["", *modes, "Wu et al.: DVI", "Wu et al.: dDVI", "Wu et al.: MCVI"]
        rows = [
            [name, *_cells(by_mode, modes, "density", error=True), *PUBLISHED[name][3:]]
            for name, by_mode in groups[HONEST].items()
        ]
        note = f"{PROTOCOLS[HONEST]}. {LONGEST}: {PROTOCOLS[LONG]}."
        found.append(Table("The honest protocol", header, rows, note))
    return [*found, *_of_pbp(record), _choices(groups), _quality(groups)]


def _of_pbp(record: dict[str, Any]) -> list[Table]:
    """Probabilistic backpropagation beside its published numbers, if it has been run."""
    rows = []
    for name in SETS:
        if result := record["results"].get(f"{name}/{PBP}/{OWN}"):
            likelihood, error = PUBLISHED_PBP[name]
            rows.append([
                name, regression.spread(result["density"]), likelihood,
                regression.spread(result["rmse"]), error, f"{np.mean(result['coverage']):.3f}",
                f"{result['seconds']:.0f}",
            ])  # fmt: skip
    header = ["", "log-likelihood", "published", "RMSE", "published RMSE",
              "within 95 % intervals", "seconds"]  # fmt: skip
    note = (
        "Hernandez-Lobato & Adams (2015), from their formulas: one noise for all rows, 40 passes, "
        "nothing chosen by held-out rows; mean ± standard error over splits. Published numbers are "
        "those that Gal & Ghahramani (2016) print."
    )
    return [Table("Probabilistic backpropagation", header, rows, note)] if rows else []


def _cells(by_mode: dict[str, Any], modes: Sequence[str], score: str, error: bool) -> list[str]:
    return [
        regression.spread(by_mode[mode][score], error) if mode in by_mode else "" for mode in modes
    ]


def _choices(groups: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """The exact mode, scored three ways, for both losses."""
    scores = {"best": "best epoch, as published", "best of all rows": "best epoch, equal rows",
              "last": "last epoch, at the mean", "density": "last epoch, density"}  # fmt: skip
    losses = {PAPER: "published loss", HONEST: "ELBO"}
    header = [
        "", *(f"{loss}: {score}" for loss in losses.values() for score in scores.values())
    ]  # fmt: skip
    rows = []
    for name in SETS:
        each = [groups.get(way, {}).get(name, {}).get(EXACT) for way in losses]
        if any(each):
            rows.append([name, *(f"{np.mean(result[score]):.2f}" if result else ""
                                 for result in each for score in scores)])  # fmt: skip
    note = "What selection by the test rows, leaving out variances, and the loss do; exact mode."
    return Table("What the protocol is worth", header, rows, note)


def _quality(groups: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Errors, intervals, rates and time of every result."""
    header = ["", "mode", "protocol", "RMSE", "within 95 % intervals", "prior", "rate", "seconds",
              "ms of a step"]  # fmt: skip
    rows = [
        [name, mode, way, f"{np.mean(result['rmse']):.3g}", f"{np.mean(result['coverage']):.3f}",
         result["prior"], f"{result['rate']:g}", f"{result['seconds']:.0f}",
         f"{result['milliseconds of a step']:.1f}"]
        for way, by_set in groups.items() for name, by_mode in by_set.items()
        for mode, result in by_mode.items()
    ]  # fmt: skip
    note = "Last epoch, averages over splits; time of training all splits together, one thread."
    return Table("Errors, intervals, time", header, rows, note)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Averages with standard errors, set by set, less the published ones."""
    groups = grouped(record)
    figure, axes = drawing.panels(1, len(groups), width=4.6, height=6.2)
    titles = {PAPER: "paper's protocol, less the paper's proposed",
              HONEST: "honest protocol, less Wu et al.'s DVI"}  # fmt: skip
    for panel, (protocol, by_set) in zip(axes[0], groups.items(), strict=True):
        score = "best" if protocol == PAPER else "density"
        for mode, (offset, colour, marker) in STYLES.items():
            points = [
                (place, np.mean(by_mode[mode][score]) - reference(name, protocol),
                 regression.standard_error(by_mode[mode][score]))
                for place, (name, by_mode) in enumerate(by_set.items()) if mode in by_mode
            ]  # fmt: skip
            if points:
                place, value, error = np.transpose(points)
                panel.errorbar(value, place + offset, xerr=error, fmt=marker, color=colour,
                               markersize=5, capsize=2, label=mode)  # fmt: skip
        panel.axvline(0, color="0.5", linewidth=0.8)
        panel.set_yticks(range(len(by_set)), list(by_set))
        panel.set_ylim(-0.5, len(by_set) - 0.5)
        drawing.bands(panel, len(by_set))
        panel.set_xlabel("test log-likelihood, nats (higher is better)")
        panel.set_title(titles[protocol], fontsize=drawing.FONT)
    shown = {
        label: handle for panel in axes[0]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=3,
                  frameon=False, fontsize=drawing.FONT)  # fmt: skip
    return {NAME: figure}


def reference(name: str, protocol: str) -> float:
    """The published average that a protocol is compared with."""
    row = PUBLISHED[name]
    return float((row.proposed if protocol == PAPER else row.wu_dvi).split()[0])

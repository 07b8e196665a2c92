"""Methods that covprop has: its own, those of papers, points and samples."""

from functools import partial

import covprop as cp
from covprop.methods.base import Method
from experiments.rivals.rival import Rival


def _of(method: Method, joint: bool = True) -> Rival:
    return Rival(partial(cp.propagate, method=method), joint)


OURS = {
    "Auto()": _of(cp.Auto()),
    "GaussianLayers()": _of(cp.GaussianLayers()),
    "Cumulants()": _of(cp.Cumulants()),
    "Split()": _of(cp.Split()),
    "Series(4)": _of(cp.Series(order=4)),
    "Sketched()": _of(cp.Sketched()),
    "ControlVariate(4096)": _of(cp.ControlVariate(4096)),
}
PUBLISHED = {
    "Bibi 2018 (PL-DNN)": _of(cp.PiecewiseLinear(zero_mean=True)),
    "Alfadly 2020 (PL-DNN)": _of(cp.PiecewiseLinear()),
    "Gast & Roth 2018 (ADF)": _of(cp.AssumedDensity(), joint=False),
    "Wu 2019 (DVI)": _of(cp.Wu2019()),
    "EKF": _of(cp.Linearized()),
}
POINTS = {
    "unscented": _of(cp.Unscented()),
    **{
        f"quasi-Monte Carlo {points:,}": _of(cp.QuasiMonteCarlo(points))
        for points in (256, 4096, 65_536)
    },
}
SAMPLES = {
    f"Monte Carlo {samples:,}": _of(cp.MonteCarlo(samples)) for samples in (1_000, 10_000, 100_000)
}

"""THE list of activation cases: every declared activation, several options each."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from covprop.activations import Activation, rectifiers, smooth


class Case(NamedTuple):
    """One scalar function: as torch spells it, as covprop declares it, and where it is not smooth.

    declaration is the name in covprop.activations.DECLARATIONS; kinks are where the function or its
    first or second derivative jumps, jumps those of them where the function itself does.
    """

    function: Callable[[Tensor], Tensor]
    activation: Callable[[], Activation]
    family: str
    declaration: str
    kinks: tuple[float, ...] = ()
    jumps: tuple[float, ...] = ()


EXACT, QUADRATURE = "exact", "quadrature"


def _step(y: Tensor) -> Tensor:
    return torch.heaviside(y, torch.ones((), dtype=y.dtype))


def _prelu(y: Tensor) -> Tensor:
    return torch.nn.functional.prelu(y, torch.full((1,), 0.2, dtype=y.dtype))


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


CASES: dict[str, Case] = {
    "relu": Case(nn.ReLU(), rectifiers.relu, EXACT, "relu", (0.0,)),
    "leaky_relu(0.01)": Case(nn.LeakyReLU(), rectifiers.leaky_relu, EXACT, "leaky_relu", (0.0,)),
    "leaky_relu(0.3)": Case(
        nn.LeakyReLU(0.3), partial(rectifiers.leaky_relu, 0.3), EXACT, "leaky_relu", (0.0,)
    ),
    "leaky_relu(-0.5)": Case(
        nn.LeakyReLU(-0.5), partial(rectifiers.leaky_relu, -0.5), EXACT, "leaky_relu", (0.0,)
    ),
    "rrelu": Case(nn.RReLU().eval(), rectifiers.rrelu, EXACT, "rrelu", (0.0,)),
    "rrelu(0.2, 0.8)": Case(
        nn.RReLU(0.2, 0.8).eval(), partial(rectifiers.rrelu, 0.2, 0.8), EXACT, "rrelu", (0.0,)
    ),
    "prelu(0.2)": Case(_prelu, lambda: rectifiers.prelu(_double(0.2)), EXACT, "prelu", (0.0,)),
    "relu6": Case(nn.ReLU6(), rectifiers.relu6, EXACT, "relu6", (0.0, 6.0)),
    "hardtanh": Case(nn.Hardtanh(), rectifiers.hardtanh, EXACT, "hardtanh", (-1.0, 1.0)),
    "hardtanh(-0.5, 2)": Case(
        nn.Hardtanh(-0.5, 2.0),
        partial(rectifiers.hardtanh, -0.5, 2.0),
        EXACT,
        "hardtanh",
        (-0.5, 2.0),
    ),
    "clamp(-0.7, 1.2)": Case(
        partial(torch.clamp, min=-0.7, max=1.2),
        partial(rectifiers.clamp, -0.7, 1.2),
        EXACT,
        "clamp",
        (-0.7, 1.2),
    ),
    "clamp(min=0.4)": Case(
        partial(torch.clamp, min=0.4), partial(rectifiers.clamp, min=0.4), EXACT, "clamp", (0.4,)
    ),
    "clamp(max=-0.3)": Case(
        partial(torch.clamp, max=-0.3), partial(rectifiers.clamp, max=-0.3), EXACT, "clamp", (-0.3,)
    ),
    "clamp_min(-0.2)": Case(
        partial(torch.clamp_min, min=-0.2),
        partial(rectifiers.clamp_min, -0.2),
        EXACT,
        "clamp_min",
        (-0.2,),
    ),
    "clamp_max(0.8)": Case(
        partial(torch.clamp_max, max=0.8),
        partial(rectifiers.clamp_max, 0.8),
        EXACT,
        "clamp_max",
        (0.8,),
    ),
    "threshold(0.5, -1)": Case(
        nn.Threshold(0.5, -1.0),
        partial(rectifiers.threshold, 0.5, -1.0),
        EXACT,
        "threshold",
        (0.5,),
        (0.5,),
    ),
    "hardsigmoid": Case(
        nn.Hardsigmoid(), rectifiers.hardsigmoid, EXACT, "hardsigmoid", (-3.0, 3.0)
    ),
    "abs": Case(torch.abs, rectifiers.absolute, EXACT, "abs", (0.0,)),
    "sign": Case(torch.sign, rectifiers.sign, EXACT, "sign", (0.0,), (0.0,)),
    "heaviside": Case(
        _step, lambda: rectifiers.heaviside(_double(1.0)), EXACT, "heaviside", (0.0,), (0.0,)
    ),
    "softshrink(0.5)": Case(
        nn.Softshrink(), rectifiers.softshrink, EXACT, "softshrink", (-0.5, 0.5)
    ),
    "softshrink(1.5)": Case(
        nn.Softshrink(1.5), partial(rectifiers.softshrink, 1.5), EXACT, "softshrink", (-1.5, 1.5)
    ),
    "hardshrink(0.5)": Case(
        nn.Hardshrink(), rectifiers.hardshrink, EXACT, "hardshrink", (-0.5, 0.5), (-0.5, 0.5)
    ),
    "hardshrink(1.2)": Case(
        nn.Hardshrink(1.2),
        partial(rectifiers.hardshrink, 1.2),
        EXACT,
        "hardshrink",
        (-1.2, 1.2),
        (-1.2, 1.2),
    ),
    "gelu": Case(nn.GELU(), smooth.gelu, EXACT, "gelu"),
    "gelu_tanh": Case(
        nn.GELU(approximate="tanh"), partial(smooth.gelu, "tanh"), QUADRATURE, "gelu"
    ),
    "erf": Case(torch.erf, smooth.erf, EXACT, "erf"),
    "erfc": Case(torch.erfc, smooth.erfc, EXACT, "erfc"),
    "ndtr": Case(torch.special.ndtr, smooth.normal_cdf, EXACT, "ndtr"),
    "exp": Case(torch.exp, smooth.exponential, EXACT, "exp"),
    "sin": Case(torch.sin, smooth.sine, EXACT, "sin"),
    "cos": Case(torch.cos, smooth.cosine, EXACT, "cos"),
    "square": Case(torch.square, smooth.square, EXACT, "square"),
    "pow(0)": Case(partial(torch.pow, exponent=0), partial(smooth.integer_power, 0), EXACT, "pow"),
    "pow(3)": Case(partial(torch.pow, exponent=3), partial(smooth.integer_power, 3), EXACT, "pow"),
    "pow(4)": Case(
        partial(torch.pow, exponent=4.0), partial(smooth.integer_power, 4.0), EXACT, "pow"
    ),
    "elu(1.0)": Case(nn.ELU(), smooth.elu, EXACT, "elu", (0.0,)),
    "elu(0.4)": Case(nn.ELU(0.4), partial(smooth.elu, 0.4), EXACT, "elu", (0.0,)),
    "selu": Case(nn.SELU(), smooth.selu, EXACT, "selu", (0.0,)),
    "celu(1.0)": Case(nn.CELU(), smooth.celu, EXACT, "celu", (0.0,)),
    "celu(1.5)": Case(nn.CELU(1.5), partial(smooth.celu, 1.5), EXACT, "celu", (0.0,)),
    "sigmoid": Case(nn.Sigmoid(), smooth.sigmoid, QUADRATURE, "sigmoid"),
    "tanh": Case(nn.Tanh(), smooth.tanh, QUADRATURE, "tanh"),
    "atan": Case(torch.atan, smooth.arctangent, QUADRATURE, "atan"),
    "asinh": Case(torch.asinh, smooth.inverse_hyperbolic_sine, QUADRATURE, "asinh"),
    "silu": Case(nn.SiLU(), smooth.silu, QUADRATURE, "silu"),
    "mish": Case(nn.Mish(), smooth.mish, QUADRATURE, "mish"),
    "softplus": Case(nn.Softplus(), smooth.softplus, QUADRATURE, "softplus"),
    "softplus(2.5)": Case(nn.Softplus(2.5), partial(smooth.softplus, 2.5), QUADRATURE, "softplus"),
    "logsigmoid": Case(nn.LogSigmoid(), smooth.logsigmoid, QUADRATURE, "logsigmoid"),
    "softsign": Case(nn.Softsign(), smooth.softsign, QUADRATURE, "softsign", (0.0,)),
    "hardswish": Case(nn.Hardswish(), smooth.hardswish, QUADRATURE, "hardswish", (-3.0, 3.0)),
    "tanhshrink": Case(nn.Tanhshrink(), smooth.tanhshrink, QUADRATURE, "tanhshrink"),
}
"""Smooth functions, and continuous ones, have no jumps; the names are those of the oracle table."""

SMOOTH = [name for name, case in CASES.items() if not case.kinks]
CONTINUOUS = [name for name, case in CASES.items() if not case.jumps]

"""Random programs of 5 to 12 operations, their Gaussian inputs and the methods they are run by."""

import re
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import covprop as cp
from covprop.covariance import Diagonal, LowRank
from tests.fuzz import nonlinear  # noqa: F401 - registers its operations
from tests.fuzz.operations import KINKED, LINEAR, OPERATIONS, PRODUCT, Operation
from tests.fuzz.writing import GRID, Program, Value, Writer

EVENTS = [(3,), (4,), (6,), (2, 3), (3, 2), (2, 4), (4, 2)]
NOISES = [2.0**-13, 2.0**-7, 2.0**-4, 2.0**-2, 2.0**-2, 1.0, 2.0]
WIDE = 32.0
"""Powers of two: the covariance of an input is the same number in float32 and float64."""
BATCH = 3

GENERAL, QUADRATIC, SHALLOW = "general", "quadratic", "shallow"
KINDS = {QUADRATIC: (LINEAR, PRODUCT), SHALLOW: (LINEAR, KINKED)}
METHODS: list[tuple[Any, float]] = [
    (cp.Exact(), 12), (cp.Series(order=4), 2), (cp.Series(order=16), 1),
    (cp.AssumedDensity(), 1.5), (cp.Linearized(), 1), (cp.Split(3), 0.5), (cp.Sketched(64), 0.5),
]  # fmt: skip
JUMPS = {"sign", "heaviside", "threshold", "hardshrink"}
"""Activations that turn an error of eps in a correlation of one into one of sqrt(eps)."""


@dataclass(frozen=True)
class Input:
    """A Gaussian: mean (*batch, *event), covariance noise^2 factor factor^T, and its structure."""

    mean: Tensor
    factor: Tensor
    noise: float
    structure: str
    batch_dims: int

    def gaussian(self, dtype: torch.dtype, noise: float | None = None) -> cp.Gaussian:
        noise = self.noise if noise is None else noise
        factor = noise * self.factor
        if self.structure == "diagonal":
            return cp.Gaussian(self.mean.to(dtype), Diagonal(factor.square().sum(-1).to(dtype)))
        if self.structure == "low rank":
            return cp.Gaussian(self.mean.to(dtype), LowRank(factor.to(dtype), None))
        return cp.Gaussian(self.mean.to(dtype), (factor @ factor.mT).to(dtype))

    def element(self, index: int, keep: bool) -> "Input":
        """One of the batch, as a batch of one or as no batch."""
        place = slice(index, index + 1) if keep else index
        return replace(
            self,
            mean=self.mean[place],
            factor=self.factor[place],
            batch_dims=self.batch_dims if keep else 0,
        )

    def text(self) -> str:
        """Python that builds it."""
        factor = f"torch.tensor({self.factor.tolist()}, dtype=dtype)"
        return "\n".join([
            f"mean = torch.tensor({self.mean.tolist()}, dtype=dtype)",
            f"factor = {self.noise} * {factor}",
            {
                "diagonal": "x = cp.Gaussian.diagonal(mean, factor.square().sum(-1).reshape("
                f"mean.shape), batch_dims={self.batch_dims})",
                "low rank": "x = cp.Gaussian(mean, cp.covariance.LowRank(factor, None))",
                "dense": "x = cp.Gaussian(mean, factor @ factor.mT)",
            }[self.structure],
        ])  # fmt: skip


def random_input(
    random: Random, event: tuple[int, ...], batched: bool, noises: list[float]
) -> Input:
    """A Gaussian whose numbers are exact in float32."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    size, batch = torch.Size(event).numel(), (BATCH,) if batched else ()
    mean = torch.randn((*batch, *event), generator=generator, dtype=torch.float64)
    structure = random.choice(["dense", "dense", "dense", "diagonal", "low rank"])
    rank = {"diagonal": size, "low rank": random.randint(1, 3)}.get(structure, size)
    if structure == "dense" and random.random() < 0.25:
        rank = random.randint(1, 2)  # correlations of one
    factor = torch.randn((*batch, size, rank), generator=generator, dtype=torch.float64)
    factor = (8 * factor / max(1.0, rank**0.5)).round() / 8
    if random.random() < 0.15:
        factor[..., random.randrange(size), :] = 0.0  # does not vary
    if random.random() < 0.1:
        factor[..., 0, :] = factor[..., -1, :]  # two that are one
    if random.random() < 0.1:
        mean.reshape(*batch, size)[..., 0] = 0.0  # at the kink of most functions
    return Input(
        (GRID * mean).round() / GRID, factor, random.choice(noises), structure, int(batched)
    )


def random_program(random: Random, family: str) -> tuple[Program, Input]:
    """A program of a family, and an input for it."""
    batched = random.random() < 0.6
    event = random.choice(EVENTS)
    writer = Writer(random, batched)
    writer.values.append(Value("x", event))
    kinds = KINDS.get(family)
    table = [one for one in OPERATIONS if kinds is None or one.kind in kinds]
    names: list[str] = []
    wanted = random.randint(5, 12)
    while len(names) < wanted:
        one = random.choices(table, [entry.weight for entry in table])[0]
        value = _pick(writer)
        if not _fits(family, one, value):
            continue
        if one.write(writer, value) is not None:
            names.append(one.name)
    result = writer.values[-1]
    if random.random() < 0.6:  # two branches meet at the end
        result = _joined(writer, result)
    program = Program(
        tuple(writer.setup), tuple(writer.lines), tuple(writer.parameters), result, event,
        batched, (*names, *sorted(writer.names)),
    )  # fmt: skip
    noises = NOISES if family == GENERAL else [*NOISES, WIDE]
    return program, random_input(random, event, batched, noises)


def _pick(writer: Writer) -> Value:
    """Often the newest value, else one that nothing uses yet, or any: chains with branches."""
    chance = writer.random.random()
    if chance < 0.55:
        return writer.values[-1]
    unused = _unused(writer)
    return writer.random.choice(unused if unused and chance < 0.8 else writer.values)


def _unused(writer: Writer) -> list[Value]:
    words = set(re.findall(r"\w+", " ".join(text.partition("=")[2] for text, _ in writer.lines)))
    return [value for value in writer.values if value.name not in words]


def _fits(family: str, one: Operation, value: Value) -> bool:
    if family == QUADRATIC and one.kind == PRODUCT:
        return value.degree == 1
    if family == SHALLOW and one.kind == KINKED:
        return not value.kinked
    return True


def _joined(writer: Writer, last: Value) -> Value:
    unused = [value for value in _unused(writer) if value != last]
    other = writer.random.choice(unused or writer.values)
    flat = [f"{value.name}.flatten(-{len(value.shape)})" for value in (last, other)]
    text = f"torch.cat([{flat[0]}, {flat[1]}], dim=-1)"
    return writer.emit(text, (last.size + other.size,), last, other)


def random_method(random: Random) -> Any:
    """Exact in most cases."""
    return random.choices([one for one, _ in METHODS], [weight for _, weight in METHODS])[0]


def accuracy(program: Program, dtype: torch.dtype) -> float:
    """What one operation promises: rounding, or the 1e-8 of quadrature."""
    own = torch.finfo(dtype).eps
    kinds = {one.name: one.kind for one in OPERATIONS}
    exact = all(kinds.get(name) in (LINEAR, PRODUCT) for name in program.operations)
    promised = own if exact else max(own, 1e-8)
    return max(promised, own**0.5) if JUMPS & set(program.operations) else promised

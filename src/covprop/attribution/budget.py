"""The uncertainty budget of a network: its result as a table, and the function that makes it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from covprop.attribution.shares import Estimate, Shares, Weights, of_all_sets, of_an_order
from covprop.errors import (
    ApproximationWarning,
    UnsupportedOperation,
    approximations_ignored,
    warn_user,
)
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation
from covprop.methods import Linearized, Method
from covprop.methods.call import Call
from covprop.methods.linearized import gains_of
from covprop.methods.progress import StageBar
from covprop.methods.root import Root
from covprop.propagate import AUTO, checked_call, propagate_without_warnings, warn_of_arguments
from covprop.text_table import Table, Tabular, in_digits, in_percent, place_words, plain

MOST_GROUPS = 32
"""Elements of an input that are taken one by one unless groups are named."""
EXACT_GROUPS = 6
"""Groups up to which all their sets are looked at."""
ORDERS = 8
"""Random orders of more groups, each with its reverse."""
STANDARD_ERRORS = 2.4
"""Within so many, 19 of 20 means of eight numbers are, by Student's distribution."""
ROUGH = 0.05
"""Estimated error of a share from which on there is a warning."""
ROWS = 100
"""Of a table."""
HEAD = ("input", "uncertainty", "sensitivity", "contribution", "first order", "total", "share")

Members = dict[str, list[Tensor]]
"""Of each group, by its name, the elements of the flattened event of each input."""


@final
@dataclass(frozen=True)
class UncertaintyBudget(Tabular):
    """The shares of the inputs in the variance of every output; print it to see a table.

    Tensors have the groups of inputs first, then the batch and the event of the output. Shares are
    NaN for an output that does not vary.

    Attributes:
        names: The names of the groups.
        output: The mean and covariance of the output.
        stddev: The standard uncertainty of an input of one element, (groups, *batch); NaN for
            several elements.
        coefficient: The sensitivity coefficient E[df/dx] of one element that varies; else NaN.
        contribution: The standard deviation of the linear part, |coefficient| stddev, of one
            element.
        first_order: Var(E[y | x_i]) / Var(y), Sobol's first-order index.
        total: E[Var(y | all but x_i)] / Var(y), Sobol's total index, without noise inside the
            model.
        share: Shapley effects; with `noise` they sum to 1.
        noise: The share of noise inside the model, such as dropout, (*batch, *event).
        error: The estimated error of the shares; NaN where it is not known.
        notes: Sentences on how coefficients and shares were computed.

    Example:
        x = cp.Gaussian.diagonal(torch.zeros(3), stddev=torch.tensor([0.1, 0.2, 0.3]))
        cp.uncertainty_budget(model, x).share.sum(0)  # 1 for every output
    """

    names: tuple[str, ...]
    output: Gaussian
    stddev: Tensor
    coefficient: Tensor
    contribution: Tensor
    first_order: Tensor
    total: Tensor
    share: Tensor
    noise: Tensor
    error: Tensor
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain numbers, lists and words, for JSON."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {
            "names": list(self.names), "mean": plain(self.output.mean.tolist()),
            "output_stddev": plain(self.output.stddev.tolist()),
            **{name: plain(value.tolist()) for name, value in tensors.items()},
            "notes": list(self.notes),
        }  # fmt: skip

    @property
    def table(self) -> Table:
        """As the GUM asks for: a row for each input, and one for the combined uncertainty."""
        return self.tabulated()

    def tabulated(self, output_names: Sequence[str] = ()) -> Table:
        """The table with names for the outputs in place of their numbers.

        Args:
            output_names: One for each element of the event of the output, or none.
        """
        several, rows = self.noise.numel() > 1, list[tuple[str, ...]]()
        batch, size = self.output.batch_shape, max(1, self.output.event_shape.numel())
        for place in range(self.noise.numel()):
            label = (place_words(place, self.noise.shape),) if several else ()
            if several and output_names:
                row = (place_words(place // size, batch),) if batch else ()
                label = (" ".join((*row, str(output_names[place % size]))),)
            rows += [(*label, *cells) for cells in self._rows(place)]
            if len(rows) > ROWS:
                break
        notes = ["first order: alone; total: with its interactions; share: Shapley effects"]
        if (error := float(self.error.nan_to_num(0).max())) > 0:
            notes.append(f"estimated error of the shares: up to {in_percent(error)}")
        if len(rows) > ROWS:
            notes.append(f"the first {ROWS} rows; --json and to_dict() have them all")
        head = ("output", *HEAD) if several else HEAD
        return Table(head, tuple(rows[:ROWS]), words=1 + several, notes=(*notes, *self.notes))

    def _rows(self, place: int) -> Iterator[tuple[str, ...]]:
        """Of one output, by its number in the flattened batch and event."""

        def number(values: Tensor) -> float:
            return float(values.flatten()[place])

        row = place // max(1, self.output.event_shape.numel())
        for i, name in enumerate(self.names):
            cells = [in_digits(float(self.stddev[i].flatten()[row]))]
            cells += [in_digits(number(each[i])) for each in (self.coefficient, self.contribution)]
            shares = (self.first_order, self.total, self.share)
            yield (name, *cells, *(in_percent(number(each[i])) for each in shares))
        noise, blanks = number(self.noise), ("-",) * 4
        if noise:
            yield ("(the model)", "-", *blanks, in_percent(noise))
        whole = number(self.share.sum(0) + self.noise)
        yield ("combined", in_digits(number(self.output.stddev)), *blanks, in_percent(whole))


@torch.no_grad()
def uncertainty_budget(
    module: nn.Module | Callable[..., Any],
    /,
    *inputs: Any,
    groups: Mapping[str, Any] | Sequence[str] | None = None,
    method: Method | str = AUTO,
    orders: int = ORDERS,
    seed: int = 0,
    progress: bool = False,
    **named_inputs: Any,
) -> UncertaintyBudget:
    """The shares of the inputs in the variance of a network's output, as a GUM table.

    The share is the Shapley effect (Owen 2014): what an input adds to Var(E[y | x_S]), averaged
    over the orders in which inputs join S. Shares are not negative and sum to 100 %, also for
    nonlinear networks and correlated inputs, because the effects of interactions and correlations
    are divided among the inputs. For a linear model of independent inputs they are (c_i u_i)^2 /
    u^2, as in the GUM. First-order and total indices are Sobol's. If inputs are correlated, the
    first-order index includes what an input says about the others, and may exceed the total.

    Each set of inputs needs one propagation of two evaluations of the model. Up to six varying
    inputs or groups use all sets; more use random orders, whose chance error is part of `error`.

    Args:
        module: As for `cp.propagate`; returns one tensor.
        inputs: As for `cp.propagate`.
        groups: By default each element of a single Gaussian, or each of several Gaussians. A list
            of names for these, or a mapping from names to elements: an index of the flattened event
            (continued from one Gaussian to the next), or one of the Gaussians. Elements in no group
            form the group "others".
        method: As for `cp.propagate`; it must compute covariances.
        orders: The number of random orders for more than six groups, each with its reverse.
        seed: The seed of the orders.
        progress: Whether to show a progress bar.
        named_inputs: As for `cp.propagate`.

    Returns:
        An `UncertaintyBudget`.

    Raises:
        ValueError: If groups do not fit, or an input has many elements and no groups are given.

    Example:
        x = cp.Gaussian.diagonal(torch.zeros(3), stddev=torch.tensor([0.1, 0.2, 0.3]))
        print(cp.uncertainty_budget(model, x, groups=["length", "width", "height"]))
    """
    if type(orders) is not int or orders < 1:
        raise ValueError(f"orders is a positive whole number, not {orders!r}")
    call, method = checked_call(module, inputs, method, named_inputs)
    method.check_covariances("an uncertainty budget needs the covariance of two evaluations")
    warn_of_arguments(call)
    method.check_skewness(call.inputs)
    members = _members(call, groups)
    with approximations_ignored():
        y = propagate_without_warnings(module, call.arguments, call.named_arguments, method)
        if not isinstance(y, Gaussian):
            raise UnsupportedOperation(
                "an uncertainty budget is of a model that returns one tensor which depends on its "
                f"inputs, and this one returns a {type(y).__name__}; wrap it in a function"
            )
        shares = Shares(call, method, list(members.values()))
        game = _game(shares.varying, orders, seed)
        alone, without = _sobol_weights(shares.varying)
        asked = (*game, alone, without)
        sets = {part: None for one in asked for each in one.values() for part in each}
        with StageBar(len(sets), progress, unit="set") as bar:
            for part in sets:
                bar.begin("")
                shares[part]

        def of(one: dict[int, Weights]) -> Estimate:
            found = [shares.combined(one.get(i, {})) for i in range(len(members))]
            return _stacked(found, y)

        found = [of(one) for one in game]
        values, errors = (torch.stack(each) for each in zip(*found, strict=True))
        error = errors.mean(0)
        if len(game) > 1:
            error = error + STANDARD_ERRORS * values.std(0) / len(game) ** 0.5
        first, total = of(alone)[0], of(without)[0]
        lost = shares.lost()
        whole = _stacked([shares.combined({frozenset(shares.varying): 1.0})], y)[0][0]
        coefficient, contribution, note = _linear_part(call, method, members, y)
    notes = [note]
    if len(game) > 1:
        notes.append(f"shares are averages of {orders} orders of the inputs and their reverses")
    error = error + lost
    worst = max(
        (float(each.nan_to_num(0).max()) for each in (error, lost) if each.numel()), default=0.0
    )
    if worst > ROUGH:
        warn_user(
            f"shares of this uncertainty budget may be off by {in_percent(worst)}; take the "
            "default method or cp.QuasiMonteCarlo(65536), more orders, or smaller noise",
            ApproximationWarning,
        )
    return UncertaintyBudget(
        names=tuple(members), output=y, stddev=_standard_uncertainty(call, members),
        coefficient=coefficient, contribution=contribution, first_order=first, total=total,
        share=values.mean(0), noise=1 - whole, error=error, notes=tuple(notes),
    )  # fmt: skip


def _game(groups: Sequence[int], orders: int, seed: int) -> list[dict[int, Weights]]:
    """Weights of the shares of sets whose average gives the Shapley values."""
    if len(groups) <= EXACT_GROUPS:
        return [of_all_sets(groups)]
    generator = torch.Generator().manual_seed(seed)
    return [of_an_order(groups, generator) for _ in range(orders)]


def _sobol_weights(groups: Sequence[int]) -> tuple[dict[int, Weights], dict[int, Weights]]:
    """Those of the first-order and the total index of each group."""
    every = frozenset(groups)
    first: dict[int, Weights] = {i: {frozenset({i}): 1.0} for i in groups}
    total: dict[int, Weights] = {i: {every: 1.0, every - {i}: -1.0} for i in groups}
    return first, total


def _stacked(found: Sequence[Estimate], y: Gaussian) -> Estimate:
    """Numbers and errors of groups, in the shape of the output; NaN where it does not vary."""
    unknown = torch.where(y.variance > 0, 0.0, math.nan).double()
    values, errors = (
        torch.stack([each.to(unknown) + unknown for each in column])
        for column in zip(*found, strict=True)
    )
    return values, errors


def _standard_uncertainty(call: Call, members: Members) -> Tensor:
    rows = []
    for indices in members.values():
        chosen = [
            x.stddev.double().reshape(*x.batch_shape, -1)[..., index]
            for x, index in zip(call.inputs, indices, strict=True)
        ]
        elements = torch.cat(chosen, -1)
        rows.append(elements[..., 0] if elements.shape[-1] == 1 else elements.mean(-1) * math.nan)
    return torch.stack(rows)


def _linear_part(
    call: Call, method: Method, members: Members, y: Gaussian
) -> tuple[Tensor, Tensor, str]:
    """Coefficients and contributions (groups, *batch, *event), and what they are.

    c = E[df/dx], of which a method knows E[df/dx] L for a root L of the covariance of x.
    """
    note = "sensitivity: the expected derivative"
    try:
        (gains,) = gains_of(call, method).values()
    except UnsupportedOperation:
        (gains,) = gains_of(call, Linearized()).values()
        note = "sensitivity: the derivative at the mean"
    rows, variances = [], []
    for x, gain in zip(call.inputs, gains, strict=True):
        root, spread = Root.of(x).structure, x.stddev.double().reshape(*x.batch_shape, 1, -1)
        inverse, slope, columns = inverse_deviation(spread.square()), gain.double(), None
        if not x.covariance.independent:
            columns = root.columns(0, root.width).double()
            # Of standardised elements, as units do not count for what is singular.
            slope = slope @ torch.linalg.pinv(inverse.mT * columns)
        elif not root.width:  # nothing varies
            slope = slope.new_zeros(*slope.shape[:-1], spread.shape[-1])
        rows.append(torch.where(spread > 0, slope * inverse, math.nan))
        variances.append(spread if columns is None else columns)
    coefficients, contributions = [], []
    for indices in members.values():
        variance, slopes = torch.zeros_like(y.mean, dtype=torch.float64), []
        for x, slope, spread, index in zip(call.inputs, rows, variances, indices, strict=True):
            slopes.append(slope[..., index])
            part = slopes[-1].nan_to_num(0)
            if x.covariance.independent:
                part = part * spread[..., index]
            else:
                part = part @ spread[..., index, :]
            variance = variance + part.square().sum(-1).reshape(y.mean.shape)
        every = torch.cat(slopes, -1)
        single = every[..., 0] if every.shape[-1] == 1 else every.mean(-1) * math.nan
        coefficients.append(single.reshape(y.mean.shape))
        contributions.append(variance.sqrt())
    return torch.stack(coefficients), torch.stack(contributions), note


def _members(call: Call, groups: Mapping[str, Any] | Sequence[str] | None) -> Members:
    """The elements of each input in every group, with those that no group names."""
    inputs, sizes = call.inputs, [x.event_shape.numel() for x in call.inputs]
    numbers = torch.arange(sum(sizes))
    own = dict(zip(map(id, inputs), numbers.split(sizes), strict=True))
    if isinstance(groups, Mapping):
        chosen = {
            str(name): own[id(index)] if id(index) in own else _elements(str(name), index, numbers)
            for name, index in groups.items()
        }
    else:
        chosen = _one_by_one(call, groups)
    every = torch.cat([*chosen.values(), numbers[:0]])
    if len(every.unique()) < len(every):
        raise ValueError("an element of the input is in two groups, or twice in one")
    left = torch.ones(len(numbers), dtype=torch.bool)
    left[every] = False
    if bool(left.any()):
        chosen |= {"others": numbers[left]}
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return {
        name: [
            (index[(index >= start) & (index < start + size)] - start).to(x.device)
            for start, size, x in zip(starts, sizes, inputs, strict=False)
        ]
        for name, index in chosen.items()
    }


def _elements(name: str, index: Any, numbers: Tensor) -> Tensor:
    """The elements of a group by an index of a vector; a range or a tuple is one of numbers."""
    try:
        chosen: Tensor = numbers[list(index) if isinstance(index, range | tuple) else index]
    except (IndexError, TypeError) as error:
        raise ValueError(
            f"group {name}: the input has {len(numbers):,} elements, of which {index!r} is no index"
        ) from error
    return chosen.reshape(-1)


def _one_by_one(call: Call, names: Sequence[str] | None) -> dict[str, Tensor]:
    """Each element of a single input, or each of several inputs, by its name."""
    sizes = [x.event_shape.numel() for x in call.inputs]
    if len(sizes) > 1:
        parts: Sequence[Tensor] = torch.arange(sum(sizes)).split(sizes)
        given = [f"input {number}" for number in range(len(sizes))]
    else:
        parts, shape = torch.arange(sizes[0]).split(1), call.inputs[0].event_shape
        given = [place_words(number, shape) for number in range(sizes[0])]
    if names is None and len(given) > MOST_GROUPS:
        raise ValueError(
            f"the input has {len(given):,} elements, and every set of them takes a propagation; "
            "name groups of them, as in groups={'left': range(8), 'right': range(8, 16)}"
        )
    given = given if names is None else [str(name) for name in names]
    if len(given) != len(parts) or len(set(given)) < len(given):
        raise ValueError(f"groups are {len(parts)} different names here, not {', '.join(given)}")
    return dict(zip(given, parts, strict=True))

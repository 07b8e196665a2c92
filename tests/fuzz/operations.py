"""What random programs are made of: each operation writes one or more statements."""

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz.writing import LARGEST, Value, Writer

LINEAR, PRODUCT, KINKED, OTHER = "linear", "product", "activation", "other"


class Operation(NamedTuple):
    """One kind of statement: what it writes, how often, and in which families of programs."""

    name: str
    write: Callable[[Writer, Value], Value | None]
    kind: str
    weight: float


OPERATIONS: list[Operation] = []


def operation(kind: str, weight: float = 1.0) -> Callable[..., Callable[..., Value | None]]:
    """Register a writer; it returns None where it does not fit the value."""

    def decorate(write: Callable[[Writer, Value], Value | None]) -> Callable[..., Value | None]:
        OPERATIONS.append(Operation(write.__name__, write, kind, weight))
        return write

    return decorate


def partner(w: Writer, x: Value, factor: bool = False) -> Value:
    """Another value of the same shape, or the same one; factor: of no higher degree."""
    fitting = [value for value in w.values if value.shape == x.shape]
    if factor:
        fitting = [value for value in fitting if value.degree <= x.degree]
    others = [value for value in fitting if value != x]
    return w.random.choice(others) if others and w.random.random() < 0.85 else x


# Linear


@operation(LINEAR, 4)
def linear(w: Writer, x: Value) -> Value:
    rows = w.random.randint(2, 5)
    bias = f", {w.constant(rows)}" if w.random.random() < 0.5 else ""
    return w.emit(
        f"F.linear({x.name}, {w.weight(rows, x.shape[-1])}{bias})", (*x.shape[:-1], rows), x
    )


@operation(LINEAR, 3)
def added(w: Writer, x: Value) -> Value:
    y = partner(w, x)
    a, b = w.random.choice([("", ""), ("", "0.5 * "), ("2 * ", ""), ("", "")])
    sign = w.random.choice("+-")
    return w.emit(f"{a}{x.name} {sign} {b}{y.name}", x.shape, x, y)


@operation(LINEAR)
def added_by_name(w: Writer, x: Value) -> Value:
    y = partner(w, x)
    text = w.random.choice(
        ["torch.add({0}, {1}, alpha=-0.5)", "{0}.sub({1})", "torch.rsub({0}, {1})"]
    )
    return w.emit(text.format(x.name, y.name), x.shape, x, y)


@operation(LINEAR, 2)
def scaled(w: Writer, x: Value) -> Value:
    c = w.constant(*x.shape)
    text = w.random.choice(
        ["{0} * {1}", "{0} + {1}", "{1} - {0}", "{0} / ({1}.abs() + 0.5)", "-{0}"]
    )
    return w.emit(text.format(x.name, c), x.shape, x)


@operation(LINEAR, 2)
def concatenated(w: Writer, x: Value) -> Value | None:
    fitting = [
        value for value in w.values
        if value.shape[:-1] == x.shape[:-1] and value.size + x.size <= LARGEST
    ]  # fmt: skip
    if not fitting:
        return None
    y = w.random.choice(fitting)
    shape = (*x.shape[:-1], x.shape[-1] + y.shape[-1])
    return w.emit(f"torch.cat([{x.name}, {y.name}], dim=-1)", shape, x, y)


@operation(LINEAR)
def stacked(w: Writer, x: Value) -> Value | None:
    y = partner(w, x)
    if len(x.shape) > 1 or 2 * x.size > LARGEST:
        return None
    first = w.random.random() < 0.5
    shape = (2, *x.shape) if first else (*x.shape, 2)
    dim = -len(x.shape) - 1 if first else -1
    return w.emit(f"torch.stack([{x.name}, {y.name}], dim={dim})", shape, x, y)


@operation(LINEAR)
def halves(w: Writer, x: Value) -> Value | None:
    if x.shape[-1] < 2 or x.shape[-1] % 2:
        return None
    half = (*x.shape[:-1], x.shape[-1] // 2)
    left, right = w.fresh("v"), w.fresh("v")
    text = w.random.choice(["chunk(2, dim=-1)", f"split({half[-1]}, dim=-1)"])
    w.line(f"{left}, {right} = {x.name}.{text}", left, right)
    one, two = Value(left, half, x.degree, x.kinked), Value(right, half, x.degree, x.kinked)
    w.values += [one, two]
    return two


@operation(LINEAR, 2)
def moved(w: Writer, x: Value) -> Value:
    last = x.shape[-1]
    order = w.random.sample(range(last), last)
    return w.emit(
        w.random.choice([
            f"{x.name}.flip(-1)",
            f"{x.name}.roll({w.random.randint(1, 3)}, dims=-1)",
            f"{x.name}[..., {order}]",
            f"torch.index_select({x.name}, -1, torch.tensor({order}))",
        ]),
        x.shape, x,
    )  # fmt: skip


@operation(LINEAR)
def selected(w: Writer, x: Value) -> Value | None:
    last = x.shape[-1]
    if last < 3:
        return None
    if len(x.shape) > 1 and w.random.random() < 0.5:
        index = w.random.randrange(x.shape[-2])
        return w.emit(f"{x.name}.select(-2, {index})", (*x.shape[:-2], last), x)
    stop = w.random.randint(2, last)
    return w.emit(f"{x.name}[..., :{stop}]", (*x.shape[:-1], stop), x)


@operation(LINEAR, 1.5)
def reshaped(w: Writer, x: Value) -> Value | None:
    if len(x.shape) == 1:
        sizes = [k for k in (2, 3) if x.size % k == 0 and x.size // k > 1]
        if not sizes:
            return None
        shape = (w.random.choice(sizes),)
        shape = (*shape, x.size // shape[0])
        return w.emit(f"{x.name}.unflatten(-1, {shape})", shape, x)
    if w.random.random() < 0.5:
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        return w.emit(f"{x.name}.transpose(-1, -2)", shape, x)
    return w.emit(f"{x.name}.flatten(-{len(x.shape)})", (x.size,), x)


@operation(LINEAR)
def repeated(w: Writer, x: Value) -> Value | None:
    if 2 * x.size > LARGEST:
        return None
    shape = (*x.shape[:-1], 2 * x.shape[-1])
    return w.emit(f"{x.name}.repeat_interleave(2, dim=-1)", shape, x)


@operation(LINEAR, 1.5)
def reduced(w: Writer, x: Value) -> Value | None:
    text = w.random.choice(["mean", "sum", "cumsum"])
    if text == "cumsum":
        return w.emit(f"{x.name}.cumsum(-1)", x.shape, x)
    if len(x.shape) > 1 and w.random.random() < 0.5:
        return w.emit(f"{x.name}.{text}(-2)", (*x.shape[:-2], x.shape[-1]), x)
    total = w.emit(f"{x.name}.{text}(-1, keepdim=True)", (*x.shape[:-1], 1), x)
    return w.emit(f"{x.name} - {total.name}", x.shape, x, total)


@operation(LINEAR)
def masked(w: Writer, x: Value) -> Value:
    y = partner(w, x)
    mask = f"torch.tensor({[w.random.random() < 0.6 for _ in range(x.shape[-1])]})"
    text = w.random.choice(["torch.where({2}, {0}, {1})", "{0}.masked_fill({2}, 0.5)"])
    return w.emit(text.format(x.name, y.name, mask), x.shape, x, y)


@operation(LINEAR)
def convolved(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.shape[-1] < 2:
        return None
    channels = w.random.randint(1, 3)
    if channels * x.shape[-1] > LARGEST:
        return None
    weight = w.constant(channels, x.shape[0], 3, scale=0.5)
    return w.emit(f"F.conv1d({x.name}, {weight}, padding=1)", (channels, x.shape[-1]), x)


@operation(LINEAR)
def averaged(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.shape[-1] < 2:
        return None
    return w.emit(f"F.avg_pool1d({x.name}, 2)", (x.shape[0], x.shape[-1] // 2), x)


@operation(LINEAR)
def batch_normed(w: Writer, x: Value) -> Value | None:
    if not w.batched or len(x.shape) > 2:
        return None
    centre, width = (w.constant(x.shape[0], learned=False) for _ in range(2))
    return w.emit(f"F.batch_norm({x.name}, {centre}, {width}.abs() + 0.5)", x.shape, x)


@operation(LINEAR, 0.7)
def changed_in_place(w: Writer, x: Value) -> Value:
    y = partner(w, x)
    value = w.emit(f"{x.name}.clone()", x.shape, x, y)
    text = w.random.choice([".add_({0})", ".mul_(0.5)", ".sub_({0}, alpha=0.5)", ".add_(1.0)"])
    w.line(f"{value.name}{text.format(y.name)}", value.name)
    return value


@operation(LINEAR, 0.7)
def dropped(w: Writer, x: Value) -> Value:
    """A statement that lets an older variable go."""
    value = w.emit(f"{x.name} * 1.5", x.shape, x)
    if x.name != "x":
        w.line(f"del {x.name}")
        w.drop(x)
    return value


# Products


def _product(*of: Value) -> int:
    return min(99, sum(value.degree for value in of))


@operation(PRODUCT, 2)
def multiplied(w: Writer, x: Value) -> Value:
    y = partner(w, x, factor=True)
    return w.emit(f"{x.name} * {y.name}", x.shape, x, y, degree=_product(x, y))


@operation(PRODUCT)
def squared(w: Writer, x: Value) -> Value:
    text = w.random.choice(["{0}.square()", "{0} ** 2", "torch.pow({0}, 2)", "{0} * {0}"])
    return w.emit(text.format(x.name), x.shape, x, degree=_product(x, x))


@operation(PRODUCT)
def matrix_product(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.shape[0] ** 2 > LARGEST:
        return None
    y = partner(w, x, factor=True)
    shape = (x.shape[0], x.shape[0])
    return w.emit(f"{x.name} @ {y.name}.mT", shape, x, y, degree=_product(x, y))


@operation(PRODUCT)
def inner_product(w: Writer, x: Value) -> Value:
    y = partner(w, x, factor=True)
    text = w.random.choice(["the sum of products", "torch.einsum('...i,...j->...i', {0}, {1})"])
    if text.startswith("torch"):
        return w.emit(text.format(x.name, y.name), x.shape, x, y, degree=_product(x, y))
    terms = w.fresh("v")  # a value of its own, as terms may cancel
    w.line(f"{terms} = {x.name} * {y.name}", terms)
    total = f"{terms}.sum(-1, keepdim=True)"
    return w.emit(total, (*x.shape[:-1], 1), x, y, degree=_product(x, y))


@operation(PRODUCT, 0.7)
def variance(w: Writer, x: Value) -> Value | None:
    if x.shape[-1] < 2:
        return None
    text = f"{x.name}.var(-1, keepdim=True)"
    return w.emit(text, (*x.shape[:-1], 1), x, degree=_product(x, x))

"""Operations of random programs that are neither linear nor products."""

from tests.fuzz.operations import KINKED, OTHER, operation, partner
from tests.fuzz.writing import Value, Writer

ACTIVATIONS = {
    "relu": "F.relu({0})", "relu method": "{0}.relu()", "leaky_relu": "F.leaky_relu({0}, 0.3)",
    "relu6": "F.relu6({0})", "hardtanh": "F.hardtanh({0})", "clamp": "{0}.clamp(-0.7, 1.2)",
    "clamp_min": "{0}.clamp_min(-0.2)", "threshold": "F.threshold({0}, 0.5, -1.0)",
    "hardsigmoid": "F.hardsigmoid({0})", "abs": "{0}.abs()", "sign": "torch.sign({0})",
    "softshrink": "F.softshrink({0})", "hardshrink": "F.hardshrink({0})",
    "gelu": "F.gelu({0})", "gelu_tanh": "F.gelu({0}, approximate='tanh')",
    "erf": "torch.erf({0})", "ndtr": "torch.special.ndtr({0})", "sin": "torch.sin({0})",
    "cos": "torch.cos({0})", "exp": "torch.exp(0.3 * {0})", "pow": "({0} / 2) ** 3",
    "elu": "F.elu({0})", "selu": "F.selu({0})", "celu": "F.celu({0}, 1.5)",
    "sigmoid": "torch.sigmoid({0})", "tanh": "torch.tanh({0})", "silu": "F.silu({0})",
    "mish": "F.mish({0})", "softplus": "F.softplus({0})", "logsigmoid": "F.logsigmoid({0})",
    "softsign": "F.softsign({0})", "hardswish": "F.hardswish({0})",
    "tanhshrink": "F.tanhshrink({0})",
    "heaviside": "torch.heaviside({0}, torch.ones((), dtype=dtype))",
    "prelu": "F.prelu({0}, torch.full((1,), 0.2, dtype=dtype))",
    "user": "cp.activation(torch.atan)({0})",
    "user with a kink": "cp.activation(lambda t: torch.relu(t) ** 2, kinks=(0.0,))({0})",
}  # fmt: skip


@operation(KINKED, 10)
def activation(w: Writer, x: Value) -> Value:
    name = w.random.choice(list(ACTIVATIONS))
    w.names.add(name)
    return w.emit(ACTIVATIONS[name].format(x.name), x.shape, x, degree=99, kinked=True)


@operation(KINKED)
def activation_in_place(w: Writer, x: Value) -> Value:
    value = w.emit(f"{x.name} + 0.25", x.shape, x, degree=99, kinked=True)
    name = w.random.choice(["relu_()", "tanh_()", "sigmoid_()", "clamp_(-0.5, 0.75)"])
    w.line(f"{value.name}.{name}", value.name)
    return value


def other(w: Writer, text: str, shape: tuple[int, ...], *of: Value) -> Value:
    """The result of an operation that is not exact."""
    return w.emit(text, shape, *of, degree=99, kinked=True)


@operation(OTHER, 2)
def maximum_of_two(w: Writer, x: Value) -> Value:
    y = partner(w, x)
    name = w.random.choice(["torch.maximum", "torch.minimum"])
    return other(w, f"{name}({x.name}, {y.name})", x.shape, x, y)


@operation(OTHER, 2)
def maximum_of_many(w: Writer, x: Value) -> Value:
    name = w.random.choice(["amax", "amin"])
    value = other(w, f"{x.name}.{name}(-1, keepdim=True)", (*x.shape[:-1], 1), x)
    if w.random.random() < 0.5:
        return other(w, f"{x.name} - {value.name}", x.shape, x, value)
    return value


@operation(OTHER)
def max_pooled(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.shape[-1] < 2:
        return None
    return other(w, f"F.max_pool1d({x.name}, 2)", (x.shape[0], x.shape[-1] // 2), x)


@operation(OTHER, 4)
def normed(w: Writer, x: Value) -> Value | None:
    last = x.shape[-1]
    if last < 3:  # two are plus and minus one after a layer norm: their variance is rounding
        return None
    norm = w.fresh("norm")  # a line of its own, as it cancels in what follows
    before, text = w.random.choice([
        ("", f"F.softmax({x.name}, dim=-1)"),
        ("", f"F.log_softmax({x.name}, dim=-1)"),
        ("", f"{x.name}.softmax(-1)"),
        ("", f"F.layer_norm({x.name}, ({last},))"),
        ("", f"F.layer_norm({x.name}, ({last},), {w.constant(last)}, {w.constant(last)})"),
        ("", f"F.rms_norm({x.name}, ({last},), eps=0.01)"),
        ("", f"F.normalize({x.name}, dim=-1)"),
        (f"torch.logsumexp({x.name}, dim=-1, keepdim=True)", f"{x.name} - {norm}"),
        (f"1 + {x.name}.square().mean(-1, keepdim=True)", f"{x.name} / {norm}"),
    ])  # fmt: skip
    if before:
        w.line(f"{norm} = {before}", norm)
    return other(w, text, x.shape, x)


@operation(OTHER)
def group_normed(w: Writer, x: Value) -> Value | None:
    if not w.batched or len(x.shape) != 2 or x.shape[0] % 2 or x.size < 4:
        return None
    return other(w, f"F.group_norm({x.name}, 2)", x.shape, x)


@operation(OTHER)
def summarised(w: Writer, x: Value) -> Value | None:
    if x.shape[-1] < 3:
        return None
    text = w.random.choice(["{0}.std(-1, keepdim=True)", "{0}.norm(dim=-1, keepdim=True)"])
    return other(w, text.format(x.name), (*x.shape[:-1], 1), x)


@operation(OTHER, 1.5)
def positive(w: Writer, x: Value) -> Value:
    """Logarithms, roots and quotients of what stays away from zero."""
    inner = w.random.choice(
        ["(F.softplus({0}) + 2)", "(torch.sigmoid({0}) + 1)", "(torch.tanh({0}) + 3)"]
    )
    y = partner(w, x)
    outer = w.random.choice(["torch.log({0})", "{0}.sqrt()", "{0}.rsqrt()", "1 / {0}", "{1} / {0}"])
    return other(w, outer.format(inner.format(x.name), y.name), x.shape, x, y)


@operation(OTHER, 2)
def gated(w: Writer, x: Value) -> Value | None:
    if w.random.random() < 0.5 and x.shape[-1] % 2 == 0:
        return other(w, f"F.glu({x.name}, dim=-1)", (*x.shape[:-1], x.shape[-1] // 2), x)
    y = partner(w, x)
    gate = w.random.choice(["torch.sigmoid({0})", "torch.tanh({0})", "F.relu({0})"])
    return other(w, f"{x.name} * {gate.format(y.name)}", x.shape, x, y)


@operation(OTHER, 2)
def attention(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2:
        return None
    y, z = partner(w, x), partner(w, x)
    if w.random.random() < 0.4 and x.shape[-1] in (2, 4):
        layer = w.layer(f"nn.MultiheadAttention({x.shape[-1]}, 2, batch_first=True)")
        text = f"{layer}({x.name}, {y.name}, {z.name}, need_weights=False)[0]"
        return other(w, text, x.shape, x, y, z)
    text = f"F.scaled_dot_product_attention({x.name}, {y.name}, {z.name})"
    return other(w, text, x.shape, x, y, z)


@operation(OTHER, 1.2)
def cell(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 1:
        return None
    size = w.random.randint(2, 3)
    kind = w.random.choice(["LSTMCell", "GRUCell", "RNNCell"])
    layer = w.layer(f"nn.{kind}({x.shape[-1]}, {size})")
    if kind == "LSTMCell":
        value, state = w.fresh("v"), w.fresh("v")
        w.line(f"{value}, {state} = {layer}({x.name})", value, state)
        w.values += [Value(value, (size,), 99, True), Value(state, (size,), 99, True)]
        return w.values[-2]
    value = other(w, f"{layer}({x.name})", (size,), x)
    return other(w, f"{layer}({x.name}, {value.name})", (size,), x, value)


@operation(OTHER, 0.6)
def recurrent(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.shape[0] > 4:
        return None
    size = w.random.randint(2, 3)
    kind = w.random.choice(["LSTM", "GRU", "RNN"])
    layer = w.layer(f"nn.{kind}({x.shape[-1]}, {size}, batch_first=True)")
    return other(w, f"{layer}({x.name})[0]", (x.shape[0], size), x)


@operation(OTHER, 0.7)
def encoder(w: Writer, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.shape[-1] != 4 or not w.batched:
        return None
    first = w.random.choice([True, False])
    size = x.shape[-1]
    layer = w.layer(
        f"nn.TransformerEncoderLayer({size}, 2, {size}, batch_first=True, norm_first={first})"
    )
    return other(w, f"{layer}({x.name})", x.shape, x)


@operation(OTHER, 0.7)
def converted(w: Writer, x: Value) -> Value:
    """In the other precision and back."""
    text = w.random.choice([
        "torch.tanh({0}.double()).type_as({0})", "(2 * {0}.double()).type_as({0})",
        "F.relu({0}.to(torch.float64)).to(dtype)",
    ])  # fmt: skip
    return other(w, text.format(x.name), x.shape, x)

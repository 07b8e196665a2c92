"""Attention and transformer layers: torch at no noise, its Jacobian at little, sampling at some."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.gaussians import numbers
from tests.layers import propagate
from tests.oracles import assert_close, assert_gradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning",
)
Function = Callable[[Any], Any]
BATCH, LENGTH, WIDTH, HEADS = 2, 3, 4, 2
SAMPLES = 20_000
"""The standard error of a standard deviation is 0.5 %."""


def given(
    noise: float, batch: int = BATCH, shape: tuple[int, ...] = (LENGTH, WIDTH)
) -> cp.Gaussian:
    """Elements that depend on each other, so that a transposed covariance would be noticed."""
    size = math.prod(shape)
    factor = noise * (torch.eye(size).double() + numbers(size, size, seed=1) / 2) / 2
    covariance = (factor @ factor.mT).expand(batch, size, size)
    return cp.Gaussian(numbers(batch, *shape, seed=2), covariance)


def make(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A module in evaluation mode, with biases that are not zero."""
    torch.manual_seed(0)
    module = kind(*args, **options).double().eval().requires_grad_(requires_grad=False)
    for parameter in module.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return module


def multi_head(**options: Any) -> nn.Module:
    return make(nn.MultiheadAttention, WIDTH, HEADS, **{"batch_first": True} | options)


def to_itself(module: nn.Module, **call: Any) -> Function:
    """Self-attention, what it gives and its weights side by side."""

    def forward(x: Any) -> Any:
        n = x.shape[0]
        options = {key: value(n) if callable(value) else value for key, value in call.items()}
        x = x if module.batch_first else x.transpose(0, 1)
        output, weights = module(x, x, x, **options)
        output = output if module.batch_first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output, weights], -1)

    return forward


def sequences(function: Function) -> Function:
    """A function of (length, batch, width) as one of (batch, length, width)."""
    return lambda x: function(x.transpose(0, 1)).transpose(0, 1)


PLAIN, SECOND = multi_head(), multi_head(batch_first=False)
BIASED, NOTHING = multi_head(add_bias_kv=True), multi_head(add_zero_attn=True)
BOTH = multi_head(add_bias_kv=True, add_zero_attn=True, batch_first=False)
UNBIASED = multi_head(bias=False)
NARROW = multi_head(kdim=3, vdim=2)
MEMORY = numbers(5, WIDTH, seed=3)
SCORES = numbers(LENGTH, LENGTH, seed=4)
FUTURE = torch.ones(LENGTH, LENGTH).triu(1).bool()
AHEAD = torch.zeros(LENGTH, LENGTH).double().masked_fill(FUTURE, -torch.inf)
PADDED = torch.tensor([[False, False, True], [False, True, False]])


def padded(n: int) -> Tensor:
    """Which keys of each of n sequences are padding: two kinds in turn."""
    return PADDED[torch.arange(n) % 2]


def of_each_head(n: int) -> Tensor:
    """Scores to add, (n * heads, length, length): others for every head and for two sequences."""
    each = numbers(2, HEADS, LENGTH, LENGTH, seed=5)[torch.arange(n) % 2]
    return each.flatten(0, 1)


MULTI_HEAD: dict[str, Function] = {
    "batch first": to_itself(PLAIN),
    "batch second": to_itself(SECOND),
    "one head": to_itself(make(nn.MultiheadAttention, WIDTH, 1, batch_first=True)),
    "without bias": to_itself(UNBIASED),
    "without weights": to_itself(PLAIN, need_weights=False),
    "weights of each head": lambda x: PLAIN(x, x, x, average_attn_weights=False)[1].flatten(1),
    "weights, batch second": lambda x: SECOND(*[x.transpose(0, 1)] * 3)[1],
    "float mask": to_itself(PLAIN, attn_mask=SCORES),
    "bool mask": to_itself(SECOND, attn_mask=FUTURE),
    "mask of each head": to_itself(PLAIN, attn_mask=of_each_head),
    "bool mask of each head": to_itself(
        SECOND, attn_mask=lambda n: (of_each_head(n) > 0.5) & ~torch.eye(LENGTH).bool()
    ),
    "padding": to_itself(PLAIN, key_padding_mask=padded),
    "padding, batch second": to_itself(SECOND, key_padding_mask=padded, need_weights=False),
    "float padding": to_itself(
        PLAIN, key_padding_mask=lambda n: torch.zeros(n, LENGTH).double() - padded(n) * 2
    ),
    "padding and mask": to_itself(PLAIN, key_padding_mask=padded, attn_mask=SCORES),
    "causal": to_itself(PLAIN, attn_mask=AHEAD, is_causal=True),
    "causal without weights": to_itself(PLAIN, attn_mask=AHEAD, is_causal=True, need_weights=False),
    "bias for keys": to_itself(BIASED),
    "zero attention": to_itself(NOTHING, attn_mask=SCORES),
    "both, padding": to_itself(BOTH, key_padding_mask=padded, attn_mask=FUTURE),
    "constant keys": lambda x: PLAIN(x, *[MEMORY.expand(len(x), -1, -1)] * 2)[0],
    "constant keys, batch second": sequences(
        lambda x: SECOND(x, *[MEMORY[:, None].expand(-1, x.shape[1], -1)] * 2)[0]
    ),
    "constant queries": lambda x: PLAIN(MEMORY.expand(len(x), -1, -1), x, x)[0],
    "constant queries, batch second": sequences(
        lambda x: SECOND(MEMORY[:, None].expand(-1, x.shape[1], -1), x, x)[0]
    ),
    "other keys": lambda x: PLAIN(x[:, :1], torch.relu(x), x.flip(-1))[0],
    "widths of their own": lambda x: NARROW(x, x[..., :3], x[..., 2:])[0],
}
HEADED = (HEADS, LENGTH, WIDTH)


def dot_product(**options: Any) -> Function:
    return lambda x: F.scaled_dot_product_attention(x, x.flip(-1), x * x, **options)


DOT_PRODUCT: dict[str, Function] = {  # of (batch, heads, length, width)
    "plain": dot_product(),
    "scaled": dot_product(scale=0.3),
    "float mask": dot_product(attn_mask=SCORES),
    "bool mask": dot_product(attn_mask=~FUTURE),
    "mask for each head": dot_product(attn_mask=numbers(HEADS, 1, LENGTH)),
    "causal": dot_product(is_causal=True),
    "mask of the input": lambda x: F.scaled_dot_product_attention(
        x, x.flip(-1), x, attn_mask=x @ numbers(WIDTH, LENGTH, seed=5) + AHEAD
    ),
    "causal, fewer queries": lambda x: F.scaled_dot_product_attention(
        x[..., :2, :], x, x, is_causal=True
    ),
    "grouped": lambda x: F.scaled_dot_product_attention(
        torch.cat([x, x.flip(-1)], 1), x, x.flip(1), enable_gqa=True
    ),
    "grouped, one for all": lambda x: F.scaled_dot_product_attention(
        x, x[:, :1], x[:, 1:], enable_gqa=True
    ),
    "grouped constants": lambda x: F.scaled_dot_product_attention(
        x, *[MEMORY.expand(len(x), 1, -1, -1)] * 2, enable_gqa=True
    ),
    "constant query": lambda x: F.scaled_dot_product_attention(torch.ones_like(x), x, x),
    "constant keys": lambda x: F.scaled_dot_product_attention(
        x, *[MEMORY.expand(len(x), HEADS, -1, -1)] * 2
    ),
    "values alone": lambda x: F.scaled_dot_product_attention(*[torch.ones_like(x)] * 2, x),
    "without heads": lambda x: F.scaled_dot_product_attention(*[x.flatten(1, 2)] * 3),
    "written out": lambda x: torch.softmax(x @ x.mT / 2, -1) @ x,
    "by einsum": lambda x: torch.einsum(
        "bhqk,bhkd->bqhd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", x, x), -1), x
    ),
}  # fmt: skip
LAYER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 5}
ENCODER = {
    f"encoder, {'first' if first else 'second'}, norm {'first' if norm else 'last'}, {name}": make(
        nn.TransformerEncoderLayer, **LAYER, batch_first=first, norm_first=norm, activation=name
    )
    for first, norm, name in [(True, True, "relu"), (True, False, "gelu"), (False, True, "gelu"),
                              (False, False, "relu")]
}  # fmt: skip
STACK = make(
    nn.TransformerEncoder, nn.TransformerEncoderLayer(**LAYER, batch_first=True), 2,
    norm=nn.LayerNorm(WIDTH),
)  # fmt: skip
DECODER = make(nn.TransformerDecoderLayer, **LAYER, batch_first=True, activation="gelu")
DECODER_SECOND = make(nn.TransformerDecoderLayer, **LAYER, norm_first=True)
WHOLE = make(nn.Transformer, WIDTH, HEADS, 1, 1, 5, batch_first=True, activation="gelu")


TRANSFORMERS: dict[str, Function] = {
    **{
        name: layer if layer.self_attn.batch_first else sequences(layer)
        for name, layer in ENCODER.items()
    },
    "encoder, masks": lambda x: ENCODER["encoder, first, norm first, relu"](
        x, src_mask=FUTURE, src_key_padding_mask=PADDED[:1].expand(len(x), -1)
    ),
    "encoder, causal": lambda x: ENCODER["encoder, first, norm last, gelu"](
        x, src_mask=AHEAD, is_causal=True
    ),
    "encoder of two layers": STACK,
    "encoder of two layers, causal": lambda x: STACK(x, mask=AHEAD, is_causal=True),
    "encoder of two layers, padding": lambda x: STACK(x, src_key_padding_mask=padded(len(x))),
    "decoder, constant memory": lambda x: DECODER(x, MEMORY.expand(len(x), -1, -1)),
    "decoder, batch second": sequences(
        lambda x: DECODER_SECOND(x, MEMORY[:, None].expand(-1, x.shape[1], -1), tgt_mask=AHEAD)
    ),
    "decoder, memory of the input": lambda x: DECODER(x[:, :2], x),
    "decoder, constant target": lambda x: DECODER(MEMORY.expand(len(x), -1, -1), x),
    "transformer": lambda x: WHOLE(x, x[:, :2]),
}  # fmt: skip
CASES: dict[str, tuple[Function, tuple[int, ...]]] = {
    **{f"MHA: {name}": (function, (LENGTH, WIDTH)) for name, function in MULTI_HEAD.items()},
    **{f"SDPA: {name}": (function, HEADED) for name, function in DOT_PRODUCT.items()},
    **{f"layer: {name}": (function, (LENGTH, WIDTH)) for name, function in TRANSFORMERS.items()},
}


CERTAIN = [
    "MHA: batch second",
    "MHA: bool mask of each head",
    "MHA: both, padding",
    "MHA: constant queries",
    "SDPA: grouped",
    "SDPA: causal, fewer queries",
    "layer: encoder of two layers, padding",
    "layer: transformer",
]
"""Every other mean is seen with little noise."""


@torch.no_grad()
@pytest.mark.parametrize("name", CERTAIN)
def test_without_noise_the_mean_is_the_modules_output(name: str) -> None:
    function, shape = CASES[name]
    x = given(0.0, shape=shape)
    y = propagate(function, x)
    assert_close(y.mean, function(x.mean), atol=1e-13)
    assert not y.covariance_matrix.any()


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_little_noise_goes_through_the_jacobian(name: str) -> None:
    """To first order every covariance is J S J^T, with the Jacobian of torch itself."""
    function, shape = CASES[name]
    x = given(1e-4, shape=shape)
    y = propagate(function, x)
    assert_close(y.mean, function(x.mean), atol=1e-6)  # of second order: 1e-8 times curvatures
    with torch.enable_grad():
        jacobian = torch.autograd.functional.jacobian(function, x.mean)
    n = math.prod(shape)
    for i in range(BATCH):
        slope = jacobian[i].reshape(-1, BATCH, n)[:, i]
        expected = slope @ x.covariance_matrix[i] @ slope.mT
        scale = float(expected.abs().max())
        assert_close(y.covariance_matrix[i], expected, atol=1e-6 * scale)


SAMPLED = {
    "MHA: batch first": 0.02,
    "MHA: mask of each head": 0.02,
    "MHA: both, padding": 0.02,
    "MHA: constant queries": 0.02,
    "MHA: widths of their own": 0.02,
    "SDPA: bool mask": 0.02,
    "SDPA: grouped": 0.02,
    "SDPA: mask of the input": 0.02,
    "layer: encoder, first, norm first, relu": 0.005,
    "layer: encoder, second, norm first, gelu": 0.02,
    "layer: encoder, second, norm last, relu": 0.005,
    "layer: encoder of two layers": 0.005,
    "layer: decoder, memory of the input": 0.005,
}
"""The noise; less where few features leave a norm little to divide by."""


@torch.no_grad()
@pytest.mark.parametrize("name", SAMPLED)
def test_small_noise_agrees_with_sampling(name: str) -> None:
    function, shape = CASES[name]
    x = given(SAMPLED[name], shape=shape)
    y = propagate(function, x)
    sample = x.sample(SAMPLES // 2, torch.Generator().manual_seed(6))
    there, back = (
        function(draws.flatten(0, 1)).unflatten(0, (-1, BATCH))
        for draws in (sample, 2 * x.mean - sample)
    )
    stddev = torch.cat([there, back]).std(0)
    certain = stddev < 1e-10  # a weight of 1, or of 0 where a mask says so
    assert not bool((y.stddev > 1e-10)[certain].any())
    error = (y.stddev / stddev - 1)[~certain].abs().max()
    assert float(error) < 5 / (2 * SAMPLES) ** 0.5 + 2e-3
    # Draws in opposite directions leave of the mean what is of second order alone.
    bent = (there + back) / 2 - function(x.mean)
    apart = (y.mean - function(x.mean) - bent.mean(0)).abs()
    allowed = 5 * bent.std(0) / len(bent) ** 0.5 + 0.01 * bent.mean(0).abs().max()
    assert bool((apart <= allowed).all())


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "MHA: batch first",
        "MHA: batch second",
        "MHA: one head",
        "MHA: bias for keys",
        "MHA: constant keys, batch second",
        "SDPA: grouped",
        "SDPA: without heads",
        "layer: encoder, second, norm last, relu",
        "layer: decoder, batch second",
    ],
)
def test_a_batch_is_each_of_its_elements(name: str) -> None:
    function, shape = CASES[name]
    x = given(0.5, shape=shape)
    y = propagate(function, x)
    for i in range(BATCH):
        one = propagate(function, x[i : i + 1])
        assert_close(y.mean[i], one.mean[0], atol=1e-12)
        assert_close(y.covariance_matrix[i], one.covariance_matrix[0], atol=1e-12)


UNBATCHED: dict[str, Function] = {  # of (length, width), and so are they of a batch
    "batch first": lambda x: PLAIN(x, x, x)[0],
    "batch second": lambda x: SECOND(x, x, x)[0],
    "padding": lambda x: PLAIN(x, x, x, key_padding_mask=PADDED[0])[0],
    "masks of each head": lambda x: PLAIN(x, x, x, attn_mask=numbers(HEADS, LENGTH, LENGTH))[0],
    "weights": lambda x: PLAIN(x, x, x, attn_mask=SCORES)[1],
    "weights of each head": lambda x: SECOND(x, x, x, average_attn_weights=False)[1],
    "both": lambda x: BOTH(x, x, x)[0],
    "constant keys": lambda x: PLAIN(x, MEMORY, MEMORY)[0],
    "dot product": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "encoder": ENCODER["encoder, second, norm first, gelu"],
    "encoder of two layers": STACK,
    "decoder": lambda x: DECODER(x, MEMORY),
}


@torch.no_grad()
@pytest.mark.parametrize("name", UNBATCHED)
def test_a_sequence_without_a_batch(name: str) -> None:
    function = UNBATCHED[name]
    certain, x = given(0.0)[0], given(1e-4)[0]
    assert_close(propagate(function, certain).mean, function(certain.mean), atol=1e-13)
    y = propagate(function, x)
    with torch.enable_grad():
        slope = torch.autograd.functional.jacobian(function, x.mean).reshape(y.mean.numel(), -1)
    expected = slope @ x.covariance_matrix @ slope.mT
    assert_close(y.covariance_matrix, expected, atol=1e-6 * float(expected.abs().max()))


@torch.no_grad()
def test_batch_first_and_second_are_the_same_numbers() -> None:
    x = given(0.5)
    first, second = (propagate(MULTI_HEAD[name], x) for name in ("batch first", "batch second"))
    assert_close(first.mean, second.mean, atol=1e-13)
    assert_close(first.covariance_matrix, second.covariance_matrix, atol=1e-13)


@torch.no_grad()
def test_a_batch_left_second_comes_back_first() -> None:
    """What a module that puts the batch second returns: a Gaussian has its batch in front."""
    x = given(0.3)
    inside = propagate(lambda x: SECOND(*[x.transpose(0, 1)] * 3), x)
    outside = propagate(lambda x: PLAIN(x, x, x), x)
    for got, want in zip(inside, outside, strict=True):
        assert_close(got.mean, want.mean, atol=1e-13)
        assert_close(got.covariance_matrix, want.covariance_matrix, atol=1e-13)


# Masks.


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 1e5])
def test_what_a_mask_leaves_out_has_no_weight_whatever_the_scores(size: float) -> None:
    def forward(x: Any) -> Any:
        return F.scaled_dot_product_attention(x, -size * x, x, attn_mask=~FUTURE)

    x = given(0.0)
    try:
        y = propagate(forward, x)
    except cp.CovpropError:
        assert size > 1
        return
    assert_close(y.mean, forward(x.mean), atol=1e-12)


@torch.no_grad()
def test_a_row_without_any_key_is_as_torch_has_it() -> None:
    """Nothing takes part in it: zero, or an error, never what the mask hides."""
    alone = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    x = given(0.0)
    expected = F.scaled_dot_product_attention(x.mean, x.mean, x.mean, attn_mask=alone)
    try:
        y = propagate(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=alone), x)
    except cp.CovpropError:
        return
    assert_close(y.mean, expected, atol=1e-12)


@torch.no_grad()
def test_masked_keys_leave_no_trace() -> None:
    """Neither the mean nor the noise of a padded step reaches the others."""
    x = given(0.3)
    matrix = x.covariance_matrix.clone().reshape(BATCH, LENGTH, WIDTH, LENGTH, WIDTH)
    matrix[:, -1], matrix[:, :, :, -1] = 0, 0
    mean = x.mean.clone()
    mean[:, -1] += 3
    other = cp.Gaussian(mean, matrix.reshape(x.covariance_matrix.shape))

    def forward(x: Any) -> Any:
        mask = PADDED[:1].expand(len(x), -1)
        return PLAIN(x, x, x, key_padding_mask=mask, need_weights=False)[0][:, :2]

    y, expected = propagate(forward, x), propagate(forward, other)
    assert_close(y.mean, expected.mean, atol=1e-12)
    assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-12)


# Dropout.

SOME = 0.3
DROPPING = multi_head(dropout=SOME)
DROPPED: dict[str, tuple[nn.Module, Function]] = {
    "attention": (DROPPING, to_itself(DROPPING)),
    "attention without weights": (DROPPING, to_itself(DROPPING, need_weights=False)),
    "batch second": (
        second := multi_head(dropout=SOME, batch_first=False),
        to_itself(second, key_padding_mask=padded),
    ),
    "dot product": (
        nn.Identity(),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=SOME),
    ),
}


def assert_sampled(y: cp.Gaussian, outputs: Tensor, bias: float) -> None:
    """Within five standard errors, the fourth moment being what it is, and some bias."""
    stddev = outputs.std(0)
    fourth = ((outputs - outputs.mean(0)) / stddev).pow(4).mean(0)
    error = ((fourth - 1) / (4 * len(outputs))).sqrt()
    assert bool(((y.stddev / stddev - 1).abs() < 5 * error + bias).all())
    assert bool(((y.mean - outputs.mean(0)).abs() / stddev < 5 / len(outputs) ** 0.5 + bias).all())


@torch.no_grad()
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_of_weights_agrees_with_sampling(name: str) -> None:
    module, function = DROPPED[name]
    x = given(0.02)
    before = {key: layer.training for key, layer in module.named_modules()}
    with cp.dropout_active(module):
        y = propagate(function, x)
        torch.manual_seed(7)  # dropout takes no generator
        outputs = function(x.sample(SAMPLES, torch.Generator().manual_seed(6)).flatten(0, 1))
    assert {key: layer.training for key, layer in module.named_modules()} == before
    kept = function(x.mean) if name != "dot product" else None
    present = torch.ones_like(y.mean, dtype=torch.bool) if kept is None else kept.abs() > 1e-6
    outputs = outputs.reshape(SAMPLES, BATCH, *outputs.shape[1:])
    present &= outputs.std(0) > 1e-10
    flat = cp.Gaussian.diagonal(y.mean[present], variance=y.variance[present])
    assert_sampled(flat, outputs[:, present], bias=3e-3)


@torch.no_grad()
def test_dropout_of_a_transformer_layer_agrees_with_sampling() -> None:
    """Weights, features and hidden units are dropped, of branches small beside the skip."""
    layer = make(nn.TransformerEncoderLayer, **LAYER, dropout=0.2, batch_first=True)
    for last in (layer.self_attn.out_proj, layer.linear2):
        last.weight *= 0.05
        last.bias *= 0.05
    x = given(0.001, batch=1)
    without = propagate(layer, x)
    with cp.dropout_active(layer):
        y = propagate(layer, x)
    torch.manual_seed(7)
    outputs = layer.train()(x.sample(SAMPLES, torch.Generator().manual_seed(6))[:, 0])
    layer.eval()
    assert_sampled(y[0], outputs, bias=0.02)  # of the skip, 5 % is dropped
    assert bool((y.stddev > 2 * without.stddev).all())
    assert_close(propagate(layer, x).covariance_matrix, without.covariance_matrix, rtol=0.0)


@torch.no_grad()
@pytest.mark.parametrize("grown", [False, True])
def test_dropout_active_makes_torch_itself_drop(grown: bool) -> None:
    """A transformer layer in evaluation mode has a fast path that drops nothing."""
    options = LAYER | {"dropout": 0.5, "batch_first": True}
    model = make(nn.TransformerEncoderLayer, **options)
    if grown:
        model = make(nn.TransformerEncoder, nn.TransformerEncoderLayer(**options), 2)
    x = given(0.0, batch=1).mean
    assert torch.equal(model(x), model(x))
    with cp.dropout_active(model):
        assert not torch.equal(model(x), model(x))
    assert torch.equal(model(x), model(x))


# Gradients, and what is refused.


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_through_an_attention_block_are_right(batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(2, 1, batch_first=True).double()
    norm = nn.LayerNorm(2).double()
    matrix = given(0.3, shape=(2, 2)).covariance_matrix[: len(batch) + 1]
    matrix = matrix if batch else matrix[0]

    def moments(mean: Tensor) -> tuple[Tensor, Tensor]:
        def forward(x: Any) -> Any:
            return norm(x + attention(x, x, x, need_weights=False)[0])

        y = propagate(forward, cp.Gaussian(mean, matrix.expand(*batch, 4, 4)))
        return y.mean, y.covariance_matrix

    mean = numbers(*batch, 2, 2, seed=2) * 2
    assert_gradients(moments, (mean,), atol=1e-6)


def test_gradients_reach_the_weights_of_an_attention_layer() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=WIDTH, vdim=2).double()
    y = propagate(lambda x: module(x, x, x[..., :2])[0], given(0.1))
    (y.covariance_matrix.sum() + y.mean.sum()).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert name == "in_proj_bias" or bool(parameter.grad.any()), name


@torch.no_grad()
def test_single_precision_is_near_double() -> None:
    x = given(0.1)
    small = ENCODER["encoder, first, norm first, relu"]
    expected = propagate(small, x)
    y = propagate(make_float(small), x.to(torch.float32))
    assert_close(y.mean, expected.mean.float(), atol=1e-5)
    assert_close(y.covariance_matrix, expected.covariance_matrix.float(), atol=1e-6)


def make_float(module: nn.Module) -> nn.Module:
    copy = nn.TransformerEncoderLayer(**LAYER, batch_first=True, norm_first=True).eval()
    copy.load_state_dict(module.state_dict())
    return copy.requires_grad_(requires_grad=False)

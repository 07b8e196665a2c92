"""Exported programs, traced graphs and their operators give what the module gives."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.rules import aten as translations
from tests.architectures import ARCHITECTURES
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close
from tests.registry import WITHOUT_RULE

aten = torch.ops.aten
NOISE, BATCH = 0.01, 2
AS_PRODUCTS = ("U-Net", "MobileNet")
"""Decomposed, x sigmoid(x) is a product of two Gaussians, of which the exact rule knows more."""
MERGED = (("ViT", "exported"), ("ViT", "decomposed"), ("LSTM", "decomposed"))
"""Programs that put the batch and heads, or steps, into one dimension."""
LIKE_ANOTHER = ("ResNet, bottleneck", "DenseNet", "VGG", "Inception")
"""Whose operators are those of the others."""
SMALL = ("ResNet, basic", "ResNet, bottleneck", "DenseNet", "U-Net", "MobileNet", "Inception")
"""Networks that take images of any size."""


def shape_of(name: str) -> tuple[int, ...]:
    return (1, 4, 4) if name in SMALL else ARCHITECTURES[name].shape


@cache
def model(name: str) -> nn.Module:
    return ARCHITECTURES[name].build()


@cache
def exported(name: str) -> torch.export.ExportedProgram:
    example = torch.randn(BATCH + 1, *shape_of(name), dtype=torch.float64)
    dynamic = ({0: torch.export.Dim("batch")},)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes self.lstm._flat_weights")
        return torch.export.export(model(name), (example,), dynamic_shapes=dynamic)


@cache
def decomposed(name: str, whole: Any = None) -> torch.export.ExportedProgram:
    """In terms of fewer operators, but for one that stays whole."""
    table = torch.export.default_decompositions()
    if whole is not None:
        table.pop(whole)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        return exported(name).run_decompositions(table)


PROGRAMS: dict[str, Callable[[str], nn.Module]] = {
    "exported": lambda name: exported(name).module(),
    "decomposed": lambda name: decomposed(name).module(),
    "traced": lambda name: torch.fx.symbolic_trace(model(name)),
}


def given(name: str, batch_dims: int = 1) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, *shape_of(name))
    mean = torch.randn(shape, dtype=torch.float64, generator=generator)
    return cp.Gaussian.isotropic(mean, stddev=NOISE, batch_dims=batch_dims)


@cache
def expected(name: str, batch_dims: int = 1) -> cp.Gaussian:
    with torch.no_grad():
        return propagate(model(name), given(name, batch_dims))


def assert_same(y: cp.Gaussian, want: cp.Gaussian, rtol: float) -> None:
    """Relative to the standard deviations."""
    scale = want.covariance_matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    unit = (scale[..., :, None] * scale[..., None, :]).clamp(min=1e-300)
    one = torch.ones_like(want.covariance_matrix)
    assert_close(y.covariance_matrix / unit + one, want.covariance_matrix / unit + one, atol=rtol)
    assert_close(y.mean / want.stddev, want.mean / want.stddev, rtol=rtol, atol=rtol)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ARCHITECTURES
        for kind in PROGRAMS
        if (name, kind) not in MERGED and (kind == "traced" or name not in LIKE_ANOTHER)
    ],
)
def test_a_program_gives_what_the_module_gives(name: str, kind: str) -> None:
    """With another batch than it was exported with."""
    program, x = PROGRAMS[kind](name), given(name)
    assert_close(program(x.mean), model(name)(x.mean), atol=1e-12)
    loose = kind == "decomposed" and name in AS_PRODUCTS
    assert_same(propagate(program, x), expected(name), rtol=2e-3 if loose else 1e-9)


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), MERGED)
def test_a_program_that_merges_the_batch_is_right_or_refused(name: str, kind: str) -> None:
    try:
        y = propagate(PROGRAMS[kind](name), given(name))
    except cp.UnsupportedOperation:
        return
    assert_same(y, expected(name), rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(
    "program",
    [
        lambda: ("ViT", exported("ViT")),
        lambda: ("ViT", decomposed("ViT", aten.scaled_dot_product_attention.default)),
        lambda: ("LSTM", decomposed("LSTM")),
    ],
    ids=["ViT, exported", "ViT, decomposed", "LSTM, decomposed"],
)
def test_a_program_that_merges_the_batch_works_without_one(
    program: Callable[[], tuple[str, torch.export.ExportedProgram]],
) -> None:
    """Several inputs of the program, but none a Gaussian of its own: one event of all."""
    name, made = program()
    y = propagate(made.module(), given(name, batch_dims=0))
    # In another order of operations, products and activations meet each other differently.
    assert_same(y, expected(name, batch_dims=0), rtol=1e-6 if name == "LSTM" else 1e-9)


@torch.no_grad()
def test_a_decomposed_attention_asks_for_values() -> None:
    """torch decomposes it with comparisons: leave scaled_dot_product_attention whole instead."""
    with pytest.raises(cp.UnsupportedOperation, match="asks for the value of a Gaussian"):
        propagate(decomposed("ViT").module(), given("ViT", batch_dims=0))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated MLP", "ResNet, basic", "LSTM"])
def test_a_program_may_come_from_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        torch.export.save(exported(name), path)
        program = torch.export.load(path).module()
    assert_same(propagate(program, given(name)), expected(name), rtol=1e-9)


@torch.no_grad()
def test_shapes_that_the_program_asks_for_are_numbers() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.size(0), x.shape[1] * x.shape[2]) * x.size(0) / x.numel()

    dynamic = ({0: torch.export.Dim("batch"), 2: torch.export.Dim("width")},)
    example = torch.randn(2, 3, 4, dtype=torch.float64)
    program = torch.export.export(Net(), (example,), dynamic_shapes=dynamic).module()
    x = gaussian(3, 5, batch=(4,))
    y, want = propagate(program, x), propagate(Net(), x)
    assert_close(y.mean, want.mean, atol=1e-15)
    assert_close(y.covariance_matrix, want.covariance_matrix, atol=1e-15)


def test_several_inputs_and_outputs_keep_their_nest() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> dict[str, Any]:
            return {"sum": x + w, "pair": (torch.relu(x), [w * x])}

    example = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    program = torch.export.export(Net(), example).module()
    x, w = gaussian(3), gaussian(3, seed=1)
    y, want = propagate(program, x, w), propagate(Net(), x, w)
    assert_close(y["sum"].covariance_matrix, want["sum"].covariance_matrix, rtol=0.0)
    assert_close(y["pair"][0].mean, want["pair"][0].mean, rtol=0.0)
    assert_close(y["pair"][1][0].covariance_matrix, want["pair"][1][0].covariance_matrix, rtol=0.0)


# Each operator beside the torch function that it is.

Case = tuple[Callable[[Any], Any], Callable[[Any], Any], tuple[int, ...]]
CHANNELS = weight(4), weight(4, seed=2), weight(4, seed=3), weight(4, seed=4).abs() + 1
"""Weight, bias, running mean and running variance of four channels."""
MASK = weight(3, 3)
INDEX = torch.tensor([2, 0, 0])


def _flash(x: Any) -> Any:
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    return operator(x, x, x * 2, 0.0, False, attn_mask=MASK, scale=0.3)[0]


def _upsample(operator: Any, *align: bool) -> Callable[[Any], Any]:
    return lambda x: torch.cat(
        [operator(x, [4] * (x.dim() - 2), *align, None).flatten(1),
         operator(x, None, *align, [2.0] * (x.dim() - 2)).flatten(1)], 1
    )  # fmt: skip


def _interpolated(mode: str, align: bool | None = None) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        sized = F.interpolate(x, [4] * (x.dim() - 2), None, mode, align)
        scaled = F.interpolate(x, None, 2.0, mode, align)
        return torch.cat([sized.flatten(1), scaled.flatten(1)], 1)

    return call


OPERATORS: dict[Any, Case] = {  # the operator, the function, and the shape of one event
    aten.sym_size.int: (lambda x: x * aten.sym_size.int(x, 1), lambda x: x * 3, (3,)),
    aten.sym_numel.default: (lambda x: x * aten.sym_numel.default(x), lambda x: x * 6, (3,)),
    aten.alias.default: (lambda x: aten.alias.default(x) - x, lambda x: x - x, (3,)),
    aten._to_copy.default: (
        lambda x: aten._to_copy.default(aten._to_copy.default(x), dtype=torch.float32),
        lambda x: x.to(torch.float32),
        (3,),
    ),
    aten._unsafe_view.default: (
        lambda x: aten._unsafe_view.default(x, [2, 6]), lambda x: x.view(2, 6), (2, 3),
    ),
    aten.slice.Tensor: (
        lambda x: aten.slice.Tensor(aten.slice.Tensor(x, 1, 1, 9223372036854775807), -1, 0, 3, 2),
        lambda x: x[:, 1:, 0:3:2],
        (3, 4),
    ),
    aten.index.Tensor: (
        lambda x: aten.index.Tensor(x, [None, INDEX, INDEX.flip(0)]),
        lambda x: x[:, INDEX, INDEX.flip(0)],
        (3, 4),
    ),
    aten.constant_pad_nd.default: (
        lambda x: aten.constant_pad_nd.default(
            aten.constant_pad_nd.default(x, [1, 0]), [1, 2], 3.0
        ),
        lambda x: F.pad(F.pad(x, (1, 0)), (1, 2), value=3.0),
        (3,),
    ),
    aten.im2col.default: (
        lambda x: aten.im2col.default(x, [2, 1], [1, 2], [0, 1], [1, 2]),
        lambda x: F.unfold(x, (2, 1), (1, 2), (0, 1), (1, 2)),
        (2, 3, 3),
    ),
    aten.col2im.default: (
        lambda x: aten.col2im.default(x, [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
        lambda x: F.fold(x, (3, 3), (2, 2)),
        (4, 4),
    ),
    aten.elu.default: (
        lambda x: aten.elu.default(x, 1.5, 2.0) + aten.elu.default(x),
        lambda x: 2 * F.elu(x, 1.5) + F.elu(x),
        (3,),
    ),
    aten.log_sigmoid.default: (aten.log_sigmoid.default, F.logsigmoid, (3,)),
    aten._softmax.default: (
        lambda x: aten._softmax.default(x, 1, False), lambda x: torch.softmax(x, 1), (3, 2),
    ),
    aten._log_softmax.default: (
        lambda x: aten._log_softmax.default(x, -1, False), lambda x: F.log_softmax(x, -1), (3, 2),
    ),
    aten._adaptive_avg_pool2d.default: (
        lambda x: aten._adaptive_avg_pool2d.default(x, [2, 1]),
        lambda x: F.adaptive_avg_pool2d(x, (2, 1)),
        (2, 4, 3),
    ),
    aten._adaptive_avg_pool3d.default: (
        lambda x: aten._adaptive_avg_pool3d.default(x, [2, 1, 1]),
        lambda x: F.adaptive_avg_pool3d(x, (2, 1, 1)),
        (1, 4, 3, 2),
    ),
    aten.linalg_vector_norm.default: (
        lambda x: aten.linalg_vector_norm.default(x, 2, [1], True),
        lambda x: torch.linalg.vector_norm(x, 2, [1], True),
        (2, 3),
    ),
    aten.instance_norm.default: (
        lambda x: torch.cat([
            aten.instance_norm.default(x, *CHANNELS[:2], None, None, True, 0.1, 1e-3, True),
            aten.instance_norm.default(x, *CHANNELS, False, 0.1, 1e-3, True)], 1),
        lambda x: torch.cat([
            F.instance_norm(x, None, None, *CHANNELS[:2], eps=1e-3),
            F.instance_norm(x, *CHANNELS[2:], *CHANNELS[:2], False, eps=1e-3)], 1),
        (4, 3),
    ),
    aten.upsample_nearest1d.vec: (
        _upsample(aten.upsample_nearest1d.vec), _interpolated("nearest"), (2, 3),
    ),
    aten.upsample_nearest2d.vec: (
        _upsample(aten.upsample_nearest2d.vec), _interpolated("nearest"), (1, 2, 3),
    ),
    aten.upsample_nearest3d.vec: (
        _upsample(aten.upsample_nearest3d.vec), _interpolated("nearest"), (1, 2, 3, 1),
    ),
    aten.upsample_linear1d.vec: (
        _upsample(aten.upsample_linear1d.vec, True), _interpolated("linear", True), (2, 3),
    ),
    aten.upsample_bilinear2d.vec: (
        _upsample(aten.upsample_bilinear2d.vec, False), _interpolated("bilinear", False), (1, 2, 3),
    ),
    aten.upsample_bicubic2d.vec: (
        _upsample(aten.upsample_bicubic2d.vec, True), _interpolated("bicubic", True), (1, 2, 3),
    ),
    aten.upsample_trilinear3d.vec: (
        _upsample(aten.upsample_trilinear3d.vec, False), _interpolated("trilinear", False),
        (1, 2, 1, 2),
    ),
    aten.native_layer_norm.default: (
        lambda x: aten.native_layer_norm.default(x, [4], *CHANNELS[:2], 1e-3)[0],
        lambda x: F.layer_norm(x, (4,), *CHANNELS[:2], 1e-3),
        (2, 4),
    ),
    aten.native_group_norm.default: (
        lambda x: aten.native_group_norm.default(x, *CHANNELS[:2], 2, 4, 3, 2, 1e-3)[0],
        lambda x: F.group_norm(x, 2, *CHANNELS[:2], 1e-3),
        (4, 3),
    ),
    aten._native_batch_norm_legit_no_training.default: (
        lambda x: aten._native_batch_norm_legit_no_training.default(x, *CHANNELS, 0.1, 1e-3)[0],
        lambda x: F.batch_norm(x, *CHANNELS[2:], *CHANNELS[:2], eps=1e-3),
        (4, 3),
    ),
    aten.native_dropout.default: (
        lambda x: torch.cat([aten.native_dropout.default(x, 0.3, train)[0]
                             for train in (True, False)], 1),
        lambda x: torch.cat([F.dropout(x, 0.3), x], 1),
        (3,),
    ),
    aten.max_pool2d_with_indices.default: (
        lambda x: aten.max_pool2d_with_indices.default(x, [2, 1], [1, 1], [1, 0])[0],
        lambda x: F.max_pool2d(x, (2, 1), 1, (1, 0)),
        (1, 3, 2),
    ),
    aten.max_pool3d_with_indices.default: (
        lambda x: aten.max_pool3d_with_indices.default(x, [2, 1, 1])[0],
        lambda x: F.max_pool3d(x, (2, 1, 1)),
        (1, 4, 1, 2),
    ),
    aten.adaptive_max_pool1d.default: (
        lambda x: aten.adaptive_max_pool1d.default(x, [2])[0],
        lambda x: F.adaptive_max_pool1d(x, 2),
        (1, 4),
    ),
    aten.adaptive_max_pool2d.default: (
        lambda x: aten.adaptive_max_pool2d.default(x, [2, 1])[0],
        lambda x: F.adaptive_max_pool2d(x, (2, 1)),
        (1, 4, 2),
    ),
    aten.adaptive_max_pool3d.default: (
        lambda x: aten.adaptive_max_pool3d.default(x, [2, 1, 1])[0],
        lambda x: F.adaptive_max_pool3d(x, (2, 1, 1)),
        (1, 4, 2, 1),
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        _flash,
        lambda x: F.scaled_dot_product_attention(x, x, x * 2, MASK, scale=0.3),
        (2, 3, 2),
    ),
    # Operators that are a torch function of the same name.
    aten.addmm.default: (
        lambda x: aten.addmm.default(CHANNELS[0], x, weight(3, 4)),
        lambda x: F.linear(x, weight(3, 4).mT, CHANNELS[0]),
        (3,),
    ),
    aten.split_with_sizes.default: (
        lambda x: torch.cat(aten.split_with_sizes.default(x, [1, 2], 1)[::-1], 1),
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
        (3,),
    ),
    aten.convolution.default: (
        lambda x: aten.convolution.default(
            x, weight(4, 2, 2), CHANNELS[0], [2], [1], [1], False, [0], 1
        ),
        lambda x: F.conv1d(x, weight(4, 2, 2), CHANNELS[0], 2, 1),
        (2, 3),
    ),
    aten.gelu.default: (aten.gelu.default, F.gelu, (3,)),
    aten.hardtanh.default: (
        lambda x: aten.hardtanh.default(x, 0.0, 6.0), F.relu6, (3,),
    ),
    aten.leaky_relu.default: (
        lambda x: aten.leaky_relu.default(x, 0.2), lambda x: F.leaky_relu(x, 0.2), (3,),
    ),
    aten.relu_.default: (
        lambda x: aten.relu_.default(aten.clone.default(x)), torch.relu, (3,),
    ),
    aten.special_erf.default: (aten.special_erf.default, torch.erf, (3,)),
    aten.mean.dim: (lambda x: aten.mean.dim(x, [-1], True), lambda x: x.mean(-1, True), (2, 3)),
    aten.sum.dim_IntList: (
        lambda x: aten.sum.dim_IntList(x, [1]), lambda x: x.sum(1), (2, 3),
    ),
    aten.amax.default: (lambda x: aten.amax.default(x, [1]), lambda x: x.amax(1), (3,)),
    aten.cat.default: (
        lambda x: aten.cat.default([x, aten.relu.default(x)], 1),
        lambda x: torch.cat([x, torch.relu(x)], 1),
        (3,),
    ),
    aten.sub.Tensor: (
        lambda x: aten.sub.Tensor(x, aten.relu.default(x), alpha=2),
        lambda x: torch.sub(x, torch.relu(x), alpha=2),
        (3,),
    ),
    aten.rsub.Scalar: (lambda x: aten.rsub.Scalar(x, 2.0), lambda x: 2 - x, (3,)),
    aten.pow.Tensor_Scalar: (lambda x: aten.pow.Tensor_Scalar(x, 3), lambda x: x**3, (3,)),
    aten.div.Scalar: (lambda x: aten.div.Scalar(x, 4.0), lambda x: x / 4, (3,)),
    aten.select.int: (lambda x: aten.select.int(x, 1, -1), lambda x: x[:, -1], (3, 2)),
    aten.permute.default: (
        lambda x: aten.permute.default(x, [0, 2, 1]), lambda x: x.permute(0, 2, 1), (3, 2),
    ),
    aten.bmm.default: (
        lambda x: aten.bmm.default(x, aten.permute.default(x, [0, 2, 1])),
        lambda x: torch.bmm(x, x.mT),
        (2, 3),
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_an_operator_is_its_torch_function(operator: Any) -> None:
    call, function, shape = OPERATORS[operator]
    x = gaussian(*shape, batch=(2,))
    plain, wanted = call(x.mean.clone()), function(x.mean)
    if operator is not aten.native_dropout.default:
        assert_close(plain, wanted, atol=1e-6 if plain.dtype == torch.float32 else 1e-13)
    y, want = propagate(call, x), propagate(function, x)
    assert y.mean.shape == plain.shape
    assert_close(y.mean, want.mean, atol=1e-13)
    assert_close(y.covariance_matrix, want.covariance_matrix, atol=1e-12)


def test_every_translated_operator_has_a_case() -> None:
    assert {*translations._SAME, *translations._FIRST} <= {*OPERATORS}


# What has no rule.


class Unknown(nn.Module):
    """An operation that no rule knows, in a program."""

    def forward(self, x: Tensor) -> Tensor:
        return WITHOUT_RULE(torch.relu(x), -1)


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_an_unknown_operator_is_named_in_one_sentence(decompose: bool) -> None:
    program = torch.export.export(Unknown(), (torch.ones(3, dtype=torch.float64),))
    program = program.run_decompositions() if decompose else program
    with pytest.raises(cp.UnsupportedOperation) as raised:
        propagate(program.module(), gaussian(3))
    message = str(raised.value)
    assert f"no rule for torch.ops.aten.{WITHOUT_RULE.__name__}.default;" in message
    assert "\n" not in message
    assert ". " not in message


def test_an_option_that_no_rule_knows_is_refused() -> None:
    with pytest.raises(cp.UnsupportedOperation, match="input_scale"):
        propagate(lambda x: aten.elu.default(x, 1.0, 1.0, 2.0), gaussian(3))


def test_indices_of_a_maximum_are_none() -> None:
    """A program that uses them fails loudly."""
    values, indices = propagate(
        lambda x: aten.max_pool2d_with_indices.default(x, [2, 2]), gaussian(1, 2, 2, batch=(1,))
    )
    assert values.mean.shape == (1, 1, 1, 1)
    assert indices is None


def test_an_operator_without_a_gaussian_is_torchs_own() -> None:
    assert torch.equal(aten._softmax.default(MASK, 1, False), torch.softmax(MASK, 1))

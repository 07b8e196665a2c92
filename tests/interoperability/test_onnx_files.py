"""ONNX files through onnx2pytorch, sampled by ONNX's own evaluator.

`tests/test_onnx.py` compares converted models with the same networks in torch; here nothing of
torch is in the reference, and the operators are others.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close
from tests.torchvision_names import without_torchvision

with without_torchvision():
    from onnx2pytorch import ConvertModel

SAMPLES = 20_000
DOUBLE, FLOAT = TensorProto.DOUBLE, TensorProto.FLOAT
Step = tuple[str, str, str, dict[str, Any]]
"""Operator, names of its inputs, names of its outputs, attributes."""
Case = tuple[tuple[int, ...], list[Step], dict[str, np.ndarray]]
"""Shape of the input without its batch, steps from x to y, constants."""


def numbers(*shape: int) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape), dtype=float)).reshape(shape) / 2


def whole(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def unary(operator: str, **attributes: Any) -> Case:
    return (4,), [(operator, "x", "y", attributes)], {}


def reduction(operator: str) -> Case:
    return (2, 4), [(operator, "x axes", "y", {"keepdims": 0})], {"axes": whole(2)}


def recurrent(operator: str, gates: int, results: str, **attributes: Any) -> Case:
    """The last state of four units after five steps; ONNX has the sequence first."""
    hidden = 4
    weights = {"w": numbers(1, gates * hidden, 3), "r": numbers(1, gates * hidden, hidden),
               "b": numbers(1, 2 * gates * hidden), "first": whole(0)}  # fmt: skip
    steps = [
        ("Transpose", "x", "t", {"perm": [1, 0, 2]}),
        (operator, "t w r b", results, {"hidden_size": hidden, **attributes}),
        ("Squeeze", "last first", "y", {}),
    ]
    return (5, 3), steps, weights


EXACT: dict[str, Case] = {
    **{name: unary(name) for name in ("Atan", "HardSwish", "Mish", "Erf", "Exp", "Abs", "Neg",
                                      "Sin", "Cos", "Softsign", "Identity", "Dropout")},
    "Celu": unary("Celu", alpha=1.0),
    "Selu": unary("Selu"),
    "Shrink": unary("Shrink", lambd=0.5, bias=0.25),
    "PRelu": ((4,), [("PRelu", "x slope", "y", {})], {"slope": numbers(4)}),
    "Sub": ((4,), [("Sub", "x c", "y", {})], {"c": numbers(4)}),
    "Mul": ((4,), [("Mul", "x c", "y", {})], {"c": numbers(4)}),
    "Pow": ((4,), [("Pow", "x two", "y", {})], {"two": np.array(2.0)}),
    "MatMul": ((4,), [("MatMul", "x c", "y", {})], {"c": numbers(4, 3)}),
    "Einsum": ((4,), [("Einsum", "x c", "y", {"equation": "bi,ij->bj"})], {"c": numbers(4, 3)}),
    "ConvTranspose": ((2, 3, 3), [("ConvTranspose", "x c d", "y", {"strides": [2, 2]})],
                      {"c": numbers(2, 3, 2, 2), "d": numbers(3)}),
    "Conv, one dimension": ((2, 6), [("Conv", "x c d", "y", {"kernel_shape": [3]})],
                            {"c": numbers(3, 2, 3), "d": numbers(3)}),
    "Conv, groups": ((2, 4, 4), [("Conv", "x c", "y", {"kernel_shape": [3, 3], "group": 2})],
                     {"c": numbers(2, 1, 3, 3)}),
    "ReduceSum": reduction("ReduceSum"),
    "Slice": ((2, 4), [("Slice", "x from to axis", "y", {})],
              {"from": whole(1), "to": whole(3), "axis": whole(2)}),
    "Gather": ((4,), [("Gather", "x places", "y", {"axis": 1})], {"places": whole(2, 0)}),
    "Expand": ((1, 4), [("Expand", "x shape", "y", {})], {"shape": whole(1, 3, 4)}),
    "Tile": ((2, 4), [("Tile", "x times", "y", {})], {"times": whole(1, 1, 2)}),
    "Mean": ((4,), [("Relu", "x", "r", {}), ("Mean", "x r", "y", {})], {}),
    "Resize": ((2, 3, 3), [("Resize", "x  scale", "y", {"mode": "nearest"})],
               {"scale": np.array([1, 1, 2, 2], dtype=np.float32)}),
    "DepthToSpace": ((4, 2, 2), [("DepthToSpace", "x", "y", {"blocksize": 2})], {}),
    "Split": ((4,), [("Split", "x", "a b", {"axis": 1, "num_outputs": 2}),
                     ("Mul", "a b", "y", {})], {}),
    "MatMul of two": ((3, 4), [("Transpose", "x", "t", {"perm": [0, 2, 1]}),
                               ("MatMul", "x t", "y", {})], {}),
}  # fmt: skip
APPROXIMATE: dict[str, Case] = {
    **{name: unary(name) for name in ("LogSoftmax", "Sqrt", "Log", "Reciprocal")},
    **{name: reduction(name) for name in ("ReduceMax", "ReduceMin", "ReduceL2", "ReduceLogSumExp")},
    "LpNormalization": unary("LpNormalization", axis=1),
    "GlobalMaxPool": ((2, 3, 3), [("GlobalMaxPool", "x", "y", {})], {}),
    "LayerNormalization": ((4,), [("LayerNormalization", "x c d", "y", {"axis": -1})],
                           {"c": numbers(4), "d": numbers(4)}),
    "InstanceNormalization": ((2, 3, 3), [("InstanceNormalization", "x c d", "y", {})],
                              {"c": numbers(2), "d": numbers(2)}),
    "LSTM": recurrent("LSTM", 4, "all last cell"),
    "GRU": recurrent("GRU", 3, "all last", linear_before_reset=1),
    "RNN": recurrent("RNN", 1, "all last"),
}  # fmt: skip
"""By the delta method, by maxima one after another, or by products as if jointly Gaussian."""


def proto(case: Case, kind: int = DOUBLE) -> onnx.ModelProto:
    shape, steps, weights = case
    values = {name: np.asarray(value) for name, value in weights.items()}
    if kind == FLOAT:
        values = {k: v.astype(np.float32) if v.dtype == float else v for k, v in values.items()}
    graph = helper.make_graph(
        [helper.make_node(name, i.split(" "), o.split(), **more) for name, i, o, more in steps],
        "case",
        [helper.make_tensor_value_info("x", kind, ("batch", *shape))],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def given(shape: tuple[int, ...], variance: float = 0.01) -> cp.Gaussian:
    """Means of two and more apart, away from zero: at small noise every operator is smooth."""
    size = int(np.prod(shape))
    mean = 1.5 + torch.linspace(0, 2, size, dtype=torch.float64)[torch.randperm(size)]
    root = torch.randn(size, size, dtype=torch.float64)
    return cp.Gaussian(mean.reshape(1, *shape), variance * root @ root.mT / size)


def sampled(model: onnx.ModelProto, x: cp.Gaussian) -> Tensor:
    """Outputs of ONNX's evaluator for samples of the input, (samples, elements)."""
    slow = any(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)
    drawn = x.sample(SAMPLES // 8 if slow else SAMPLES, torch.Generator().manual_seed(1))[:, 0]
    (found,) = ReferenceEvaluator(model).run(None, {"x": drawn.numpy()})
    return torch.as_tensor(np.asarray(found)).double().flatten(1)


def assert_moments(y: cp.Gaussian, drawn: Tensor, slack: float) -> None:
    """Mean and deviation within 5 standard errors, and `slack` deviations for approximations."""
    stddev, mean = y.stddev.reshape(-1).double(), y.mean.reshape(-1).double()
    count = len(drawn)
    assert drawn.shape == (count, len(mean))
    error = drawn.std(0) / count**0.5
    assert float(((drawn.mean(0) - mean).abs() - slack * drawn.std(0) - 5 * error).max()) <= 1e-7
    spread = (drawn - drawn.mean(0)).square()
    relative = spread.std(0) / count**0.5 / spread.mean(0)  # of the variance
    ratio = (stddev.square() / spread.mean(0) - 1).abs()
    assert float((ratio - 2 * slack - 5 * relative).max()) < 0
    assert float(relative.max()) < 0.04  # 0.015 but for convolutions


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # its Gather and Slice
@pytest.mark.parametrize("name", EXACT)
def test_an_operator_has_the_moments_of_onnx(name: str) -> None:
    torch.manual_seed(0)
    model, x = proto(EXACT[name]), given(EXACT[name][0])
    with torch.no_grad():
        assert_moments(propagate(ConvertModel(model), x), sampled(model, x), slack=0.0)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_an_approximate_operator_is_within_two_percent_at_small_noise(name: str) -> None:
    torch.manual_seed(0)
    model, x = proto(APPROXIMATE[name]), given(APPROXIMATE[name][0], variance=1e-4)
    with torch.no_grad():
        assert_moments(propagate(ConvertModel(model), x), sampled(model, x), slack=0.02)


@pytest.mark.parametrize(
    "case",
    [unary("Hardmax"), unary("ThresholdedRelu")],
    ids=lambda case: case[1][0][0],
)
def test_an_operator_without_a_rule_is_named(case: Case) -> None:
    """Some because they jump, some because the converter writes them as comparisons."""
    (operator, *_) = case[1][0]
    with torch.no_grad(), pytest.raises(cp.UnsupportedOperation, match=f"in module {operator}_y"):
        propagate(ConvertModel(proto(case)), given(case[0]))


NETWORK: Case = (
    (1, 6, 6),
    [
        ("Conv", "x c d", "a", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ("Relu", "a", "b", {}),
        ("Conv", "b e", "f", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ("Add", "f a", "g", {}),
        ("Relu", "g", "h", {}),
        ("AveragePool", "h", "i", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Flatten", "i", "j", {}),
        ("Gemm", "j k l", "y", {}),
    ],
    {"c": numbers(4, 1, 3, 3), "d": numbers(4), "e": numbers(4, 4, 3, 3), "k": numbers(36, 5),
     "l": numbers(5)},
)  # fmt: skip


def test_a_file_in_single_precision_goes_through(tmp_path: Path) -> None:
    """A residual network, whose hidden units are not Gaussian: at this noise they nearly are."""
    torch.manual_seed(0)
    images = torch.randn(3, 1, 6, 6)
    x = cp.Gaussian.isotropic(images, stddev=0.03, batch_dims=1)
    found = []
    for beside in (False, True):  # the weights, in a file of their own
        path = tmp_path / str(beside) / "model.onnx"
        path.parent.mkdir()
        onnx.save(proto(NETWORK, FLOAT), path, save_as_external_data=beside, size_threshold=0)
        with torch.no_grad():
            found.append(propagate(ConvertModel(onnx.load(path)), x))
    y, again = found
    assert (y.batch_shape, y.event_shape, y.dtype) == ((3,), (5,), torch.float32)
    assert_close(again.covariance_matrix, y.covariance_matrix, rtol=0.0)
    model = onnx.load(path)
    assert_moments(
        y[1], sampled(model, cp.Gaussian.isotropic(images[1:2], stddev=0.03)), slack=0.005
    )

"""Models in ONNX, converted by onnx2pytorch: covprop sees the same network as in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import covprop as cp
from tests.layers import propagate
from tests.torchvision_names import without_torchvision

with without_torchvision():
    from onnx2pytorch import ConvertModel

BATCH = 3
DENSE = nn.Linear(4, 4, dtype=torch.float64)
SECOND = nn.Linear(4, 4, dtype=torch.float64)
IMAGE = nn.Sequential(
    nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(3, 2),
).double()  # fmt: skip
for number, parameter in enumerate(
    (*DENSE.parameters(), *SECOND.parameters(), *IMAGE.parameters())
):
    values = torch.cos(torch.arange(parameter.numel(), dtype=torch.float64) + number)
    parameter.data = values.reshape(parameter.shape) / 2
IMAGE[1].running_mean, IMAGE[1].running_var = torch.ones(3).double() / 4, torch.ones(3).double() * 2

Step = tuple[str, str, str, dict[str, Any]]
"""Operator, names of its inputs, names of its outputs, attributes."""


def step(operator: str, inputs: str, outputs: str, **attributes: Any) -> Step:
    return operator, inputs, outputs, attributes


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    plain: Callable[[Any], Any]
    weights: dict[str, Any] = field(default_factory=dict)
    opset: int = 20


def unary(operator: str, plain: Callable[[Any], Any], **attributes: Any) -> Case:
    return Case(operator, (4,), (step(operator, "x", "y", **attributes),), plain)


def layer(module: nn.Module, name: str) -> dict[str, Tensor]:
    return {f"{name}_{key}": value for key, value in module.state_dict().items()}


FIRST, LAST = layer(DENSE, "a"), layer(SECOND, "b")
GEMM_A = step("Gemm", "x a_weight a_bias", "a", transB=1)
MASK = torch.tensor([True, False, True, True])
CASES = [
    Case("mlp", (4,),
         (GEMM_A, step("Relu", "a", "r"), step("Gemm", "r b_weight b_bias", "y", transB=1)),
         lambda x: SECOND(torch.relu(DENSE(x))), FIRST | LAST),
    Case("residual", (4,),
         (GEMM_A, step("Relu", "a", "r"), step("Gemm", "r b_weight b_bias", "b", transB=1),
          step("Add", "b x", "s"), step("Relu", "s", "y")),
         lambda x: torch.relu(SECOND(torch.relu(DENSE(x))) + x), FIRST | LAST),
    Case("cnn", (2, 4, 4),
         (step("Conv", "x c_weight c_bias", "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
          step("BatchNormalization", "c n_weight n_bias n_running_mean n_running_var", "n"),
          step("Relu", "n", "r"),
          step("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
          step("GlobalAveragePool", "p", "g"), step("Flatten", "g", "f"),
          step("Gemm", "f l_weight l_bias", "y", transB=1)),
         IMAGE.eval(), layer(IMAGE[0], "c") | layer(IMAGE[1], "n") | layer(IMAGE[6], "l")),
    Case("concat", (4,), (GEMM_A, step("Relu", "a", "r"), step("Concat", "r x", "y", axis=1)),
         lambda x: torch.cat((torch.relu(DENSE(x)), x), -1), FIRST),
    Case("sum", (4,), (GEMM_A, step("Relu", "a", "r"), step("Sum", "r x", "y")),
         lambda x: torch.relu(DENSE(x)) + x, FIRST),
    Case("max", (4,), (GEMM_A, step("Max", "a x", "y")),
         lambda x: torch.maximum(DENSE(x), x), FIRST),
    Case("div", (4,), (step("Div", "x by", "y"),), lambda x: x / 3.0,
         {"by": torch.tensor(3.0).double()}),
    Case("where", (4,), (step("Where", "mask x zero", "y"),), lambda x: x * MASK,
         {"mask": MASK, "zero": torch.tensor(0.0).double()}),
    Case("clip", (4,), (step("Clip", "x low high", "y"),), lambda x: x.clamp(-0.5, 0.75),
         {"low": torch.tensor(-0.5).double(), "high": torch.tensor(0.75).double()}),
    Case("matmul", (4,), (step("MatMul", "x w", "m"), step("Add", "m a_bias", "y")),
         DENSE, {"w": FIRST["a_weight"].T.contiguous(), "a_bias": FIRST["a_bias"]}),
    Case("shapes", (2, 3),
         (step("Transpose", "x", "t", perm=[0, 2, 1]), step("Unsqueeze", "t one", "u"),
          step("Squeeze", "u one", "s"), step("Reshape", "s flat", "y")),
         lambda x: x.mT.flatten(-2), {"one": torch.tensor([1]), "flat": torch.tensor([0, -1])}),
    Case("pad", (2, 3, 3), (step("Pad", "x pads value", "y"),),
         lambda x: F.pad(x, (1, 2, 1, 0), value=0.5),
         {"pads": torch.tensor([0, 0, 1, 1, 0, 0, 0, 2]), "value": torch.tensor(0.5).double()}),
    Case("average pool", (2, 4, 4),
         (step("AveragePool", "x", "y", kernel_shape=[2, 2], strides=[2, 2]),),
         lambda x: F.avg_pool2d(x, 2)),
    Case("mean", (3, 4), (step("ReduceMean", "x axes", "y", keepdims=0),),
         lambda x: x.mean(-1), {"axes": torch.tensor([2])}),
    unary("Sigmoid", torch.sigmoid),
    unary("Tanh", torch.tanh),
    unary("LeakyRelu", lambda x: F.leaky_relu(x, 0.125), alpha=0.125),
    unary("Elu", F.elu),
    unary("HardSigmoid", lambda x: torch.clamp(x * 0.25 + 0.5, 0, 1), alpha=0.25),
    unary("Softplus", F.softplus),
    unary("Gelu", F.gelu),
    unary("Softmax", lambda x: torch.softmax(x, -1)),
]  # fmt: skip


def proto(case: Case) -> onnx.ModelProto:
    """The case as a model with one input x and one output y, in double precision."""
    weights = {name: np.asarray(value) for name, value in case.weights.items()}
    output = case.plain(torch.zeros(BATCH, *case.shape, dtype=torch.float64))
    graph = helper.make_graph(
        [helper.make_node(op, i.split(), o.split(), **more) for op, i, o, more in case.steps],
        "case",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ("batch", *case.shape))],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, ("batch", *output.shape[1:]))],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", case.opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def given(case: Case, batch: int) -> tuple[Tensor, Tensor]:
    """A mean and a full covariance for each of a batch."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(case.shape).numel()
    mean = torch.randn(batch, *case.shape, generator=generator, dtype=torch.float64)
    root = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    return mean, 0.04 * root @ root.mT / size


def check_equal(actual: cp.Gaussian, expected: cp.Gaussian) -> None:
    torch.testing.assert_close(actual.mean, expected.mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        actual.covariance_matrix, expected.covariance_matrix, rtol=0, atol=1e-10
    )


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_the_model_is_the_plain_network(case: Case) -> None:
    model, (mean, _) = proto(case), given(case, BATCH)
    (reference,) = ReferenceEvaluator(model).run(None, {"x": mean.numpy()})
    with torch.no_grad():
        converted, plain = ConvertModel(model)(mean), case.plain(mean)
    np.testing.assert_allclose(converted, reference, rtol=0, atol=1e-6)  # its erf is in float32
    torch.testing.assert_close(converted, plain, rtol=0, atol=1e-10)


@every_case
def test_a_batch_goes_through_a_converted_model(case: Case) -> None:
    x = cp.Gaussian(*given(case, BATCH))
    with torch.no_grad():
        check_equal(propagate(ConvertModel(proto(case)), x), propagate(case.plain, x))


@every_case
def test_one_gaussian_goes_through_with_a_leading_one(case: Case) -> None:
    """Axes in ONNX count from the batch, so the mean has it even where the covariance does not."""
    mean, covariance = given(case, 1)
    x = cp.Gaussian(mean, covariance[0])
    with torch.no_grad():
        check_equal(propagate(ConvertModel(proto(case)), x), propagate(case.plain, x))

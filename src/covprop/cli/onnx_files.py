"""Models in ONNX files, through onnx2pytorch."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covprop.cli.files import check_affordable, existing
from covprop.cli.gaussians import Expected
from covprop.cli.refusals import Refusal
from covprop.cli.torchvision_names import without_torchvision

LARGEST = 2**31 - 1
"""Bytes: protobuf has no larger messages."""
OWN, ALIAS = "", "ai.onnx"
"""The domain of ONNX's own operators, twice; elsewhere the same name may mean anything."""
CONTROL = ("If", "Loop", "Scan", "SequenceMap")
DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""Numbers of types in ONNX."""


def load(path: Path) -> tuple[nn.Module, Expected]:
    """The converted network, and what it takes."""
    onnx, converter = _libraries()
    size = existing(path)
    if size > LARGEST:
        raise Refusal(f"{path} has {size:,} bytes, and an ONNX file at most {LARGEST:,}")
    check_affordable(path, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = onnx.load_model_from_string(path.read_bytes())
        _check(path, onnx, proto)
        module = converter.ConvertModel(proto)
    return module, _expected(path, proto.graph)


def _libraries() -> tuple[Any, Any]:
    try:
        onnx = importlib.import_module("onnx")
        with without_torchvision(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return onnx, importlib.import_module("onnx2pytorch")
    except ImportError as error:
        raise Refusal(
            "ONNX models need onnx and onnx2pytorch; install them with pip install onnx and then "
            "pip install --no-deps onnx2pytorch, which asks for torchvision but does without here"
        ) from error


def _check(path: Path, onnx: Any, proto: Any) -> None:
    """Refuse what is no model, what is elsewhere, what is unknown, and what decides as it runs."""
    if not proto.graph.node:
        raise Refusal(f"{path} is no ONNX model: it has no operators")
    for function in proto.functions:
        raise Refusal(
            f"{path} defines a function of its own, '{function.domain}::{function.name}'; put it "
            "in place of its calls with onnx.inliner.inline_local_functions(model)"
        )
    if proto.training_info:
        raise Refusal(f"{path} is a model to be trained; export it for inference")
    for part in (*proto.opset_import, *proto.graph.node):
        part.domain = OWN if part.domain == ALIAS else part.domain
    for node in proto.graph.node:
        if node.domain != OWN:
            raise Refusal(
                f"{path} has the operator '{node.domain}::{node.op_type}', which is not one of "
                "ONNX's own; export the network with standard operators"
            )
    external = onnx.TensorProto.EXTERNAL
    constants = [value.t for node in proto.graph.node for value in node.attribute]
    if any(t.data_location == external for t in (*proto.graph.initializer, *constants)):
        raise Refusal(
            f"{path} keeps its weights in other files; save it as one file with onnx.save(model, "
            "path)"
        )
    control = [node.op_type for node in proto.graph.node if node.op_type in CONTROL]
    if control:
        raise Refusal(f"{path} has control flow ({control[0]}), through which no Gaussian is led")
    onnx.checker.check_model(proto)


def _expected(path: Path, graph: Any) -> Expected:
    """The shape but for the batch, which is first in ONNX whatever the file says of it."""
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    if len(inputs) != 1:
        raise Refusal(
            f"{path} is a network of {len(inputs)} inputs, and the command line gives one; use "
            "cp.propagate in Python"
        )
    kind = inputs[0].type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    shape = (None, *dims[1:]) if dims else None
    return Expected(shape, DTYPES.get(kind.elem_type))

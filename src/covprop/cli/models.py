"""Models by name: an exported program, an ONNX file, or a function that makes one.

A file is recognised by its content. Pickles run code when they are loaded, and are refused unless
the user trusts them.
"""

import importlib
import importlib.util
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from covprop.cli import archive
from covprop.cli.archive import Expected
from covprop.cli.arrays import BoundedZip, check_affordable, file_size, load_tensors, plain_tensor
from covprop.cli.output import Note, Refusal, describe_error, printable, raised_in, reading
from covprop.cli.program import check_graph
from covprop.validation import SUPPORTED

FACTORY = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*", re.ASCII)
KINDS = (
    "a torch.export archive (.pt2), an ONNX file (.onnx), or package.module:factory with --weights "
    "FILE.safetensors"
)
PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")
PICKLE_SIGN = b"\x80"  # the first byte of a pickle of protocol 2 or later


def load(text: str, weights: str | None, allow_pickle: bool) -> tuple[str, Any, Expected]:
    """The name, the network and the expected input of the model that the user named.

    The network is in evaluation mode and needs no gradients.
    """
    if not text:
        raise Refusal(f"MODEL is missing: it is {KINDS}")
    path = Path(text)
    if path.exists():
        if weights is not None:
            raise Refusal(f"{path} has its own weights; --weights goes with package.module:factory")
        module, expected = _from_file(path, allow_pickle)
        name = path.name
    elif FACTORY.fullmatch(text):
        module, expected, name = _from_factory(text), Expected(), text
        if weights is not None:
            _load_weights(module, Path(weights), text)
        elif isinstance(module, nn.Module) and any(True for _ in module.parameters()):
            message = f"without --weights, {text} has the weights that it is made with"
            warnings.warn(message, Note, stacklevel=2)
    else:
        raise Refusal(f"{text!r} does not exist, and is no name such as package.module:factory")
    if isinstance(module, nn.Module):
        module.requires_grad_(False)
        if not isinstance(module, torch.fx.GraphModule):  # an exported one has no other mode
            module.eval()
    return printable(name), module, Expected(expected.shape, _dtype(text, module, expected))


def _dtype(text: str, module: Any, expected: Expected) -> torch.dtype | None:
    """The dtype of the parameters, or else what the model declares for its input."""
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    dtype = expected.dtype if expected.dtype in dtypes or not dtypes else None
    if dtype is None and dtypes:
        dtype = next((known for known in SUPPORTED if known in dtypes), sorted(dtypes, key=str)[0])
    if dtype is not None and dtype not in SUPPORTED:
        raise Refusal(
            f"{text} computes in {dtype}, and covprop in float32 or float64; convert the network "
            "with .float() before it is saved"
        )
    return dtype


def _from_file(path: Path, allow_pickle: bool) -> tuple[Any, Expected]:
    if not file_size(path):
        raise Refusal(f"{path} is empty")
    with path.open("rb") as file:
        sign = file.read(1)
    with reading(path, "a zip archive"):
        names = _zip_names(path, allow_pickle) if zipfile.is_zipfile(path) else None
    if names is not None:
        return _from_zip(path, names, allow_pickle)
    suffix = path.suffix.lower()
    if sign == PICKLE_SIGN or suffix in PICKLED:
        return _unpickled(path, allow_pickle), Expected()
    if suffix == ".onnx":
        with reading(path, "an ONNX file"):
            return _from_onnx(path)
    if suffix == ".safetensors":
        raise Refusal(_only_weights(path))
    if suffix == ".pt2":
        raise Refusal(f"{path} is no torch.export archive: it is cut off, or something else")
    raise Refusal(f"{path} is none of the models that can be read: {KINDS}")


def _zip_names(path: Path, allow_pickle: bool) -> list[str]:
    with BoundedZip(path) as content:
        if allow_pickle:  # torch, which reads it then, compares no checksums
            content.check_checksums()
        return list(content.sizes)


def _from_zip(path: Path, names: list[str], allow_pickle: bool) -> tuple[Any, Expected]:
    if any(
        name.endswith("archive_format") or "/models/" in name or "exported_program" in name
        for name in names
    ):
        with reading(path, "a torch.export archive"):
            return (_loaded(path), Expected()) if allow_pickle else archive.load(path)
    if any("/code/" in name for name in names):
        raise Refusal(
            f"{path} is TorchScript, into which covprop cannot look; export the network with "
            "torch.export instead"
        )
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return _unpickled(path, allow_pickle), Expected()
    raise Refusal(f"{path} is a zip archive, and none of the models that can be read: {KINDS}")


def _loaded(path: Path) -> torch.fx.GraphModule:
    """A program as torch loads it, which keeps the mode that it was exported in."""
    _import_from_here()
    module = torch.export.load(path).module()
    try:
        check_graph(module)
    except Refusal as refusal:
        raise Refusal(f"{path} cannot be run: {refusal}") from refusal
    return module


def _unpickled(path: Path, allow_pickle: bool) -> Any:
    if not allow_pickle:
        if _holds_weights(path):
            raise Refusal(_only_weights(path))
        raise Refusal(
            f"{path} is a pickle, which can run any code when it is loaded; write the network with "
            "torch.export.save, or say --allow-pickle if you trust the file"
        )
    _import_from_here()
    with reading(path, "a pickled network"):
        content = torch.load(path, map_location="cpu", weights_only=False)
    if isinstance(content, torch.export.ExportedProgram):
        content = content.module()
    if not isinstance(content, nn.Module):
        raise Refusal(f"{path} holds a {type(content).__name__}, and a torch.nn.Module is wanted")
    return content


def _holds_weights(path: Path) -> bool:
    """Whether it is a state_dict, which torch can tell without running anything."""
    try:
        with BoundedZip(path):
            content = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # whatever else it is, it is not weights
        return False
    values = content.values() if isinstance(content, dict) else [None]
    return all(isinstance(value, Tensor) for value in values)


def _only_weights(path: Path) -> str:
    return (
        f"{path} holds weights and no network; name the network as package.module:factory and give "
        f"--weights {path}"
    )


def _import_from_here() -> None:
    """Search the current folder for modules first, as `python -m` does; the entry undoes it."""
    sys.path.insert(0, os.getcwd())


def _from_factory(text: str) -> Any:
    """What a factory returns; the user's code runs here, and its errors are reported as such."""
    module_name, _, path = text.partition(":")
    _import_from_here()
    try:
        factory = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Refusal(
            f"there is no module {error.name!r} in {os.getcwd()} or among the installed ones"
        ) from error
    except (Exception, SystemExit) as error:
        raise Refusal(f"importing {module_name} {_failed(error)}") from error
    for part in path.split("."):
        factory = getattr(factory, part, None)  # type: ignore[assignment]
    if factory is None:
        raise Refusal(f"the module {module_name} has no {path!r}")
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise Refusal(f"{text} is a {type(factory).__name__}, not a function that makes a model")
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise Refusal(f"{text}() {_failed(error)}") from error
    if not callable(model):
        kind = type(model).__name__
        raise Refusal(f"{text}() returned a {kind}, and a torch.nn.Module is wanted")
    return model


def _failed(error: BaseException) -> str:
    frame, line = raised_in(error)
    return f"failed at {frame.f_code.co_filename}:{line}: {describe_error(error)}"


def _load_weights(module: Any, path: Path, name: str) -> None:
    """Load all weights of a network, in their shapes; its dtype becomes theirs."""
    if not isinstance(module, nn.Module):
        raise Refusal(f"{name} makes a {type(module).__name__}, which has no weights to load")
    check_affordable(path, file_size(path))
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", ".pt"):
        raise Refusal(
            f"{path} is no file of weights: its name ends neither with .safetensors nor .pt"
        )
    with reading(path, "a file of weights"):
        tensors = _read_safetensors(path) if suffix == ".safetensors" else _read_state_dict(path)
    own = module.state_dict()
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or foreign:
        what = (
            f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}, which the network has not"
        )
        raise Refusal(f"{path} does not fit {name}: it {what}")
    for key, tensor in tensors.items():
        if tensor.shape != own[key].shape:
            raise Refusal(
                f"{path} does not fit {name}: {key!r} has shape {tuple(tensor.shape)}, and "
                f"{tuple(own[key].shape)} is wanted"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refusal(f"{path} has NaN or infinite entries in {key!r}")
    with reading(path, f"the weights of {name}"):
        module.load_state_dict(tensors, assign=True)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        library = importlib.import_module("safetensors")
    except ImportError as error:
        raise Refusal(
            "weights in .safetensors need safetensors; install it with "
            "pip install '.[cli]' in covprop's folder"
        ) from error
    with library.safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    content = load_tensors(path)
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds a {type(content).__name__}, not the weights of a network")
    return {str(name): plain_tensor(path, value) for name, value in content.items()}


# ONNX, through onnx2pytorch.

LARGEST_ONNX = 2**31 - 1  # bytes: protobuf has no larger messages
OWN, ALIAS = "", "ai.onnx"  # both name ONNX's own operators; others may mean anything
CONTROL = ("If", "Loop", "Scan", "SequenceMap")
ONNX_DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}


def _from_onnx(path: Path) -> tuple[nn.Module, Expected]:
    try:
        onnx = importlib.import_module("onnx")
        with without_torchvision(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            converter = importlib.import_module("onnx2pytorch")
    except ImportError as error:
        raise Refusal(
            "ONNX models need onnx and onnx2pytorch; install them with pip install onnx and then "
            "pip install --no-deps onnx2pytorch, which asks for torchvision but does without here"
        ) from error
    size = file_size(path)
    if size > LARGEST_ONNX:
        raise Refusal(f"{path} has {size:,} bytes, and an ONNX file at most {LARGEST_ONNX:,}")
    check_affordable(path, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = onnx.load_model_from_string(path.read_bytes())
        _check_onnx(path, onnx, proto)
        module = converter.ConvertModel(proto)
    stored = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in stored]
    if len(inputs) != 1:
        raise Refusal(
            f"{path} is a network of {len(inputs)} inputs, and the command line gives one; use "
            "cp.propagate in Python"
        )
    kind = inputs[0].type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    # The batch is first in ONNX, and of any size whatever the file says of it.
    shape = (None, *sizes[1:]) if sizes else None
    return module, Expected(shape, ONNX_DTYPES.get(kind.elem_type))


def _check_onnx(path: Path, onnx: Any, proto: Any) -> None:
    """Refuse what is no model, what is in other files, unknown operators and control flow."""
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
    constants = [value.t for node in proto.graph.node for value in node.attribute]
    tensors = (*proto.graph.initializer, *constants)
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors):
        raise Refusal(
            f"{path} keeps its weights in other files; save it as one file with onnx.save(model, "
            "path)"
        )
    control = [node.op_type for node in proto.graph.node if node.op_type in CONTROL]
    if control:
        raise Refusal(f"{path} has control flow ({control[0]}), through which no Gaussian is led")
    onnx.checker.check_model(proto)


TORCHVISION = {
    "torchvision": (),
    "torchvision.ops": ("deform_conv2d", "roi_pool", "roi_align", "nms", "box_convert"),
    "torchvision.io": ("decode_image", "ImageReadMode"),
}
"""Names that onnx2pytorch imports, for operators on regions and images that few networks have."""


def _absent(*_: Any, **__: Any) -> Any:
    raise ModuleNotFoundError("this ONNX operator needs torchvision, which is not installed")


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let onnx2pytorch be imported where torchvision is not installed, with names that raise.

    There is no CPU build of torchvision beside torch's everywhere.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    modules = {name: ModuleType(name) for name in TORCHVISION}
    for name, functions in TORCHVISION.items():
        vars(modules[name]).update(dict.fromkeys(functions, _absent))
    vars(modules["torchvision"]).update(
        ops=modules["torchvision.ops"], io=modules["torchvision.io"]
    )
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in TORCHVISION:
            del sys.modules[name]

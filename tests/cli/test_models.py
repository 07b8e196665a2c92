"""Models by name: factories, weights, ONNX, and pickles only for who asks for them."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

import covprop as cp
from tests.cli.running import FEATURES, covprop, network, refused

GIVEN = ("--mean", "mean.npy", "--covariance", "covariance.npy")
MARKER = Path("code_was_run")


@pytest.fixture(autouse=True)
def here(folder: Path) -> None:
    del folder


def told(model: str | Path, *more: Any) -> str:
    return refused("propagate", model, *GIVEN, *more)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("nowhere.pt2", "'nowhere.pt2' does not exist, and is no name such as package.module"),
        ("no module:x", "does not exist"),
        ("a\0b", "does not exist"),
        (":", "does not exist"),
        ("module_of_nobody:make", "there is no module 'module_of_nobody'"),
        ("json:nothing", "the module json has no 'nothing'"),
        ("json:decoder.nothing", "the module json has no 'decoder.nothing'"),
        ("made_by_test:NUMBER", "made_by_test:NUMBER is a int, not a function"),
        ("time:time", "time:time() returned a float, and a torch.nn.Module is wanted"),
        ("mean.npy", "mean.npy is none of the models that can be read"),
        ("arrays.npz", "arrays.npz is a zip archive, and none of the models"),
        ("weights.safetensors", "holds weights and no network; name the network as"),
        ("weights.pt", "holds weights and no network; name the network as"),
        ("pickled.pt", "is a pickle, which can run any code when it is loaded"),
        (".", ". is a folder, not a file"),
        ("empty.pt2", "empty.pt2 is empty"),
        ("text.pt2", "text.pt2 is no torch.export archive"),
        ("text.onnx", "text.onnx"),
        ("", "MODEL is missing: it is a torch.export archive (.pt2), an ONNX file"),
    ],
)
def test_what_is_no_model(model: str, sentence: str) -> None:
    Path("empty.pt2").touch()
    Path("text.pt2").write_text("a text")
    Path("text.onnx").write_text("a text")
    assert sentence in told(model)


def test_a_factory_that_fails_is_told_with_its_place() -> None:
    Path("broken_by_test.py").write_text(
        "import sys\n\ndef make():\n    raise KeyError('x')\n\ndef leave():\n    sys.exit(0)\n"
    )
    assert "broken_by_test.py:4: KeyError: 'x'" in told("broken_by_test:make")
    assert "broken_by_test.py:7: SystemExit: 0" in told("broken_by_test:leave")
    Path("worse_by_test.py").write_text("import sys\nsys.exit('no')\n")
    assert "importing worse_by_test failed at" in told("worse_by_test:make")
    Path("syntax_by_test.py").write_text("def make(:\n")
    assert "importing syntax_by_test failed" in told("syntax_by_test:make")
    Path("needy_by_test.py").write_text("import module_of_nobody\n")
    assert "there is no module 'module_of_nobody'" in told("needy_by_test:make")


def test_a_module_itself_will_do_and_packages_have_dots() -> None:
    Path("parts_by_test").mkdir()
    Path("parts_by_test/inner.py").write_text(
        "import torch\n\nclass Zoo:\n    best = torch.nn.ReLU()\n"
    )
    paths = list(sys.path)
    assert covprop("propagate", "parts_by_test.inner:Zoo.best", *GIVEN).code == 0
    assert sys.path == paths


def test_a_model_is_put_into_evaluation_mode() -> None:
    Path("training_by_test.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Dropout(0.5).train()\n"
    )
    ended = covprop("propagate", "training_by_test:make", *GIVEN, "--json")
    np.testing.assert_allclose(ended.told["covariance"], np.load("covariance.npy"), rtol=1e-5)


def test_a_model_that_does_not_bear_the_input_is_one_sentence() -> None:
    Path("picky_by_test.py").write_text(
        "import torch\n\n"
        "def wide():\n    return torch.nn.Linear(7, 2)\n\n"
        "def angry():\n    def forward(x):\n        raise KeyError('two\\nlines')\n"
        "    return forward\n\n"
        "def unknown():\n    return torch.digamma\n"
    )
    assert told("picky_by_test:wide").startswith("the model does not take this input: ")
    assert told("picky_by_test:angry") == (
        "the model does not take this input: KeyError: 'two\\nlines'"
    )
    words = ("propagate", "picky_by_test:unknown", *GIVEN, "--method", "gaussian-layers")
    assert "covprop has no rule for torch.digamma" in covprop(*words).err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("0.bias"), "does not fit made_by_test:make: it lacks '0.bias'"),
        (lambda w: w.update(extra=torch.zeros(1)), "it has 'extra', which the network has not"),
        (lambda w: w.update({"0.bias": torch.zeros(3)}), "'0.bias' has shape (3,), and (8,)"),
        (lambda w: w["0.bias"].fill_(torch.nan), "has NaN or infinite entries in '0.bias'"),
        (lambda w: w.update({k: v.half() for k, v in w.items()}), "computes in torch.float16"),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_that_do_not_fit(change: Any, sentence: str, suffix: str) -> None:
    weights = {name: tensor.clone() for name, tensor in network().state_dict().items()}
    change(weights)
    path = f"other{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    assert sentence in told("made_by_test:make", "--weights", path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere.safetensors", "nowhere.safetensors does not exist"),
        ("mean.npy", "mean.npy is no file of weights"),
        ("cut.safetensors", "cut.safetensors cannot be read as a file of weights"),
        ("mean.pt", "mean.pt holds a Tensor, not the weights of a network"),
        ("pickled.pt", "pickled.pt cannot be read as a file of weights"),
    ],
)
def test_what_is_no_file_of_weights(name: str, sentence: str) -> None:
    Path("cut.safetensors").write_bytes(Path("weights.safetensors").read_bytes()[:-9])
    assert sentence in told("made_by_test:make", "--weights", name)


def test_weights_go_with_a_factory_of_a_network_alone() -> None:
    assert "has its own weights" in told("model.pt2", "--weights", "weights.pt")
    Path("plain_by_test.py").write_text("import torch\n\ndef make():\n    return torch.sin\n")
    assert "which has no weights to load" in told(
        "plain_by_test:make", "--weights", "weights.safetensors"
    )


def test_weights_without_their_library_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert told("made_by_test:make", "--weights", "weights.safetensors") == (
        "weights in .safetensors need safetensors; install it with pip install '.[cli]' in "
        "covprop's folder"
    )


def test_a_factory_without_weights_is_noted() -> None:
    words = ("propagate", "made_by_test:make", *GIVEN)
    assert covprop(*words).err == (
        "covprop: note: without --weights, made_by_test:make has the weights that it is made with\n"
    )
    assert covprop(*words, "--weights", "weights.safetensors").err == ""
    Path("bare_by_test.py").write_text("import torch\n\nmake = torch.nn.ReLU\n")
    assert covprop("propagate", "bare_by_test:make", *GIVEN).err == ""


class Evil(nn.Module):
    """A network that leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(MARKER),)


@pytest.mark.parametrize(
    "name", ["m.pt", "m.pth", "m.pkl", "m.bin", "m.pt2", "m.onnx", "m.safetensors", "m", "m.npz"]
)
@pytest.mark.parametrize("kind", ["torch", "old torch", "pickle", "pickle 0"])
def test_a_pickle_under_any_name_is_refused_and_not_run(name: str, kind: str) -> None:
    if kind == "torch":
        torch.save(Evil(), name)
    elif kind == "old torch":
        torch.save(Evil(), name, _use_new_zipfile_serialization=False)
    else:
        Path(name).write_bytes(pickle.dumps(Evil(), protocol=0 if kind == "pickle 0" else None))
    sentence = told(name)
    assert not MARKER.exists()
    if kind != "pickle 0":
        assert "is a pickle, which can run any code" in sentence


def test_a_pickle_is_run_for_who_allows_it() -> None:
    torch.save(Evil(), "evil.pt")
    assert "evil.pt holds a NoneType" in told("evil.pt", "--allow-pickle")
    assert MARKER.exists()


def test_what_a_pickle_holds_has_to_be_a_network() -> None:
    assert "holds a OrderedDict" in told("weights.pt", "--allow-pickle")
    Path("cut.pt").write_bytes(Path("pickled.pt").read_bytes()[:300])
    assert "cut.pt cannot be read as a pickled network" in told("cut.pt", "--allow-pickle")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    torch.jit.save(torch.jit.trace(network(), torch.zeros(1, FEATURES)), "script.pt")
    assert "is TorchScript, into which covprop cannot look" in told("script.pt")


def save_onnx(path: str = "model.onnx", **changes: Any) -> None:
    """The network as ONNX; changes replace parts of it."""
    weights = {name: value.numpy() for name, value in network().state_dict().items()}
    nodes = [
        helper.make_node("Gemm", ["x", "0.weight", "0.bias"], ["a"], transB=1),
        helper.make_node(changes.get("operator", "Relu"), ["a"], ["b"], **changes.get("with", {})),
        helper.make_node("Gemm", ["b", "2.weight", "2.bias"], ["y"], transB=1),
    ]
    kind = changes.get("kind", TensorProto.FLOAT)
    inputs = [
        helper.make_tensor_value_info(name, kind, ("batch", FEATURES))
        for name in changes.get("inputs", ["x"])
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 3))]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, **changes.get("how", {}))


def test_an_onnx_file_is_the_network() -> None:
    save_onnx()
    ended = covprop("propagate", "model.onnx", *GIVEN, "--json")
    assert ended.code == 0, ended.err
    mean, covariance = (torch.from_numpy(np.load(f"{n}.npy")) for n in ("mean", "covariance"))
    y = cp.propagate(network(), cp.Gaussian(mean, covariance.float()))
    np.testing.assert_allclose(ended.told["mean"], y.mean.detach(), rtol=1e-5)
    np.testing.assert_allclose(
        ended.told["covariance"], y.covariance_matrix.detach(), rtol=1e-4, atol=1e-7
    )


def test_the_axes_of_an_onnx_file_are_its_own_with_a_mixture() -> None:
    """The parts of a mixture are no batch to a network that counts its axes from the front."""
    save_onnx(operator="Softmax", **{"with": {"axis": 1}})
    told = covprop("propagate", "model.onnx", *GIVEN, "--method", "split:3", "--json").told
    mean, covariance = (torch.from_numpy(np.load(f"{n}.npy")) for n in ("mean", "covariance"))
    layers = network()
    drawn = cp.Gaussian(mean, covariance.float()).sample(20_000, torch.Generator().manual_seed(0))
    values = layers[2](layers[0](drawn).softmax(-1)).detach().double()
    error = 5 * values.std(0) / len(values) ** 0.5
    rough = 0.05 * values.std(0)  # softmax by the delta method
    off = (torch.tensor(told["mean"]).double() - values.mean(0)).abs()
    assert bool((off <= error + rough).all())
    np.testing.assert_allclose(told["stddev"], values.std(0), rtol=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"operator": "Nothing"}, "model.onnx cannot be read as an ONNX file"),
        ({"inputs": ["x", "z"]}, "model.onnx is a network of 2 inputs"),
        (
            {"how": {"save_as_external_data": True, "size_threshold": 0}},
            "model.onnx keeps its weights in other files",
        ),
        ({"kind": TensorProto.FLOAT16}, "model.onnx"),
    ],
)
def test_what_an_onnx_file_may_not_be(changes: dict[str, Any], sentence: str) -> None:
    save_onnx(**changes)
    if "kind" in changes:  # its weights decide
        assert covprop("propagate", "model.onnx", *GIVEN).code == 0
    else:
        assert sentence in told("model.onnx")


def _domain(model: onnx.ModelProto, domain: str) -> None:
    model.graph.node[1].domain = domain
    model.opset_import.append(helper.make_opsetid(domain, 1))


def _function(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Neg", ["a"], ["b"])]
    opset = [helper.make_opsetid("", 17)]
    function = helper.make_function("own", "Relu", ["a"], ["b"], body, opset)
    model.functions.append(function)


FOREIGN: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "an operator of another domain": (
        lambda model: _domain(model, "com.example"), "has the operator 'com.example::Relu', which",
    ),
    "an operator of a domain of ONNX's": (
        lambda model: _domain(model, "ai.onnx.ml"), "has the operator 'ai.onnx.ml::Relu', which is",
    ),
    "a function": (_function, "defines a function of its own, 'own::Relu'"),
    "a training": (lambda model: model.training_info.add(), "is a model to be trained"),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_not_of_onnx_itself_is_refused(what: str) -> None:
    change, sentence = FOREIGN[what]
    save_onnx()
    model = onnx.load("model.onnx")
    change(model)
    onnx.save(model, "model.onnx")
    assert sentence in told("model.onnx")


def test_onnx_has_two_names_for_its_own_operators() -> None:
    save_onnx()
    model = onnx.load("model.onnx")
    for part in (*model.graph.node, *model.opset_import):
        part.domain = "ai.onnx"
    onnx.save(model, "model.onnx")
    assert covprop("propagate", "model.onnx", *GIVEN).code == 0


def test_control_flow_in_onnx_is_refused() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, ()),
            helper.make_tensor_value_info("c", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, ("batch", FEATURES)),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, ("batch", FEATURES)),
        ],
    )
    forever = numpy_helper.from_array(np.array(2**62), "count")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", FEATURES))
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", FEATURES))
    loop = helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)
    onnx.save(
        helper.make_model(helper.make_graph([loop], "g", [value], [out], [forever])), "l.onnx"
    )
    assert told("l.onnx") == "l.onnx has control flow (Loop), through which no Gaussian is led"


def test_onnx_without_its_libraries_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    save_onnx()
    monkeypatch.setitem(sys.modules, "onnx2pytorch", None)
    asked = "install them with pip install onnx and then pip install --no-deps onnx2pytorch"
    assert asked in told("model.onnx")

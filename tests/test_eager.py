"""Models that torch.compile has wrapped, and those that Python does not run."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from covprop.modules import eager
from tests.layers import propagate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # those of torch.jit

X = cp.Gaussian.isotropic(torch.tensor([0.5, -1.0, 2.0]), stddev=0.3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Tanh()
    return nn.Sequential(*layers).requires_grad_(False)


def wrapped() -> nn.Module:
    return torch.compile(network())  # type: ignore[return-value]


def in_place() -> nn.Module:
    model = network()
    model.compile()
    return model


def inner() -> nn.Module:
    model = network()
    model[0].compile()
    return model


def function() -> Any:
    model = network()
    return torch.compile(lambda x: model(x))


@pytest.mark.parametrize(
    "method", [cp.Exact(), cp.Sketched(16), cp.Linearized()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("compiled", [wrapped, in_place, inner, function])
def test_a_compiled_model_that_has_not_run_yet_is_the_model(compiled: Any, method: Any) -> None:
    torch.manual_seed(1)
    found = propagate(compiled(), X, method)
    torch.manual_seed(1)
    expected = propagate(network(), X, method)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance_matrix, expected.covariance_matrix)


def test_the_compiler_is_back_when_the_last_thread_has_left() -> None:
    stance = pytest.importorskip("torch._dynamo.eval_frame")
    entered, leave = threading.Barrier(2), threading.Event()

    def waiting() -> str:
        entered.wait()
        leave.wait()
        return str(stance._stance.stance)

    thread = threading.Thread(target=eager(waiting))
    thread.start()

    def beside() -> str:
        entered.wait()
        return str(stance._stance.stance)

    assert eager(beside)() == "force_eager"
    assert stance._stance.stance == "force_eager"  # the other is still inside
    leave.set()
    thread.join()
    assert stance._stance.stance == "default"


NEW_PROCESS = """
import sys
import covprop as cp
import torch
network = torch.nn.Sequential(torch.nn.Linear(20, 9), torch.nn.GELU(), torch.nn.Linear(9, 2))
cp.propagate(network.eval(), cp.Gaussian.isotropic(torch.ones(20), stddev=0.1))
assert "torch._dynamo" not in sys.modules, "imported for models that are not compiled"
cp.propagate(lambda x: torch.softmax(x, -1), cp.Gaussian.isotropic(torch.ones(2), stddev=0.1))
late = {"bayes", "robustness", "diagnostics", "report", "cli"}
early = [name for name in sys.modules if name.startswith("covprop.") and name.split(".")[1] in late]
assert not early, early
assert "sklearn" not in sys.modules
sys.modules["sklearn"] = None  # as where it is not installed
for name in cp.__all__:
    assert name in dir(cp)
    try:
        getattr(cp, name)
    except ImportError as error:
        print(name, error)
assert not hasattr(cp, "nothing")
"""


def test_a_new_process_imports_what_it_needs_and_its_first_call_does_not_warn() -> None:
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", NEW_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    refused = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "from_sklearn" in refused
    for name, told in refused.items():
        assert told.startswith(f"cp.{name} needs scikit-learn; install it with pip")


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(3))])
def test_torchscript_is_refused_in_one_sentence(make: Any) -> None:
    scripted = make(network())
    with pytest.raises(cp.UnsupportedOperation, match="TorchScript program runs outside of Python"):
        propagate(scripted, X)
    assert propagate(scripted, X, cp.MonteCarlo(10)).mean.shape == (2,)


def scaled_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


@pytest.mark.parametrize("make", [torch.jit.script, lambda f: torch.jit.trace(f, torch.zeros(3))])
@pytest.mark.parametrize("method", [cp.Auto(), cp.Exact(), cp.Linearized()])
def test_a_scripted_function_is_the_one_that_torch_keeps(make: Any, method: Any) -> None:
    scripted = make(scaled_tanh)
    assert isinstance(scripted, torch.jit.ScriptFunction)
    found, expected = (cp.propagate(f, X, method=method) for f in (scripted, scaled_tanh))
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance_matrix, expected.covariance_matrix)


def test_a_scripted_function_within_a_model_is_refused_or_sampled() -> None:
    scripted = torch.jit.script(scaled_tanh)
    with pytest.raises(cp.UnsupportedOperation, match="TorchScript program runs outside of Python"):
        propagate(lambda x: scripted(x) + 1, X)
    y = cp.propagate(lambda x: scripted(x) + 1, X)
    expected = cp.propagate(lambda x: scaled_tanh(x) + 1, X)
    torch.testing.assert_close(y.mean, expected.mean, rtol=1e-2, atol=1e-3)

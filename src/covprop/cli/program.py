"""A program of `torch.export`, run call by call from its description: data, not code.

`torch.export.load` unpickles, evaluates expressions of sizes as Python and calls any function of
torch that the file names. Here each call is one of `operators`.
"""

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from covprop.cli.description import Call, Description, Name
from covprop.cli.gaussians import Expected
from covprop.cli.refusals import Refusal
from covprop.errors import UnsupportedOperation

LARGEST = 2**34
"""Numbers in a tensor: views repeat a few as often as a file says, and sums would never end."""


@final
class Scope(nn.Module):
    """A module of the network that was exported: calls are made in its name."""

    def __init__(self) -> None:
        """Of no kind, until a call tells what it was."""
        super().__init__()
        self.kind = "module"

    def _get_name(self) -> str:
        """What torch and covprop call it: the class that it was exported from."""
        return self.kind

    def make(self, call: Call, values: dict[str, Any]) -> None:
        """Make a call; whoever asks which module is running finds this one."""
        _make(call, values)


def _make(call: Call, values: dict[str, Any]) -> None:
    """Make a call, name its results, and let go of what nobody needs any more."""
    args = [_filled(item, values) for item in call.args]
    kwargs = {key: _filled(item, values) for key, item in call.kwargs.items()}
    result = call.function(*args, **kwargs)
    for item in result if isinstance(result, list | tuple) else [result]:
        if isinstance(item, Tensor) and item.numel() > LARGEST:
            raise Refusal(f"the program makes a tensor of {item.numel():,} numbers")
    several = len(call.results) > 1
    for name, value in zip(call.results, result if several else [result], strict=True):
        if isinstance(name, list):
            values.update(zip(name, value, strict=True))
        elif isinstance(name, Name):
            values[name] = value
    for name in call.dead:
        values.pop(name, None)


def _filled(nest: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(nest, Name):
        return values[nest]
    if isinstance(nest, list):
        return [_filled(item, values) for item in nest]
    return nest


@final
class Program(nn.Module):
    """A network of one input: the calls of a description, with its tensors."""

    def __init__(
        self, description: Description, tensors: Mapping[str, Tensor], expected: Expected
    ) -> None:
        """Keep the tensors as parameters, so that their dtype and device are known."""
        super().__init__()
        self._description, self._expected = description, expected
        (self._input,) = description.inputs
        self._tensors = {name: tensors[stored] for name, stored in description.tensors.items()}
        self.weights = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False)
            for tensor in self._tensors.values()
            if tensor.is_floating_point()
        )
        kinds = {call.module: call.kind for call in description.calls}
        self._scopes = {path: self._scope(path) for path in sorted(kinds)}
        for path, scope in self._scopes.items():
            if scope is not None:
                scope.kind = kinds[path]

    def _scope(self, path: str) -> Scope | None:
        """The module of that path, made if need be; its parent where the name is taken."""
        owner: nn.Module = self
        for part in path.split(".") if path else []:
            child = owner._modules.get(part)
            if child is None and not hasattr(owner, part):
                owner.add_module(part, child := Scope())
            if not isinstance(child, Scope):
                break
            owner = child
        return owner if isinstance(owner, Scope) else None

    def forward(self, x: Any) -> Any:
        """What the exported network returned; sizes that it was exported for are in its calls."""
        if not self._expected.fits(x.shape):
            raise UnsupportedOperation(
                f"the program was exported for input of shape {self._expected.shape}, and not "
                f"{tuple(x.shape)}"
            )
        values = {**self._description.constants, **self._tensors, self._input: x}
        del x
        for call in self._description.calls:
            scope = self._scopes[call.module]
            if scope is None:
                _make(call, values)
            else:
                scope.make(call, values)
        outputs = [_filled(output, values) for output in self._description.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

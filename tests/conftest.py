"""What all tests share."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected
    os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # those of other packages, such as trio
    hands_out_tests = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if hands_out_tests:  # and runs none: a filter would make it import covprop, and so torch
        return
    # Tests compare formulas at any noise, for dropout and for events of any shape; some test these
    # warnings.
    for category in ("ApproximationWarning", "DropoutWarning", "BatchWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::covprop.{category}")
    if config.getoption("--another-blas"):
        config.pluginmanager.register(OnAnotherBLAS())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--another-blas",
        action="store_true",
        help="add up matrix products and sums in random orders, as another machine would",
    )


LONG = (
    "test_commands.py", "test_notebooks.py", "test_pages.py", "test_fuzz.py", "test_packaging.py",
    "test_benchmarks.py", "test_eager.py", "test_scale.py",
)  # fmt: skip
"""Files of tests that take seconds each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, so that no process waits for it in the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: every collection of garbage would pass a million objects.

    It took a tenth of the time of small tests and most of that of tests that collect themselves.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    seed_this_device_alone()


def seed_this_device_alone() -> None:
    """`torch.manual_seed` writes a stack trace down for each kind of device that is not there.

    It takes half a millisecond below pytest, and tests seed some ten thousand times.
    """
    import torch

    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda _: None


KERNELS: set[str] = set()
"""Which kernels were tested: without a compiler it is the torch code alone."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker says it: who hands out tests would import torch for it, when all else is done."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None or session.config.getoption("dist", "no") == "no":
        from covprop.kernels.compiled import description

        KERNELS.add(description())
    if output is not None:
        output["kernels"] = description()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    KERNELS.add(getattr(node, "workeroutput", {}).get("kernels", "unknown"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kernels in KERNELS:
        terminalreporter.write_line(f"kernels: {kernels}")


class OnAnotherBLAS:
    """What `--another-blas` asks for, of each test."""

    @pytest.fixture(autouse=True)
    def _another_blas(self) -> Iterator[None]:
        from tests.another_blas import AnotherBLAS  # here: who hands out tests needs none

        with AnotherBLAS():
            yield


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch code in place of the compiled kernels."""
    monkeypatch.setattr("covprop.kernels.compiled.library", lambda: None)


@pytest.fixture(params=["compiled", "torch"])
def both_kernels(request: pytest.FixtureRequest) -> None:
    """Each of the two: a test runs twice."""
    from covprop.kernels.compiled import library  # here, as above

    if request.param == "torch":
        request.getfixturevalue("torch_kernels")
    elif library() is None:
        pytest.skip("no compiled kernels: no compiler was found, or the test is of the torch code")

"""Memory and time of a call."""

import importlib
import time

import pytest
import torch

from covprop.footprint import PeakTensors, footprint

FOOTPRINT = importlib.import_module("covprop.footprint")
CPU = torch.device("cpu")
KILO = 1000 * 8


def of_size(kilos: int) -> torch.Tensor:
    return torch.zeros(1000 * kilos, dtype=torch.float64)


def peak(function: object) -> int:
    with PeakTensors() as counted:
        function()  # type: ignore[operator]
    return counted.most


def test_tensors_that_live_together_count_together() -> None:
    def both() -> None:
        first = of_size(3)
        second = of_size(5)
        del first, second

    def in_turn() -> None:
        for _ in range(4):
            of_size(5)

    assert peak(both) == 8 * KILO
    assert peak(in_turn) == 5 * KILO


def test_views_and_in_place_operations_make_nothing() -> None:
    given = of_size(4)

    def use() -> None:
        given.view(2, -1).t()[0].mul_(2).add_(1)
        given.reshape(-1)[::2].zero_()

    assert peak(use) == 0


def test_what_is_returned_is_counted_and_what_was_there_is_not() -> None:
    given = of_size(7)
    found = footprint(lambda: given + 1, CPU)
    assert found.peak_bytes == 7 * KILO
    assert torch.equal(found.result, given + 1)


def test_vectorised_functions_are_seen_inside() -> None:
    samples = torch.zeros(10, 1000, dtype=torch.float64)
    assert peak(lambda: torch.func.vmap(torch.exp)(samples)) == 10 * KILO


def test_a_brief_call_is_timed_without_the_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    footprint(lambda: calls.append(1), CPU)
    assert len(calls) == 2
    footprint(lambda: calls.append(1), CPU, repeat=False)
    assert len(calls) == 3
    monkeypatch.setattr(FOOTPRINT, "BRIEF", 0.01)
    long = footprint(lambda: (calls.append(1), time.sleep(0.03)), CPU)
    assert len(calls) == 4
    assert 0.03 <= long.seconds < 3

"""Public architectures: what the committed results say, and a part of them again."""

import re

import pytest
import torch
from torch import nn

from experiments import architectures, record
from experiments.options import RESULTS, Options
from experiments.public_models import MODELS
from tests.pages import ROOT

FOUND = record.read(RESULTS / f"{architectures.NAME}.json")["results"]
SHARE = sum(map(architectures.works, FOUND.values())) / len(FOUND)
SAMPLES = 1000
SLOW = ("FT-Transformer", "EGNN", "highway", "NeRF", "hypernetwork", "encoder and decoder")


def test_nine_in_ten_work_and_none_is_far_off() -> None:
    assert len(FOUND) >= 60
    assert SHARE >= 0.9
    beyond = {
        key: found["error"]
        for key, found in FOUND.items()
        if "error" in found and not architectures.works(found)
    }
    assert set(beyond) <= {"transformers/MobileNetV2"}  # whose y.error tells that it is rough
    assert all(error < 0.04 for error in beyond.values())


def test_what_is_refused_names_the_operation() -> None:
    for key, found in FOUND.items():
        if "refused" in found:
            assert re.search(r"torch\.\w+|draws random numbers|float64", found["refused"]), key


def test_the_readme_has_the_share() -> None:
    assert f"{SHARE:.0%} of {len(FOUND)} public architectures" in (ROOT / "README.md").read_text()


def test_all_networks_have_been_measured() -> None:
    own = {f"torch/{name}" for name in MODELS}
    assert {key for key in FOUND if key.startswith("torch/")} == own
    others = {f"{architectures.PACKAGE}/{name}" for name in architectures.TRANSFORMERS}
    assert set(FOUND) == own | others


@pytest.mark.parametrize("name", [name for name in MODELS if name not in SLOW])
def test_a_network_works_or_is_refused_as_in_the_results(name: str) -> None:
    key = f"torch/{name}"
    forward, shape = architectures.built(key)
    found = architectures.checked(forward, shape, SAMPLES, seed=1)
    assert ("refused" in found) == ("refused" in FOUND[key])
    if "refused" in found:
        names = [
            re.findall(r"torch\.[\w.]+", each[key]["refused"]) for each in ({key: found}, FOUND)
        ]
        assert names[0] == names[1]
        return
    # A deviation of n samples has a standard error of 1 / sqrt(2 n), relative to it.
    assert found["error"] <= architectures.WITHIN + 2 / (2 * SAMPLES) ** 0.5


def test_deviations_of_a_linear_network() -> None:
    model = nn.Linear(3, 2).double()
    mean = torch.zeros(2, 3, dtype=torch.float64)
    drawn = architectures.sampled(model, mean, SAMPLES, torch.Generator().manual_seed(0))
    exact = architectures.NOISE * model.weight.detach().norm(dim=1).expand(2, 2)
    assert float((drawn / exact - 1).abs().max()) <= 5 / (2 * SAMPLES) ** 0.5


def test_what_is_wrong_does_not_count() -> None:
    """A function whose derivative is hidden from the rules."""

    class Bent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * x if type(x) is torch.Tensor else 2 * x

    found = architectures.checked(Bent(), (3,), SAMPLES, seed=0)
    assert not architectures.works(found)
    assert found["error"] == pytest.approx(1 / 3, rel=0.05)


def test_the_units_are_all_networks() -> None:
    units = architectures.units(Options())
    assert len(units) >= len(MODELS) >= 40
    assert set(units) <= set(FOUND)

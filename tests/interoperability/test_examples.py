"""The adapters in examples/ run in the packages that they are for, and agree with their passes."""

import importlib
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.oracles import assert_close
from tests.torchvision_names import any_name_of_torchvision

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages are not ours
EXAMPLES = Path(__file__).parents[2] / "examples"
PASSES = 20_000
"""The standard error of a standard deviation is 0.5 %."""
NOISE = 0.2


def imported(package: str, example: str) -> tuple[ModuleType, ModuleType]:
    """The package, and an example; the test is skipped where it is not installed."""
    for name in ("lightning", package.partition(".")[0]):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(), any_name_of_torchvision():
        warnings.simplefilter("ignore")
        there = importlib.import_module(package)
        spec.loader.exec_module(module)
    return there, module


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 20), nn.Tanh(),
        nn.Dropout(0.2), nn.Linear(20, outputs),
    )  # fmt: skip


def inputs() -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def sampled_noise(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs for inputs with noise, (draws, batch, outputs)."""
    noise = torch.randn(PASSES, *x.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        result: Tensor = model.eval()((x + NOISE * noise).flatten(0, 1))
    return result.unflatten(0, (PASSES, len(x)))


def trainer(folder: Path) -> Any:
    return importlib.import_module("lightning").Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, accelerator="cpu",
    )  # fmt: skip


def dictionaries(x: Tensor, target: Tensor) -> DataLoader[Any]:
    """Batches as lightning-uq-box has them."""
    return DataLoader(
        [{"input": a, "target": b} for a, b in zip(x, target, strict=True)],  # type: ignore[arg-type]
        batch_size=6,
    )


def test_dropout_in_lightning_uq_box_is_the_limit_of_its_own(tmp_path: Path) -> None:
    box, ours = imported("lightning_uq_box.uq_methods", "lightning_uq_box_methods")
    model, x = network(1), inputs()
    moments = ours.MomentDropoutRegression(model, nn.MSELoss())
    y = moments.predict_step(x)
    sampled = box.MCDropoutRegression(model, PASSES, nn.MSELoss())
    expected = sampled.predict_step(x)
    assert set(y) == set(expected)
    for name in y:
        assert y[name].shape == expected[name].shape
    assert_close(y["pred"], expected["pred"], atol=0.02)
    assert_close(y["pred_uct"] / expected["pred_uct"], torch.ones(6), atol=0.03)
    run = trainer(tmp_path)
    run.fit(moments, dictionaries(x, x[:, :1]), dictionaries(x, x[:, :1]))
    run.test(moments, dictionaries(x, x[:, :1]), verbose=False)
    assert "pred_uct" in (tmp_path / "preds.csv").read_text().partition("\n")[0]


def test_class_probabilities_in_lightning_uq_box_are_the_limit_of_its_own() -> None:
    box, ours = imported("lightning_uq_box.uq_methods", "lightning_uq_box_methods")
    model, x = network(3), inputs()
    y = ours.MomentDropoutClassification(model, nn.CrossEntropyLoss()).predict_step(x)
    expected = box.MCDropoutClassification(model, PASSES, nn.CrossEntropyLoss()).predict_step(x)
    assert set(y) == set(expected)
    assert_close(y["pred"], expected["pred"], atol=0.01)
    assert_close(y["pred_uct"], expected["pred_uct"], atol=0.01)


def test_noisy_inputs_in_lightning_uq_box_agree_with_sampling() -> None:
    _, ours = imported("lightning_uq_box.uq_methods", "lightning_uq_box_methods")
    model, x = network(1), inputs()
    y = ours.NoisyInputRegression(model, nn.MSELoss(), NOISE).predict_step(x)
    outputs = sampled_noise(model, x)
    assert_close(y["pred"], outputs.mean(0), atol=0.01)
    assert_close(y["pred_uct"] / outputs.std(0)[:, 0], torch.ones(6), atol=0.03)
    with pytest.raises(ValueError, match=r"outputs of shape \(2,\)"):
        ours.NoisyInputRegression(network(2), nn.MSELoss(), NOISE).predict_step(x)


@pytest.mark.parametrize("kind", ["dropout", "noise"])
def test_regression_of_torch_uncertainty_has_the_likelihood_of_samples(
    kind: str, tmp_path: Path
) -> None:
    routines, ours = imported("torch_uncertainty.routines", "torch_uncertainty_models")
    model, x = network(1), inputs()
    if kind == "dropout":
        wrapped = ours.MomentDropout(model, noise=0.1).eval()
        methods = importlib.import_module("torch_uncertainty.methods")
        sampled = methods.mc_dropout(model, PASSES, task="regression", probabilistic=False).eval()
        with torch.no_grad():
            outputs = sampled(x).unflatten(0, (PASSES, 6))
        model.eval()
    else:
        wrapped = ours.NoisyInputs(model, NOISE, noise=0.1).eval()
        outputs = sampled_noise(model, x)
    y = wrapped(x)
    stddev = (outputs.var(0) + 0.01).sqrt()
    assert_close(y["loc"], outputs.mean(0), atol=0.02)
    assert_close(y["scale"] / stddev, torch.ones(6, 1), atol=0.03)
    routine = routines.RegressionRoutine(wrapped, output_dim=1, dist_family="normal")
    targets = x[:, 0]
    loader = DataLoader(TensorDataset(x, targets), batch_size=6)
    (result,) = trainer(tmp_path).test(routine, loader, verbose=False)
    expected = torch.distributions.Normal(outputs.mean(0), stddev).log_prob(targets[:, None])
    assert result["test/reg/NLL"] == pytest.approx(-float(expected.mean()), abs=0.1)


def test_classification_of_torch_uncertainty_has_expected_probabilities(tmp_path: Path) -> None:
    routines, ours = imported("torch_uncertainty.routines", "torch_uncertainty_models")
    model, x = network(3), inputs()
    wrapped = ours.NoisyInputs(model, NOISE, logits=True).eval()
    probabilities = sampled_noise(model, x).softmax(-1).mean(0)
    assert_close(wrapped(x).softmax(-1), probabilities, atol=0.01)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    routine = routines.ClassificationRoutine(wrapped, num_classes=3)
    loader = DataLoader(TensorDataset(x, labels), batch_size=6)
    (result,) = trainer(tmp_path).test(routine, loader, verbose=False)
    expected = -probabilities[range(6), labels].log().mean()
    assert result["test/cls/NLL"] == pytest.approx(float(expected), abs=0.01)

"""The HTML report without a browser: what is in it, that it is safe, small and tells the truth."""

import base64
import dataclasses
import hashlib
import re
import statistics
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

import covprop as cp
from covprop.error_estimate import ErrorEstimate
from covprop.report import page
from covprop.report.analyses import decision_sentences
from covprop.robustness import Probabilities, analyse
from tests.report.pages import (
    NASTY,
    Reader,
    data_of,
    everything,
    gaussian,
    network,
    rows_of,
    whole,
)

ASSETS = files("covprop.report") / "assets"
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "report.md"
ORDINARY = 1_500_000
"""Bytes of a page that is not unusual."""
CLOSE = 1e-4
"""Numbers of the page have five digits, those of its tables four."""


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return everything(network(), gaussian())


SECTIONS = {
    "y": ["outputs", "maps"], "trace": ["outputs", "maps", "layers"],
    "comparison": ["outputs", "maps", "sampling"], "robustness": ["decision"],
    "uncertainty_budget": ["outputs", "maps", "budget"],
}  # fmt: skip
"""What comes of each argument by itself, besides the input."""


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("y",),
        ("trace",),
        ("comparison",),
        ("robustness",),
        ("uncertainty_budget",),
        ("y", "trace"),
    ],
)
def test_any_subset_of_the_sections_is_a_page(content: dict[str, Any], given: tuple[str]) -> None:
    text = page.render(model_name="m", x=content["x"], **{name: content[name] for name in given})
    expected = {"inputs", *(section for name in given for section in SECTIONS[name])}
    reader = Reader(text)
    assert {value for value in reader.values("aria-labelledby")} == {
        f"{name}-title" for name in expected
    }
    assert set(data_of(text)) == expected | {"batch", "levels"}
    assert {f"#{name}" for name in expected} <= set(reader.values("href"))


def test_nothing_is_fetched(content: dict[str, Any]) -> None:
    text = page.render(**content)
    assert "://" not in text
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|import\(", text)
    reader = Reader(text)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(reader.tags)
    assert reader.values("src") == []
    assert all(link.startswith("#") for link in reader.values("href"))


def test_the_browser_is_told_to_run_this_script_alone(content: dict[str, Any]) -> None:
    text = page.render(**content)
    reader = Reader(text)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    assert policy in reader.values("content")


def test_every_chart_can_be_drawn(content: dict[str, Any]) -> None:
    images = cp.Gaussian.isotropic(torch.rand(2, 1, 6, 6), stddev=0.1, batch_dims=1)
    classifier = nn.Sequential(nn.Flatten(), network(36)).requires_grad_(False)
    robustness = analyse(classifier, images, samples=100)
    pictures = page.render(model_name="m", x=images, y=images, robustness=robustness)
    named = set(re.findall(r'data-chart="([\w-]+)"', page.render(**content) + pictures))
    source = "".join(path.read_text() for path in ASSETS.iterdir() if path.name.endswith(".js"))
    drawn = re.findall(r"^charts\.([\w-]+) =|^  '?([\w-]+)'?\(place, \{.*\{", source, re.MULTILINE)
    assert named == {first or second for first, second in drawn}


def test_names_are_text_and_nothing_else() -> None:
    model = nn.Sequential()
    model.add_module("a<b>&", nn.Linear(3, 2))
    model.requires_grad_(False)
    x = gaussian()
    found = everything(model, x) | {"model_name": NASTY, "output_names": [NASTY, "plain"]}
    found["comparison"] = cp.compare(model, x, methods={NASTY: cp.Exact()}, samples=200, show=False)
    text = page.render(**found)
    reader, plain = Reader(text), Reader(page.render(**found | {"model_name": "m"}))
    assert len(reader.scripts) == 2
    assert reader.tags == plain.tags
    assert "onerror" not in {name for name, _ in reader.attributes}
    assert reader.shown.count(NASTY) > 3  # the title, the heading, the tables
    data = data_of(text)
    assert data["outputs"]["names"] == [NASTY, "plain"]
    assert data["layers"]["steps"][1]["name"] == "a<b>& linear"
    assert data["sampling"]["rows"][0]["name"] == NASTY


def test_the_charts_have_the_numbers_of_the_gaussian(content: dict[str, Any]) -> None:
    data, y = data_of(page.render(**content)), content["y"]
    (told,) = data["outputs"]["elements"]
    torch.testing.assert_close(torch.tensor(told["mean"]), y.mean, rtol=CLOSE, atol=0)
    torch.testing.assert_close(torch.tensor(told["stddev"]), y.stddev, rtol=CLOSE, atol=0)
    truth = content["comparison"].reference.gaussian
    sampled = {name: torch.tensor(values) for name, values in told["sampled"].items()}
    variance = truth.covariance_matrix.diagonal()
    torch.testing.assert_close(sampled["mean"], truth.mean, rtol=CLOSE, atol=0)
    torch.testing.assert_close(sampled["stddev"], variance.sqrt(), rtol=CLOSE, atol=0)
    torch.testing.assert_close(sampled["mean_stderr"], truth.mean_stderr, rtol=CLOSE, atol=0)
    above = (variance + truth.covariance_stderr.diagonal()).sqrt() - variance.sqrt()
    torch.testing.assert_close(sampled["stddev_stderr"], above, rtol=0.05, atol=0)  # to first order
    (maps,) = data["maps"]["elements"]
    for name, matrix in (
        ("covariance", y.covariance_matrix), ("correlation", y.correlation_matrix)
    ):  # fmt: skip
        found = whole(maps[name], maps["rows"])
        torch.testing.assert_close(found, matrix.double(), rtol=CLOSE, atol=0)


def test_the_table_has_central_intervals(content: dict[str, Any]) -> None:
    rows, y = rows_of(page.render(**content), "Numbers of the outputs"), content["y"]
    assert [row[0] for row in rows] == ["output 0", "output 1"]
    moments = (part.tolist() for part in (y.mean, y.stddev, y.skewness))
    for row, mean, stddev, skewness in zip(rows, *moments, strict=True):
        assert float(row[1]) == pytest.approx(mean, rel=1e-3)
        for cell, share in ((row[3], 0.5), (row[4], 0.95)):
            ends = [float(end) for end in cell.split(" to ")]
            expected = stats.pearson3.interval(share, skewness, mean, stddev)
            assert ends == pytest.approx(expected, rel=1e-3)


def test_steps_are_told_by_the_quantiles_of_their_deviations(content: dict[str, Any]) -> None:
    steps = data_of(page.render(**content))["layers"]["steps"]
    traced = content["trace"].steps
    assert [step["name"] for step in steps] == [step.name for step in traced]
    for told, step in zip(steps, traced, strict=True):
        deviations = sorted(step.variance.double().sqrt().flatten().tolist())
        assert told["quantiles"][0] == pytest.approx(deviations[0], rel=CLOSE)
        assert told["quantiles"][4] == pytest.approx(deviations[-1], rel=CLOSE)
        middle = statistics.median(deviations)
        assert told["quantiles"][2] == pytest.approx(middle, rel=CLOSE)
        assert told["quantiles"] == sorted(told["quantiles"])
        assert sum(told["counts"]) in (0, len(deviations))  # none where all are the same
        worst = step.normality.kolmogorov.abs().max().item()
        assert told["kolmogorov"][1] == pytest.approx(worst, rel=CLOSE)


def test_the_verdict_of_the_comparison_is_at_the_head(content: dict[str, Any]) -> None:
    comparison = content["comparison"]
    assert comparison["GaussianLayers()"].agreement.verdict == "within sampling error"
    head = Reader(page.render(**content).split("<nav")[0]).shown
    assert "Agrees with sampling" in head
    assert "Cumulants() against 500 samples of the network: within sampling error." in head
    assert "3 numbers to 2 classes in 3 operations" in head
    assert (
        f"standard deviation of {float(content['x'].stddev[0]):.3g}, correlated up to 0.23" in head
    )


def test_a_method_that_is_wrong_is_said_to_be() -> None:
    x = cp.Gaussian(torch.zeros(3), torch.eye(3))
    model = network()
    y = cp.propagate(model, x, cp.Linearized())
    comparison = cp.compare(
        model, x, methods=[cp.Exact(), cp.Linearized()], samples=2000, show=False
    )
    head = Reader(page.render(model_name="m", x=x, y=y, comparison=comparison)).shown
    assert "Differs from sampling" in head
    assert "Linearized() against 2,000 samples of the network: standard deviations " in head
    assert " standard errors), means " in head
    assert "GaussianLayers() is within sampling error; unbiased moments" in head
    assert "cp.propagate(model, x, method=cp.ControlVariate(10_000))." in head


def test_a_control_variate_is_named_as_what_the_truth_is_from() -> None:
    x, model = gaussian(), network()
    reference = cp.ControlVariate(256, generator=torch.Generator().manual_seed(0))
    comparison = cp.compare(model, x, methods=cp.Exact(), reference=reference, show=False)
    y = cp.propagate(model, x)
    text = Reader(page.render(model_name="m", x=x, y=y, comparison=comparison)).shown
    assert "against 256 samples of the network with a control variate: " in text
    assert "Found by 256 samples of the network with a control variate." in text


def test_steps_that_are_wrong_come_with_what_to_do() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 2)
    model = nn.Sequential(*layers).requires_grad_(requires_grad=False)
    x = cp.Gaussian(torch.zeros(3), torch.eye(3))
    trace = cp.trace(model, x, samples=20_000, generator=torch.Generator().manual_seed(0))
    head = Reader(page.render(model_name="m", x=x, trace=trace)).shown
    assert "Variances are off on the way" in head
    assert "cp.ControlVariate(10_000)); cheaper" in head
    assert head.count("method=cp.Split()") == 2  # in the head, and below the table


def test_the_estimated_error_is_at_the_head() -> None:
    x = gaussian()
    y = cp.propagate(network(), x)
    assert y.error is not None
    line = f"E{y.error.sentence[1:]}."
    text = Reader(page.render(model_name="m", x=x, y=y)).shown
    assert line in text
    half = torch.full_like(y.mean, 0.5)
    for share, words in ((0.02, "to be accurate"), (0.16, "to be close"), (1.0, "to be off")):
        error = ErrorEstimate(share * half, half * 0, "a test")
        plain = cp.Gaussian(y.mean, y.covariance, error=error)
        assert f"Estimated {words}" in page.render(model_name="m", x=x, y=plain)
    assert "assumes nothing of the logits" in page.render(
        model_name="m", x=x, robustness=analyse(network(), x, samples=100)
    )
    layers = analyse(network(), x, samples=100, method=cp.GaussianLayers())
    assert "may move the probability of a wrong decision by" in page.render(
        model_name="m", x=x, robustness=layers
    )


def test_without_samples_the_page_says_that_nothing_was_checked(content: dict[str, Any]) -> None:
    trace = cp.trace(network(), content["x"])
    text = Reader(page.render(model_name="m", x=content["x"], trace=trace)).shown
    assert "Not checked against sampling" in text
    assert "cp.trace(..., samples=10_000)" in text


def test_the_decision_has_the_numbers_of_the_analysis() -> None:
    model, x = network(outputs=4), gaussian(5)
    found = analyse(model, x, samples=400, generator=torch.Generator().manual_seed(3))
    text = page.render(model_name="m", x=x, robustness=found)
    data = data_of(text)["decision"]
    assert data["names"] == ["class 0", "class 1", "class 2", "class 3"]
    for i, told in enumerate(data["elements"]):
        assert told["label"] == int(found.label[i])
        assert told["classes"] == [0, 1, 2, 3]
        for name in ("probabilities", "sampled"):
            expected = getattr(found, name)
            pair = [expected.probability[i].tolist(), expected.stderr[i].tolist()]
            assert told[name][0] == pytest.approx(pair[0], rel=CLOSE)
            assert told[name][1] == pytest.approx(pair[1], rel=CLOSE)
        assert told["level"] == pytest.approx(float(found.budget.level[i]), rel=CLOSE)
        assert told["reason"] == found.budget.reason[i]
        levels, kept = told["curve"]
        assert levels == sorted(levels)
        assert len(levels) == len(kept) == int((~found.budget.levels[:, i].isnan()).sum())
        margins = dict(zip(told["rivals"], told["margin_mean"], strict=True))
        expected = dict(zip(found.rivals[i].tolist(), found.margin_mean[i].tolist(), strict=True))
        assert margins == pytest.approx(expected, rel=CLOSE)
    worst = int(found.misclassification.probability.argmax())
    assert data["risks"]["shown"][0] == worst
    assert data["risks"]["names"][0] == f"input {worst}"
    heat = data_of(text)["inputs"]["elements"][2]["sensitivity"]
    assert heat == pytest.approx(found.sensitivity[2].tolist(), rel=CLOSE)


def test_a_decision_that_sampling_contradicts_is_not_trusted() -> None:
    model, x = network(outputs=4), gaussian()
    found = analyse(model, x, samples=400, generator=torch.Generator().manual_seed(3))
    assert "Agrees with sampling" in page.render(model_name="m", x=x, robustness=found)
    wrong = Probabilities(found.sampled.probability.roll(1), found.sampled.stderr)
    moved = dataclasses.replace(found, sampled=wrong)
    comparison = cp.compare(model, x, methods=cp.Exact(), samples=200, show=False)
    text = page.render(model_name="m", x=x, robustness=moved, comparison=comparison)
    assert "Differs from sampling" in text


def test_a_noise_budget_that_samples_refute_is_not_stated_as_a_fact() -> None:
    """In the tile, in the sentence and on the card of each input."""
    model, x = network(outputs=4), gaussian(2)
    right = analyse(model, x, samples=400, generator=torch.Generator().manual_seed(3))
    fewer = torch.tensor([0.97, float(right.budget_sampled.probability[1])])
    moved = Probabilities(fewer, torch.tensor([0.001, 0.01]))
    found = dataclasses.replace(right, budget_sampled=moved, samples=100_000)
    found = dataclasses.replace(
        found, budget=dataclasses.replace(found.budget, target=float(fewer[1]))
    )
    assert found.budget_agrees.tolist() == [False, True]
    text = page.render(model_name="m", x=x, robustness=found)
    doubt = "by propagation; samples disagree about 1 of 2 budgets and keep a label with 97 % there"
    assert Reader(text).shown.count(doubt) == 2
    told = data_of(text)["decision"]["elements"]
    assert [one["doubt"] for one in told] == ["samples keep it with 97 %", ""]
    one = Reader(page.render(model_name="m", x=x[0], robustness=found[0])).shown
    assert one.count("by propagation; samples keep it with 97 %") == 2
    plain = Reader(page.render(model_name="m", x=x[1], robustness=found[1])).shown
    assert "by propagation" not in plain


def test_the_noise_budget_of_some_without_noise_is_that_of_the_others() -> None:
    model, mean = network(outputs=4), gaussian(3).mean
    x = cp.Gaussian.isotropic(mean, stddev=torch.tensor([0.0, 0.1, 0.1]), batch_dims=1)
    found = analyse(model, x, samples=400, generator=torch.Generator().manual_seed(3))
    text = Reader(page.render(model_name="m", x=x, robustness=found)).shown
    smaller = min(found.budget.level[1:].tolist())
    assert f"Half of the inputs with noise keep their label with 99 % up to {smaller:.3g} t" in text
    assert f"{smaller:.3g} ×this noise, and half of the inputs with noise keep" in text


def test_what_does_not_vary_has_no_noise_budget_on_the_page() -> None:
    model, mean = network(outputs=4), gaussian(2).mean
    x = cp.Gaussian.isotropic(mean, stddev=0.0, batch_dims=1)
    found = analyse(model, x, samples=100)
    text = page.render(model_name="m", x=x, robustness=found)
    assert "There is no budget: there is no noise to scale." in text
    assert {told["written"] for told in data_of(text)["decision"]["elements"]} == {""}
    one = Reader(page.render(model_name="m", x=x[0], robustness=found[0])).shown
    assert "Noise budget for 99 %: there is no noise to scale." in one
    assert "nonethere is no noise to scale" in one
    assert "1020" not in text + one


@pytest.mark.parametrize(("side", "rows"), [(8, 64), (11, 100)])
def test_an_input_of_a_hundred_elements_has_them_all_in_its_table(side: int, rows: int) -> None:
    x = cp.Gaussian.isotropic(torch.rand(side, side), stddev=0.1)
    text = page.render(model_name="m", x=x)
    assert len(rows_of(text, "Numbers of the input")) == rows
    assert ("The first 100 of 121 elements." in text) == (rows < side**2)


def test_many_classes_show_the_likeliest() -> None:
    model, x = network(outputs=30), gaussian()
    found = analyse(model, x, samples=100, points=64)
    text = page.render(model_name="m", x=x, robustness=found)
    (told,) = data_of(text)["decision"]["elements"]
    probable = found.probabilities.probability.argsort(descending=True)[:20]
    assert set(told["classes"]) == set(probable.tolist())
    assert "Of 30 classes, each input shows its 20 likeliest." in text


def test_an_analysis_of_other_inputs_is_refused() -> None:
    found = analyse(network(), gaussian(2), samples=100)
    with pytest.raises(ValueError, match=r"batch of shape \(2,\) and x has \(\); give the x that"):
        page.render(model_name="m", x=gaussian(), robustness=found)


def test_an_output_that_was_sampled_or_mixed_says_so() -> None:
    model, x = network(), gaussian()
    sampled = cp.propagate(model, x, cp.MonteCarlo(400))
    text = page.render(model_name="m", x=x, y=sampled)
    assert "Mean and covariance are those of 400 evaluations of the network." in text
    mixed = cp.propagate(model, x, cp.Split(components=5))
    count = len(mixed.mixture.weights)
    text = page.render(model_name="m", x=x, y=mixed)
    assert f"The output is a mixture of {count} Gaussians; shown is the one with its mean" in text


def test_a_large_map_shows_the_strongest_of_each_block() -> None:
    size = 250
    factor = torch.randn(size, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = cp.Gaussian(torch.zeros(size, dtype=torch.float64), factor @ factor.T + torch.eye(size))
    text = page.render(model_name="m", x=gaussian(), y=y)
    data = data_of(text)["maps"]
    assert data["block"] == 3
    assert "each cell stands for 3 × 3 pairs" in text
    (told,) = data["elements"]
    found = whole(told["correlation"], told["rows"])
    matrix = y.correlation_matrix.clone().fill_diagonal_(0)
    for i, j in ((0, 0), (0, 5), (40, 12), (83, 83), (83, 2)):
        block = matrix[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].flatten()
        strongest = block[block.abs().argmax()] if block.numel() else torch.tensor(0.0)
        assert float(found[i, j]) == pytest.approx(float(strongest), rel=CLOSE)
    near = matrix.abs()[7].argmax()
    assert told["partners"][7][0] == near
    assert told["partner_correlations"][7][0] == pytest.approx(float(matrix[7, near]), rel=CLOSE)


def test_a_thousand_outputs_stay_small() -> None:
    model, x = network(5, 1000), gaussian(size=5)
    comparison = cp.compare(model, x, methods=cp.Linearized(), samples=200, show=False)
    text = page.render(
        model_name="m", x=x, trace=cp.trace(model, x, samples=500), comparison=comparison
    )
    assert len(text.encode()) < ORDINARY / 3
    assert len(data_of(text)["outputs"]["names"]) == 1000
    assert len(rows_of(text, "Numbers of the outputs")) == 100
    assert "The first 100 of 1,000 rows." in text


def test_very_many_elements_are_never_made_dense() -> None:
    x = cp.Gaussian.isotropic(
        torch.rand(3, 300, 300), stddev=0.1
    )  # a matrix of it would take 580 GB
    text = page.render(model_name="m", x=x, y=x)
    assert len(text.encode()) < ORDINARY
    assert "Of 270,000 outputs, 1,000 that are evenly spaced are shown." in text
    assert "averages over 3 channels and averages of neighbouring pixels (300 × 300" in text
    picture = data_of(text)["inputs"]["elements"][0]["mean_picture"]
    assert (picture["rows"], picture["columns"]) == (64, 64)
    average = float(x.mean.double().mean())
    assert sum(picture["values"]) / 64**2 == pytest.approx(average, rel=1e-3)


def test_a_batch_is_limited_with_a_sentence() -> None:
    x = gaussian(40)
    text = page.render(model_name="m", x=x, y=cp.propagate(network(), x))
    data = data_of(text)
    assert data["batch"] == [f"input {i}" for i in range(24)]
    assert len(data["outputs"]["elements"]) == len(data["inputs"]["elements"]) == 24
    assert "The page shows the 24 first of 40 inputs" in text
    mean = torch.tensor(data["outputs"]["elements"][23]["mean"])
    torch.testing.assert_close(mean, network()(x.mean[23]), rtol=0.2, atol=0.05)


def test_of_a_large_batch_the_riskiest_inputs_are_shown() -> None:
    x = gaussian(30)
    found = analyse(network(), x, samples=100, method=cp.GaussianLayers(), steps=2)
    text = page.render(model_name="m", x=x, y=cp.propagate(network(), x), robustness=found)
    data = data_of(text)
    risk = found.misclassification.probability
    riskiest = sorted(risk.argsort(descending=True, stable=True)[:24].tolist())
    assert data["batch"] == [f"input {i}" for i in riskiest]
    assert "The page shows the 24 riskiest of 30 inputs" in text
    for place, told, given in zip(
        riskiest, data["decision"]["elements"], data["inputs"]["elements"], strict=True
    ):
        assert told["wrong"][0] == pytest.approx(float(risk[place]), rel=CLOSE)
        assert given["mean"] == pytest.approx(x.mean[place].tolist(), rel=CLOSE)
    shown = data["decision"]["risks"]["shown"]
    assert next(i for i in shown if i >= 0) == riskiest.index(int(risk.argmax()))
    assert shown.count(-1) == 6


def test_a_batch_of_large_images_stays_small() -> None:
    x = cp.Gaussian.isotropic(torch.rand(30, 3, 200, 200), stddev=0.1, batch_dims=1)
    model = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(10))
    text = page.render(model_name="m", x=x, y=cp.propagate(model, x, cp.MonteCarlo(10)))
    assert len(text.encode()) < ORDINARY
    assert "The page shows the 8 first of 30 inputs" in text


def test_a_batch_of_two_dimensions_is_named_by_both() -> None:
    x = gaussian(2, 3)
    data = data_of(page.render(model_name="m", x=x, y=x))
    assert data["batch"][4] == "input 1, 1"
    assert data["outputs"]["elements"][4]["mean"] == pytest.approx(x.mean[1, 1].tolist(), rel=CLOSE)


def test_numbers_that_are_none_are_null() -> None:
    broken = torch.tensor([1.0, torch.nan, torch.inf])
    y = cp.Gaussian(broken, torch.diag(torch.tensor([1.0, torch.nan, 2.0])), validate_args=False)
    told = data_of(page.render(model_name="m", x=gaussian(), y=y))["outputs"]["elements"][0]
    assert told["mean"] == [1, None, "inf"]
    assert told["stddev"][1] is None


def test_what_does_not_vary_and_what_is_one_number() -> None:
    x = cp.Gaussian.constant(torch.tensor(2.0))
    text = page.render(model_name="m", x=x, y=x)
    assert "a constant, without noise" in text
    assert "does not vary" in text
    assert "maps" not in data_of(text)


def test_a_file_is_written_as_a_whole_or_not_at_all(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    page.write(target, **content)
    assert target.read_text(encoding="utf-8").rstrip().endswith("</html>")
    before = target.read_bytes()

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        page.write(target, **content)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to report on: the batch or the event is empty"):
        page.render(model_name="m", x=gaussian(0))


def test_names_must_fit_the_outputs(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="3 names for 2 outputs; give one for each, or none"):
        page.render(**content, output_names=["a", "b", "c"])


def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert len(code) == 2
    names = {"cp": cp, "model": network(outputs=3), "x": gaussian()}
    for source in code:
        exec(source, names)
        assert (tmp_path / "report.html").stat().st_size > 10_000
        (tmp_path / "report.html").unlink()
    assert not list(tmp_path.iterdir())


def test_what_is_nearly_certain_is_not_called_certain() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)
    model.weight.copy_(torch.eye(2))
    model.bias.zero_()
    x = cp.Gaussian(torch.tensor([2.75, 0.0]), 0.5 * torch.eye(2))  # kept with Phi(2.75) = 99.7 %
    found = analyse(model, x, samples=2000, generator=torch.Generator().manual_seed(0))
    assert "with a probability of 99.7 %" in decision_sentences(found, ())

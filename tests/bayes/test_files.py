"""Files of estimators: what comes back, and what damaged or hostile ones are told."""

import json
import struct

import numpy as np
import pytest
import torch

import covprop as cp
from covprop import bayes
from covprop.bayes import BayesClassifier, BayesRegressor
from covprop.files import checksum

safetensors = pytest.importorskip("safetensors.torch")

QUICK = {"hidden": (4, 3), "epochs": 3, "random_state": 0}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2))
    return x, 3 + x[:, 0]


REGRESSORS = [
    {},
    {"likelihood": "homoskedastic"},
    {"likelihood": bayes.HomoskedasticGaussian(torch.tensor([0.5]), learned=False)},
    {"likelihood": bayes.HomoskedasticGaussian(0.2), "dtype": "float32"},
    {"prior": bayes.ScaleMixturePrior(0.4, 1.0, 0.1), "method": cp.Series(order=3)},
    {"method": bayes.LocalReparametrisation(7), "dtype": torch.float32},
    {"input_noise": np.array([0.1, 0.2]), "random_state": np.random.RandomState(3)},
    {"hidden": 5, "epochs": np.int64(2), "early_stopping": True, "method": cp.Wu2019()},
    {"hidden": ()},
]


@pytest.mark.parametrize("options", REGRESSORS)
def test_a_regressor_comes_back(options, tmp_path):
    x, y = data()
    model = BayesRegressor(**QUICK | options).fit(x, y)
    model.save(tmp_path / "model.safetensors")
    again = BayesRegressor.load(tmp_path / "model.safetensors")
    for one, other in zip(model.predict(x, True), again.predict(x, True), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(model.log_predictive(x, y), again.log_predictive(x, y))
    assert again.n_features_in_ == 2
    assert again.n_iter_ == model.n_iter_
    again.fit(x, y)  # and can be trained anew
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "labels", [["a", "b", "c"], [1, 2, 3], [1.0, 2.0, 3.0], [True, False], ["yes", "no"]], ids=str
)
def test_a_classifier_comes_back(labels, tmp_path):
    x, _ = data()
    kinds = [np.array(labels)] + ([np.array(labels, object)] if isinstance(labels[0], str) else [])
    for known in kinds:
        y = known[np.arange(30) % len(labels)]
        likelihood = bayes.Categorical(bayes.Delta()) if len(labels) > 2 else None
        model = BayesClassifier(**QUICK, likelihood=likelihood).fit(x, y)
        model.save(tmp_path / "model")
        again = BayesClassifier.load(tmp_path / "model")
        assert again.classes_.dtype == model.classes_.dtype
        assert np.array_equal(again.predict(x), model.predict(x))
        assert np.array_equal(again.predict_proba(x), model.predict_proba(x))


def test_what_a_file_cannot_hold_is_said_before_it_is_written(tmp_path):
    x, y = data()
    method = cp.Exact(activations={torch.sin: cp.register_activation})
    model = BayesRegressor(**QUICK, method=method).fit(x, y)
    with pytest.raises(ValueError, match="a file cannot hold the parameter"):
        model.save(tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path):
    model = BayesRegressor(**QUICK).fit(*data())
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write model"):
        model.save(tmp_path / "nowhere" / "model")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.safetensors"
    BayesRegressor(**QUICK).fit(*data()).save(path)
    return path


def refused(path, match="is not a file", kind=BayesRegressor) -> None:
    with pytest.raises(cp.InvalidFile, match=match) as caught:
        kind.load(path)
    assert str(caught.value).startswith(f"{path} is not a file of {kind.__name__}.save: ")
    assert "\n" not in str(caught.value)


def rewritten(path, change) -> None:
    """The same file with another description or other tensors."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    described = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["covprop"])
    tensors = safetensors.load(content)
    change(described, tensors)
    text = json.dumps(described)
    checked = {} if described.get("format") == 1 else {"sha256": checksum(text, tensors)}
    safetensors.save_file(tensors, path, metadata={"covprop": text, **checked})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        BayesRegressor.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        BayesRegressor.load(tmp_path)


def test_every_flipped_bit_is_refused(saved):
    content = saved.read_bytes()
    places = np.random.default_rng(0).choice(8 * len(content), 60, replace=False)
    for place in places.tolist():
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        saved.write_bytes(damaged)
        refused(saved)


def test_the_checksum_is_one_of_all_that_a_file_says():
    tensors = {"a": torch.zeros(4), "b": torch.zeros(0)}
    others = [
        {"a": torch.zeros(4), "c": torch.zeros(0)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(0)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.zeros(0)},
        {"a": torch.tensor([0.0, 0, 0, -0.0]), "b": torch.zeros(0)},
        {"a": torch.zeros(4)},
    ]
    found = [checksum("{}", item) for item in (tensors, *others)]
    assert len({*found, checksum("{ }", tensors)}) == 7
    assert checksum("{}", dict(reversed(tensors.items()))) == found[0]


def test_a_file_of_the_version_before_comes_back_with_a_warning(saved):
    wanted = BayesRegressor.load(saved).predict(data()[0])
    rewritten(saved, _set("format", value=1))
    with pytest.warns(UserWarning, match="has no checksum, so damage .* save it again") as caught:
        again = BayesRegressor.load(saved)
    assert caught[0].filename == __file__
    assert np.array_equal(again.predict(data()[0]), wanted)


@pytest.mark.parametrize("name", ["exact", {"type": "Exact", "independent_maxima": True}])
def test_a_file_with_the_former_name_of_gaussian_layers_comes_back(saved, name):
    rewritten(saved, _set("parameters", "method", value=name))
    again = BayesRegressor.load(saved)
    wanted = cp.GaussianLayers(independent_maxima=True)
    assert again.method == (name if isinstance(name, str) else wanted)
    assert again.predict(data()[0]).shape == (len(data()[0]),)


def test_a_checksum_cannot_be_left_out(saved):
    content = saved.read_bytes()
    saved.write_bytes(content.replace(b'"sha256"', b'"sha255"'))
    refused(saved, "lacks 'sha256'")
    saved.write_bytes(content.replace(b'format\\": 2', b'format\\": 1'))
    refused(saved, "it has format 1, and this is for 2")


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 0.5, 0.99])
def test_a_truncated_file_is_refused(saved, keep):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    refused(saved)


@pytest.mark.parametrize(
    "content",
    [
        b"not a model at all, but text that goes on",
        b"\x80\x04\x95pickle",
        b"\xff" * 64,
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[[",
    ],
    ids=["text", "pickle", "ones", "huge header", "empty", "broken header"],
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file")


def test_tensors_without_a_description_are_refused(saved):
    safetensors.save_file({"a": torch.zeros(2)}, saved)
    refused(saved, "lacks 'covprop'")


def test_a_file_of_the_other_estimator_is_refused(saved):
    refused(saved, "of a BayesRegressor", BayesClassifier)


def _set(*path, value):
    def change(described, _):
        *before, last = path
        for key in before:
            described = described[key]
        described[last] = value

    return change


def _tensor(name, value):
    def change(_, tensors):
        tensors[name] = value(tensors.get(name))

    return change


HOSTILE = {
    "later format": _set("format", value=3),
    "unknown type": _set("parameters", "prior", value={"type": "os.system", "command": "true"}),
    "unknown field": _set("parameters", "prior", value={"type": "HePrior", "field": 1}),
    "bad field": _set("parameters", "prior", value={"type": "FixedPrior", "stddev": "wide"}),
    "type of a list": _set("parameters", "prior", value={"type": ["HePrior"]}),
    "unknown parameter": _set("parameters", "colour", value="red"),
    "device among parameters": _set("parameters", "device", value="cuda"),
    "no parameters": _set("parameters", value=None),
    "activation": _set("parameters", "activation", value="eval"),
    "huge layers": _set("parameters", "hidden", value=[10**9, 10**9]),
    "many layers": _set("parameters", "hidden", value=[1] * 10**5),
    "features": _set("features", value=3),
    "features as text": _set("features", value="two"),
    "noise": _set("parameters", "input_noise", value=["loud"]),
    "method": _set("parameters", "method", value="best"),
    "seed": _set("seed", value=10**40),
    "names": _set("feature_names", value=["a"]),
    "targets": _set("targets", value=[]),
    "dtype": _set("parameters", "dtype", value="float32"),
    "nan": _tensor("network.0.weight_mean", lambda t: t * float("nan")),
    "shape": _tensor("network.0.weight_mean", lambda t: t[:1].clone()),
    "integers": _tensor("features.mean", lambda t: t.long()),
    "scales": _tensor("features.stddev", lambda t: -t - 1),
    "scale shape": _tensor("features.stddev", lambda t: t[:1].clone()),
    "more tensors": _tensor("network.9.weight", lambda _: torch.zeros(3)),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_contents_are_refused_in_one_sentence(saved, change):
    rewritten(saved, change)
    refused(saved)


def test_a_missing_tensor_is_named(saved):
    rewritten(saved, lambda _, tensors: tensors.pop("network.2.bias_mean"))
    refused(saved, r"network\.2\.bias_mean is nothing")


def test_without_safetensors_the_extra_is_named(saved, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"\.\[bayes\]"):
        BayesRegressor.load(saved)

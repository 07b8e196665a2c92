"""The MNIST files: found, checked, read; no test downloads anything."""

import pytest
import torch

from experiments import files, mnist, training
from experiments.options import Options

needs_data = pytest.mark.skipif(mnist.found() is None, reason="no MNIST files: set COVPROP_DATA")


@needs_data
def test_the_images_are_the_published_ones():
    digits = mnist.load("t10k")
    assert digits.images.shape == (10_000, 1, 28, 28)
    assert digits.labels.bincount().tolist()[:3] == [980, 1135, 1032]
    grey = digits.images * mnist.STDDEV + mnist.MEAN
    assert float(grey.mean()) == pytest.approx(0.1325, abs=5e-5)
    assert float(grey.max()) == pytest.approx(1)


def test_a_changed_file_is_refused(tmp_path):
    for name in mnist.CHECKSUMS[mnist.DIGITS]:
        (tmp_path / name).write_bytes(b"not the file")
    with pytest.raises(ValueError, match="is not the published file"):
        mnist.load("t10k", tmp_path)


def test_a_folder_without_the_files_is_not_found(tmp_path, monkeypatch):
    assert mnist.found(tmp_path) is None
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(files, "FOLDERS", ())
    assert mnist.found() is None


def test_missing_weights_say_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `python -m experiments train-mnist` first"):
        training.trained(Options(smoke=True, weights=tmp_path / "none.pt"))


def test_the_network_is_the_paper_s():
    sizes, x = [], torch.zeros(1, 1, 28, 28)
    for layer in training.network(smoke=False):
        x = layer(x)
        sizes.append(tuple(x.shape[1:]))
    assert sizes == [
        (32, 28, 28), (32, 28, 28), (32, 14, 14), (64, 14, 14), (64, 14, 14), (64, 7, 7), (3136,),
        (1024,), (1024,), (10,),
    ]  # fmt: skip


def test_weights_are_read_once_in_a_run(tmp_path):
    options = Options(smoke=True, weights=tmp_path / "weights.pt")
    torch.save(training.network(smoke=True).state_dict(), options.weights_path())
    first = training.trained(options)
    torch.save(training.network(smoke=True).state_dict(), options.weights_path())
    assert training.trained(options) is first

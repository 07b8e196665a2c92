"""Features of the last hidden layer: the right Gaussians, in the order of their classes."""

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from experiments import penultimate
from experiments.corpus_networks import layers
from experiments.options import Options
from tests.oracles import assert_close


@pytest.fixture(scope="module")
def data() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = layers(64, penultimate.HIDDEN, penultimate.CLASSES, "ReLU").double().eval()
    labels = torch.arange(200) % penultimate.CLASSES
    images = torch.rand(200, 64, dtype=torch.float64) + labels[:, None] / 5
    return model.requires_grad_(requires_grad=False), images, labels


def test_a_class_has_the_moments_of_its_rows(data):
    _, images, labels = data
    x = penultimate.by_class(images, labels)
    rows = images[labels == 3]
    assert_close(x.mean[3], rows.mean(0))
    deviation = rows - rows.mean(0)
    expected = deviation.T @ deviation / len(rows) + penultimate.RIDGE * torch.eye(64)
    assert_close(x.covariance_matrix[3], expected)


def test_the_trace_ends_at_the_head(data):
    model, images, labels = data
    x = penultimate.by_class(images, labels)
    body = cp.propagate(model[:-1], x, cp.GaussianLayers())
    found = penultimate.penultimate(model, x, penultimate.FEATURES)
    assert_close(found.mean, body.mean)
    assert_close(found.covariance_matrix, body.covariance_matrix)
    before = penultimate.penultimate(model, x, penultimate.LAYER)
    assert_close(cp.propagate(torch.relu, before, cp.GaussianLayers()).mean, body.mean)


@pytest.mark.parametrize("source", penultimate.SOURCES)
def test_drawn_features_have_the_means_of_their_classes(source, data):
    """An average of n draws is off by sqrt(trace / n), in the root of the mean square.

    Gaussian layers add an error, of less than a twentieth of the spread on these networks.
    """
    model, images, labels = data
    features, classes = penultimate.drawn(source, model, images, labels, "0")
    assert features.shape == (len(classes), penultimate.HIDDEN[-1])
    body, x = model[:-1], penultimate.by_class(images, labels)
    exact = cp.propagate(body, x, cp.MonteCarlo(20_000, torch.Generator().manual_seed(0)))
    for label in (0, 7):
        own = features[classes == label]
        true, spread = exact.mean[label], exact.variance[label].sum().sqrt()
        if source in (penultimate.IMAGES, penultimate.MOMENTS):
            true = body(images[labels == label]).mean(0)
        allowed = 3 * spread / len(own) ** 0.5 + spread / 20
        assert (own.mean(0) - true).norm() < allowed
        assert (own.mean(0) - exact.mean[9 - label]).norm() > allowed


def test_a_head_learns_and_is_judged():
    torch.manual_seed(0)
    with torch.enable_grad():
        head, features = nn.Linear(2, 2).double(), torch.randn(400, 2).double()
        labels = (features[:, 0] > 0).long()
        penultimate.learn(head, features, labels, 1500)
    assert penultimate.accuracy(head, features, labels) > 0.97
    assert penultimate.accuracy(head, features, 1 - labels) < 0.03


def test_more_networks_are_more_keys():
    assert penultimate.units(Options(instances=3)) == ["0", "1", "2"]
    assert penultimate.units(Options(smoke=True)) == ["0"]

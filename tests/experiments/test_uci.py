"""The UCI sets: checked, cut as published, standardised by their training rows."""

import numpy as np
import pytest
import torch

from experiments import files, uci

needs_data = pytest.mark.skipif(uci.found() is None, reason="no UCI files: set COVPROP_DATA")
SIZES = {
    "boston": (506, 13), "concrete": (1030, 8), "energy": (768, 8), "kin8nm": (8192, 8),
    "naval": (11934, 16), "power": (9568, 4), "protein": (45730, 9), "wine": (1599, 11),
    "yacht": (308, 6),
}  # fmt: skip


@needs_data
@pytest.mark.parametrize("name", ["boston", "naval", "wine", "yacht"])
def test_tables_have_the_published_sizes(name):
    rows, features = SIZES[name]
    assert uci.table(name).shape == (rows, features + 1)
    assert SIZES.keys() == uci.CHECKSUMS.keys()


@needs_data
def test_splits_are_those_of_the_usual_seed():
    found, random = uci.splits("yacht"), np.random.RandomState(1)
    assert len(found) == 20
    for train, test in found:
        order = random.choice(range(308), 308, replace=False)
        assert np.array_equal(np.concatenate([train, test]), order)


@needs_data
def test_training_rows_are_standardised_and_constant_features_are_zero():
    data = uci.standard("naval")
    constant = data.train.x.std(1) == 0
    assert constant.sum(1).tolist() == [2] * 20  # T1 and P1
    assert bool((data.test.x.abs().amax(1)[constant] == 0).all())
    assert float(data.train.x.mean(1).abs().max()) < 1e-4
    assert data.train.x.std(1)[~constant].sub(1).abs().max() < 1e-3
    assert bool(torch.isfinite(data.test.x).all())


@needs_data
def test_held_out_rows_are_training_rows_of_the_first_split():
    data, (train, _) = uci.validation("yacht", 3), uci.splits("yacht")[0]
    assert data.train.y.shape == (3, 250)
    assert data.test.y.shape == (3, 27)
    targets = uci.table("yacht")[train, -1]
    for k in range(3):
        every = torch.cat([data.train.y[k], data.test.y[k]]).double().sort().values
        seen = torch.from_numpy(np.sort(targets))
        assert float(torch.corrcoef(torch.stack([every, seen]))[0, 1]) > 1 - 1e-9


def test_standardising_needs_no_files():
    random = np.random.default_rng(0)
    train, test = random.normal(3, 2, (2, 50, 4)), random.normal(3, 2, (2, 7, 4))
    train[:, :, 1], test[:, :, 1] = 0.1, 0.3  # constant, but not in the test rows
    data = uci.standardised(train, test)
    assert torch.equal(data.test.x[..., 1], torch.zeros(2, 7))
    assert data.scale.numpy() == pytest.approx(train[..., -1].std(1))
    back = data.test.y * data.scale[:, None] + torch.from_numpy(train[..., -1].mean(1))[:, None]
    assert back.numpy() == pytest.approx(test[..., -1], rel=1e-5)


def test_a_constant_target_is_refused():
    with pytest.raises(ValueError, match="there is nothing to learn"):
        uci.standardised(np.ones((1, 5, 2)), np.ones((1, 2, 2)))


def test_repeated_members_stand_side_by_side():
    random = np.random.default_rng(0)
    data = uci.standardised(random.normal(size=(2, 9, 3)), random.normal(size=(2, 4, 3)))
    assert torch.equal(data.repeated(3).test.y[2], data.test.y[0])
    assert torch.equal(data.repeated(3).test.y[3], data.test.y[1])
    assert data.first(1).train.x.shape == (1, 9, 2)


def test_what_is_missing_or_changed_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=files.VARIABLE):
        uci.table("yacht", tmp_path)
    with pytest.raises(ValueError, match="'iris' is none of boston"):
        uci.table("iris", tmp_path)
    (tmp_path / "splits").mkdir()
    for name in ("yacht.csv.gz", "splits/yacht.npz"):
        (tmp_path / name).write_bytes(b"not the file")
    with pytest.raises(ValueError, match="is not the published file"):
        uci.splits("yacht", tmp_path)

"""What the committed results of splitting show."""

import pytest

from experiments import record, split
from experiments.options import RESULTS

GROUPS = split.grouped(record.read(RESULTS / f"{split.NAME}.json"))
every_noise = pytest.mark.parametrize("noise", [str(noise) for noise in split.NOISES])


@every_noise
def test_every_further_direction_lowers_the_error(noise):
    for network, line in (("MLP", split.MORE_DIRECTIONS), ("CNN", split.SKETCHES)):
        images = GROUPS[network, noise]
        assert len(images) >= split.IMAGES[network]
        errors = [split.error(images, way, "stddev") for way in line]
        assert errors == sorted(errors, reverse=True)
        assert errors[2] < 0.5 * errors[0]


@every_noise
def test_further_nodes_in_one_direction_hardly_do(noise):
    one, three, nine, many = (
        split.error(GROUPS["MLP", noise], way, "stddev") for way in split.MORE_NODES
    )
    assert three < 0.7 * one
    assert many == pytest.approx(nine, rel=0.02)
    assert many > 0.8 * three


@every_noise
def test_sketches_are_split_as_well_as_matrices(noise):
    images = GROUPS["CNN", noise]
    for exact, sketched in zip(split.MORE_DIRECTIONS, split.SKETCHES, strict=False):
        ours = split.error(images, sketched, "stddev")
        assert ours == pytest.approx(split.error(images, exact, "stddev"), rel=0.1)


def test_the_error_is_the_average_size_over_images_and_logits():
    images = [{"Exact()": {"stddev": [0.1, -0.3]}}, {"Exact()": {"stddev": [-0.2, 0.2]}}]
    assert split.error(images, split.ONE, "stddev") == pytest.approx(0.2)


def test_rows_are_called_by_what_they_are():
    assert [way.words() for way in split.SKETCHES] == [
        "Sketched(64)", "Sketched(64), 3", "Sketched(64), 3 x 3",
    ]  # fmt: skip
    assert [way.components for way in split.MORE_DIRECTIONS] == [1, 3, 9, 27, 81]

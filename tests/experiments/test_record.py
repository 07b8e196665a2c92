"""Records: what is written, what is continued, what is refused."""

import json
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from experiments import record, runner
from experiments.__main__ import main
from experiments.options import Options
from experiments.randomness import seed_of, seeded
from experiments.record import OtherSettings, Record, merge, read, write
from experiments.table1 import instance
from tests.oracles import assert_close


def counting(stop_at: str | None = None) -> tuple[ModuleType, list[str]]:
    """An experiment of three instances that keeps a list of what it was asked to measure."""
    asked: list[str] = []

    def measure(key: str, options: Options) -> dict[str, Any]:
        asked.append(key)
        if key == stop_at:
            raise KeyboardInterrupt
        return {"seed": seed_of(options.seed, key)}

    experiment = SimpleNamespace(
        NAME="counting",
        settings=lambda options: {"seed": options.seed},
        units=lambda options: [f"a/{index}" for index in range(options.instances)],
        measure=measure,
    )
    return cast(ModuleType, experiment), asked


def test_a_run_that_was_stopped_goes_on_to_the_same_results(tmp_path):
    whole = runner.run(counting()[0], Options(instances=3, out=tmp_path / "whole.json"))
    options = Options(instances=3, out=tmp_path / "parts.json")
    with pytest.raises(KeyboardInterrupt):
        runner.run(counting(stop_at="a/1")[0], options)
    assert list(read(tmp_path / "parts.json")["results"]) == ["a/0"]
    experiment, asked = counting()
    found = runner.run(experiment, options)
    assert [run.pop("results") for run in found.pop("runs")] == [1, 2]  # a run is another fact
    assert [run.pop("results") for run in whole.pop("runs")] == [3]
    assert found == whole
    assert asked == ["a/1", "a/2"]


def test_a_record_says_by_what_each_part_was_made(tmp_path):
    path = tmp_path / "r.json"
    for instances in (1, 3, 3):  # nothing is added by the last
        runner.run(counting()[0], Options(instances=instances, out=path))
    runs = read(path)["runs"]
    assert [run["results"] for run in runs] == [1, 2]
    for run in runs:
        assert re.fullmatch(r"[0-9a-f]{12}\+?|unknown", run["commit"])
        assert run["threads"] == torch.get_num_threads()
        assert run["load"] >= 0
        assert run["load at the end"] >= 0
    (tmp_path / "r.json").rename(tmp_path / "other.json")
    merged = merge(path, [tmp_path / "other.json", tmp_path / "other.json"])
    assert merged.runs == runs


def test_no_commit_is_known_outside_of_a_clone(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() == "unknown"


def test_more_instances_extend_a_record(tmp_path):
    options = Options(instances=2, out=tmp_path / "r.json")
    runner.run(counting()[0], options)
    experiment, asked = counting()
    found = runner.run(experiment, Options(instances=4, out=tmp_path / "r.json"))
    assert asked == ["a/2", "a/3"]
    assert len(found["results"]) == 4


def test_only_what_was_chosen_is_measured(tmp_path):
    experiment, asked = counting()
    options = Options(instances=12, out=tmp_path / "r.json", only=("a/1",))
    runner.run(experiment, options)
    assert asked == ["a/1"]  # and not a/10 or a/11


def test_a_part_of_a_key_may_be_a_pattern(tmp_path):
    experiment, asked = counting()
    options = Options(instances=12, out=tmp_path / "r.json", only=("*/1?",))
    runner.run(experiment, options)
    assert asked == ["a/10", "a/11"]


def test_a_record_of_other_settings_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "r.json"
    runner.run(counting()[0], Options(instances=2, out=path))
    before = path.read_text()
    with pytest.raises(OtherSettings, match=r"seed: 0 there, 1 now\); delete it or give another"):
        runner.run(counting()[0], Options(instances=2, seed=1, out=path))
    assert path.read_text() == before


def test_a_record_says_which_versions_it_was_begun_with(tmp_path):
    path = tmp_path / "r.json"
    write(path, {"seed": 0}, {"a/0": 1})
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "versions": {"covprop": "0.0.1"}}))
    continued = Record(path, {"seed": 0})
    continued.add("a/1", 2)
    continued.write()
    assert read(path)["earlier versions"] == [{"covprop": "0.0.1"}]
    assert read(path)["results"] == {"a/0": 1, "a/1": 2}


def test_runs_side_by_side_are_merged(tmp_path, monkeypatch, capsys):
    options = Options(instances=4, out=tmp_path / "figure2.json", only=("a/0",))
    runner.run(counting()[0], options)
    runner.run(counting()[0], replace(options, out=tmp_path / "other.json", only=("a/0", "a/3")))
    files = [str(tmp_path / "other.json")]
    monkeypatch.setattr(sys, "argv", ["x", "merge", "figure2", *files, "--out", str(tmp_path)])
    main()
    assert list(read(tmp_path / "figure2.json")["results"]) == ["a/0", "a/3"]
    assert "2 results" in capsys.readouterr().out
    runner.run(counting()[0], replace(options, seed=1, out=tmp_path / "seed.json"))
    with pytest.raises(OtherSettings):
        merge(tmp_path / "figure2.json", [tmp_path / "seed.json"])


def test_seeds_depend_on_every_part_and_leave_the_global_generator_alone():
    assert len({seed_of(0, "a"), seed_of(1, "a"), seed_of(0, "b"), seed_of(0, "a", 0)}) == 4
    before = torch.get_rng_state()
    with seeded("x"):
        first = torch.rand(3)
    with seeded("x"):
        assert_close(torch.rand(3), first)
    assert bool((torch.get_rng_state() == before).all())


def test_an_instance_is_its_key():
    options = Options(smoke=True)
    first, second = instance("FC-4/text/3", options), instance("FC-4/text/3", options)
    assert_close(first[0][0].weight, second[0][0].weight)
    assert_close(first[1].covariance_matrix, second[1].covariance_matrix)
    other = instance("FC-4/text/4", options)
    assert not bool((first[0][0].weight == other[0][0].weight).any())
    louder = instance("FC-4/large noise/3", options)
    assert_close(louder[1].covariance_matrix, 10 * first[1].covariance_matrix)
    assert_close(louder[1].mean, first[1].mean)

"""What checkpoints say of losses of the user's own: which runs were trained with which function."""

import json

import pytest

from lockstep.launch.seeds.group import Group
from lockstep.runs.directory import RunDirectory
from lockstep.training.own_loss.fingerprint import Fingerprint
from lockstep.training.own_loss.recorded import facts_of_loss, told_apart

CONFIG = {"engine": "torch", "env": {"id": "CartPole-v1"}, "ppo": {"loss": "losses:mine", "clip_range": 0.2}}


def trained_with(run, number):
    """A run's directory, whose checkpoint has a loss that gave this number of its one sample; None: it has none."""
    checkpoint = run / "checkpoints" / "step_128"
    checkpoint.mkdir(parents=True)
    own_loss = {} if number is None else {"own_loss": Fingerprint({"loss": [number]}).to_json()}
    (checkpoint / "state.json").write_text(json.dumps({"global_step": 128, **own_loss}))
    (run / "config.json").write_text(json.dumps(CONFIG))
    return run


def test_functions_are_told_apart_where_all_else_is_the_same(tmp_path):
    runs = [trained_with(tmp_path / str(n), number) for n, number in enumerate((1.0, 1.0, 2.0, None))]
    names = told_apart([(CONFIG, run) for run in runs])
    assert names == [*["losses:mine, function 1"] * 2, "losses:mine, function 2", "losses:mine"]
    assert told_apart([(CONFIG, run) for run in runs[:2]]) == ["losses:mine"] * 2
    other = CONFIG | {"ppo": CONFIG["ppo"] | {"clip_range": 0.1}}
    assert told_apart([(CONFIG, runs[0]), (other, runs[2])]) == ["losses:mine"] * 2
    assert told_apart([({}, runs[0]), ({"ppo": 3}, runs[2])]) == [None, None]


def test_what_cannot_be_read_says_nothing(tmp_path):
    assert facts_of_loss(tmp_path) is None
    (trained_with(tmp_path / "run", 1.0) / "checkpoints" / "step_128" / "state.json").write_text("{")
    assert facts_of_loss(tmp_path / "run") is None
    assert told_apart([(CONFIG, tmp_path / "run"), (CONFIG, tmp_path)]) == ["losses:mine"] * 2


class Said(list):
    """Stands in for what shows progress."""

    message = list.append


@pytest.mark.parametrize(("numbers", "said"), [((1.0, 1.0), 0), ((1.0, 2.0), 1)])
def test_a_group_says_that_its_seeds_began_with_two_functions(tmp_path, numbers, said):
    paths = [trained_with(tmp_path / f"seed_{n}", number) for n, number in enumerate(numbers)]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    progress = Said()
    Group(RunDirectory(tmp_path, is_writer=False), paths, {}, None, 1, progress)._compare_losses()  # pyright: ignore[reportArgumentType]
    assert len(progress) == said
    assert not said or progress[0].endswith("seed_0: losses:mine, function 1; seed_1: losses:mine, function 2")

"""One setting under two names in one place: refused where the values differ, as nobody sees which one counts."""

import pytest

import lockstep
from lockstep.config.command_line import read_request
from lockstep.config.files import nested
from lockstep.python.run import Run

TWICE = [
    ("lr: 0.001\nppo: {learning_rate: 0.0003}", "ppo.learning_rate 0.0003 given together with lr 0.001; give one"),
    ("ppo: {learning_rate: 0.0003}\nlr: 0.001", "lr 0.001 given together with ppo.learning_rate 0.0003; give one"),
    ("total_timesteps: 9\ntotal_steps: 8", "total_steps 8 given together with total_timesteps 9; give one"),
    ("ppo.gamma: 0.5\nppo: {gamma: 0.9}", "ppo.gamma 0.9 given together with ppo.gamma 0.5; give one"),
    ("ppo: {clip_coef: 0.1, clip_range: 0.3}", "ppo.clip_range 0.3 given together with ppo.clip_coef 0.1; give one"),
    ("env.id: Acrobot-v1", "env.id Acrobot-v1 given together with env CartPole-v1; give one"),
    ("nproc: 2\nworld_size: 4", "world_size 4 given together with nproc 2; give one"),
    (
        "env.kwargs: {key: a}\nenv_kwargs: {key: b}",
        "env_kwargs {'key': '***'} given together with env.kwargs {'key': '***'}; give one",
    ),
    (
        "ppo: {anneal_lr: true}\nppo.schedule: constant",
        "ppo.anneal_lr: True given together with ppo.schedule constant; give one",
    ),
]


@pytest.mark.parametrize(("text", "said"), TWICE)
def test_two_values_in_a_file_are_refused(text, said, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(f"env: CartPole-v1\n{text}\n")
    with pytest.raises(ValueError) as refusal:
        read_request([str(file)])
    assert str(refusal.value) == f"{file}: {said}"


def test_the_same_value_twice_is_one():
    assert nested({"lr": 1, "ppo": {"learning_rate": 1.0}}) == {"ppo": {"learning_rate": 1.0}}
    assert nested({"env": "X-v0", "env_id": "X-v0"}) == {"env": {"id": "X-v0"}}


def test_on_the_command_line_the_last_counts():
    assert read_request(["CartPole-v1", "--lr", "0.5", "--ppo.learning-rate", "0.25"]).config.ppo.learning_rate == 0.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"total_timesteps": 9, "total_steps": 8}, "total_steps 8 given together with total_timesteps 9; give one"),
        ({"lr": 0.5, "ppo": {"learning_rate": 0.25}}, "ppo.learning_rate 0.25 given together with lr 0.5; give one"),
        ({"world_size": 4, "nproc": 2}, "nproc 2 given together with world_size 4; give one"),
        ({"run_name": "a", "name": "b"}, "name b given together with run_name a; give one"),
        ({"env": {"id": "Acrobot-v1"}}, "env.id CartPole-v1 given together with env.id Acrobot-v1; give one"),
        ({"env_id": "Acrobot-v1"}, "env.id CartPole-v1 given together with env_id Acrobot-v1; give one"),
    ],
)
def test_two_values_from_python_are_refused(settings, said, tmp_path):
    with pytest.raises(ValueError) as refusal:
        lockstep.train("CartPole-v1", runs_dir=tmp_path / "runs", **settings)
    assert str(refusal.value) == said
    assert not (tmp_path / "runs").exists()


def test_going_on_to_two_ends_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^total_steps 9 given together with total_timesteps 8; give one$"):
        Run(tmp_path).resume(total_steps=9, total_timesteps=8)

"""Networks of a user's own that forbid an action by their own logits: -1e8 trains, -inf is said in a line."""

import pytest
from command_line import error_line, lockstep

from lockstep import load_policy

WORDS = ("CartPole-v1", "--num-envs", 4, "--num-steps", 8, "--total-steps", 64, "--name", "run", "--eval.interval", 0)


@pytest.mark.parametrize(("engine", "nets"), [("torch", "users_nets"), ("jax", "equinox_nets")])
def test_an_action_is_forbidden_by_a_finite_logit(tmp_path, engine, nets):
    words = ("train", *WORDS, "--engine", engine, "--network.custom", f"{nets}:Forbidding")
    line = error_line(lockstep(*words, cwd=tmp_path))
    assert "in iteration 1, epoch 1, minibatch 1 (" in line
    assert (
        f"network.custom {nets}:Forbidding gave outputs that aren't finite; what is forbidden has a logit of " in line
    )
    ended = lockstep(*words, "--name", "finite", "--network.custom-kwargs", '{"logit": -1e8}', cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    policy = load_policy(tmp_path / "runs" / "finite", trust=True)
    assert policy.probabilities([0.1, 0.2, 0.3, 0.4]).tolist() == [1.0, 0.0]

"""What is offered after a run works for its environment."""

import pytest

from lockstep.commands.next_steps import next_steps
from lockstep.config.run import Config
from lockstep.envs import describe as describing
from lockstep.envs.describe import describe

SUMMARY = {"final_return": None, "global_step": 8, "wall_time": 1.0, "status": "finished", "params_sha256": "0" * 64}


@pytest.fixture
def offers(tmp_path, monkeypatch):
    """Says whether ``lockstep play`` is offered after a run, whose environment this process has described or not."""
    monkeypatch.setattr(describing, "_drawable", {})

    def ask(*, described, **env):
        config = Config.model_validate({"env": env, "engine": "jax"})
        if described:
            describe(config.env)
        return "\nwatch: " in next_steps(tmp_path, SUMMARY, config)

    return ask


@pytest.mark.parametrize(("env_id", "pictures"), [("corridors:Painted", True), ("corridors:Corridor", False)])
def test_an_own_class_for_jax_is_watched_if_it_has_pictures(offers, env_id, pictures):
    assert offers(id=env_id, backend="jax", described=True) is pictures
    wrapped = {"frame_stack": 2, "sticky_actions": 0.5}
    assert offers(id=env_id, backend="jax", described=True, **wrapped) is pictures


def test_what_this_process_has_not_described_is_watched_unless_it_is_the_users_own(offers):
    assert offers(id="gymnax/CartPole-v1", described=False)
    assert offers(id="lockstep/CartPole-v1", described=False)
    assert not offers(id="corridors:Painted", backend="jax", described=False)

"""A rollout on the device: what the host's rollout of the same environments would hold, without the host in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.core.topology import Topology
from lockstep.torch_engine.batch import make_batch
from lockstep.torch_engine.envs import tensor_rollout
from lockstep.torch_engine.envs.tensor_rollout import DeviceNormalizer, TensorRollout
from lockstep.torch_engine.session import Session, open_session


def opened(env_id: str, **settings: Any) -> tuple[Session, TensorRollout]:
    values: dict[str, Any] = {"env": {"id": env_id, "backend": "tensor"}, "num_envs": 4, "num_steps": 16}
    values["env"] |= settings.pop("env", {})
    session = open_session(resolve(Config.model_validate({**values, **settings})), Topology(), None)
    assert isinstance(session.rollout, TensorRollout)
    return session, session.rollout


def test_observations_and_actions_are_tensors_and_rewards_reach_the_host():
    session, rollout = opened("simulators:maniskill", env={"reward_scale": 2.0})
    session.collect()
    assert isinstance(rollout.observations, torch.Tensor)
    assert isinstance(rollout.actions, torch.Tensor)
    place = torch.as_tensor(rollout.observations)[1:, :, :2].numpy()
    going_on = ~rollout.done
    np.testing.assert_allclose(rollout.scores[going_on], -np.linalg.norm(place, axis=2)[going_on], atol=1e-6)
    np.testing.assert_array_equal(rollout.rewards, 2.0 * rollout.scores)
    assert rollout.truncated.any()
    assert rollout.final[:, 2].tolist() == [7.0] * rollout.truncated.sum()
    batch = make_batch(session.state, rollout, session.plan, session.config, session.mode)
    assert batch.observations.shape == (4, 16, 3)
    session.close()


@pytest.mark.parametrize(("name", "told"), [("isaac", False), ("maniskill", True)])
def test_truncations_of_which_a_simulator_says_nothing_are_marked(name, told):
    session, rollout = opened(f"simulators:{name}")
    for _ in range(2):
        session.collect()
        assert rollout.truncated.any()
        assert (rollout.final_missing is None) == told
        if not told:
            np.testing.assert_array_equal(rollout.final_missing, rollout.truncated)
            np.testing.assert_array_equal(rollout.final, rollout.observations[:-1][rollout.truncated])
    session.close()


def test_nothing_goes_through_the_host_while_steps_are_taken(monkeypatch):
    session, _ = opened("simulators:isaac", network={"activation": "gelu"})
    calls: list[str] = []
    for name in ("cpu", "numpy", "tolist", "item"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _n=name, _o=original, **k: (calls.append(_n), _o(self, *a, **k))[1]
        )
    before: list[int] = []
    to_host = TensorRollout.to_host
    monkeypatch.setattr(
        TensorRollout, "to_host", lambda self, *words: (before.append(len(calls)), to_host(self, *words))[1]
    )
    noise = tensor_rollout.device_noise(session.config, session.plan, session.state.net, 0, torch.device("cpu"))
    calls.clear()
    session.collector.collect_with(noise)  # pyright: ignore[reportAttributeAccessIssue]
    assert before == [0]
    assert calls, "at the end everything comes over"
    session.close()


def test_normalising_on_the_device_is_normalising_on_the_host():
    session, rollout = opened("simulators:maniskill", normalize={"observations": True})
    assert session.state.observation_normalizer is not None
    layout, normalizer = session.state.net.observation, session.state.observation_normalizer
    rows = torch.randn(50, 3) * 5
    ours = DeviceNormalizer(layout, normalizer, torch.device("cpu"))(rows)
    np.testing.assert_array_equal(ours.numpy(), normalizer(rows.numpy()))
    session.collect()
    np.testing.assert_array_equal(rollout.observations[:-1].numpy(), normalizer(rollout.raw.numpy()))  # pyright: ignore[reportAttributeAccessIssue]
    assert not torch.equal(torch.as_tensor(rollout.raw), torch.as_tensor(rollout.observations[:-1]))
    session.close()


def test_squashed_actions_reach_the_simulator_within_their_bounds():
    session, rollout = opened("simulators:isaac", network={"squash": True, "log_std_init": 1.0})
    session.collect()
    assert float(torch.as_tensor(rollout.actions).abs().max()) > 1.0
    np.testing.assert_allclose(rollout.native, torch.tanh(torch.as_tensor(rollout.actions)), atol=1e-6)
    session.close()


def test_a_recurrent_policy_carries_nothing_over_an_end():
    session, rollout = opened(
        "simulators:maniskill", network={"recurrent": "gru", "recurrent_size": 8}, ppo={"num_minibatches": 1}
    )
    session.collect()
    batch = make_batch(session.state, rollout, session.plan, session.config, session.mode)
    assert batch.resets is not None
    assert float(batch.resets.sum()) == rollout.done[:-1].sum()
    session.close()


@pytest.mark.parametrize(
    ("kind", "steps", "said"),
    [
        ("index", 16, r"observation 6 in 'at' \(component 0\), none of the 5 choices from 1 to 5, in step 3 of"),
        ("index", 3, r"observation 6 in 'at' \(component 0\), none of the 5 choices from 1 to 5, in step 3 of"),
        ("mask", 16, "an action mask that allows nothing in step 3 of"),
        ("refused", 16, "an action mask that allows nothing in step 3 of"),
        ("masks", 16, r"an action mask that allows nothing of index 1 \(allow every choice of .*\) in step 3 of"),
        ("final", 16, r"observation 0 in 'at' \(component 0\), none of the 5 choices from 1 to 5, in step 7 of"),
    ],
)
def test_an_index_of_no_choice_and_a_mask_that_allows_nothing_are_named(kind, steps, said):
    """In what a rollout leaves, and in what truncated episodes saw last, too."""
    env = {"action_mask": "legal", "kwargs": {"kind": kind}}
    session, _ = opened("straying:on_tensors", env=env, num_shards=1, num_steps=steps)
    with pytest.raises(EnvironmentFailureError, match=f"^environment 1 .* gave {said} iteration 1; "):
        session.collect()
    session.close()


@pytest.mark.parametrize(
    ("kind", "number", "steps", "normalize", "step"),
    [
        ("seen", "nan", 3, False, 3),
        ("seen", "inf", 3, True, 3),
        ("seen", "nan", 16, False, 3),
        ("cut", "nan", 16, False, 7),
        ("cut", "-inf", 7, False, 7),
    ],
)
def test_a_number_that_no_action_followed_is_named(kind, number, steps, normalize, step):
    """It goes into a value, and the non-finite loss would blame the learning rate; clipping would hide infinity."""
    env = {"kwargs": {"kind": kind, "number": number}}
    normalized = {"observations": normalize}
    at = {"env": env, "num_shards": 1, "num_steps": steps, "normalize": normalized}
    session, _ = opened("straying:numbers_on_tensors", **at)
    said = rf"^environment 1 .* gave observation {number} \(component 1\) in step {step} of iteration 1; "
    with pytest.raises(EnvironmentFailureError, match=said):
        session.collect()
    session.close()


def test_a_number_that_nothing_reads_ends_no_run():
    session, rollout = opened("straying:numbers_on_tensors", env={"kwargs": {"kind": "ended"}}, num_shards=1)
    session.collect()
    assert rollout.terminated.any()
    assert rollout.all_finite
    session.close()


def test_a_mask_that_allows_nothing_is_named_in_the_random_actions_too():
    """And not that the simulator refused the action."""
    env = {"action_mask": "legal", "kwargs": {"kind": "refused"}}
    with pytest.raises(EnvironmentFailureError, match=r"^environment 1 .* nothing in step 3 of the random actions"):
        opened("straying:on_tensors", env=env, num_shards=1, num_steps=16, normalize={"returns": True})


def test_a_simulator_may_change_its_arguments():
    session, _ = opened("simulators:taking", env={"kwargs": {"options": {"size": 9}}}, num_shards=2)
    assert session.config.env.kwargs == {"options": {"size": 9}}
    session.close()


def test_every_step_is_a_sign_of_life(monkeypatch):
    """Else other ranks take one with a slow simulator for dead, in the random actions too."""
    signs: list[None] = []
    monkeypatch.setattr(tensor_rollout.life, "progressed", lambda: signs.append(None))
    session, _ = opened("simulators:maniskill")
    for collect in (session.collector.collect_random, session.collect):
        signs.clear()
        collect()
        assert len(signs) == 16
    session.close()


def test_a_device_tells_whether_rows_are_usable():
    """Nothing but the answer comes to the host, with the sum over all rewards."""
    layout = ObservationLayout(
        (
            Leaf("speed", "vector", (1,)),
            Leaf("at", "one_hot", (2,), (3, 2), (0, 5), start=1),
            Leaf("legal", "mask", (4,), start=3),
        )
    )
    action = ActionLayout("multi_discrete", (2, 2), (0, 0), (2,))

    def told(*row: float) -> list[bool]:
        rows = torch.tensor([[0.5, 2, 1, 1, 0, 0, 1], row])
        return [bool(x) for x in tensor_rollout.usable(layout, action, rows)]

    assert told(9.0, 0, 0, 1, 1, 1, 1) == [True, True, True]
    for wrong in (3.0, -1.0, 0.5, torch.nan):
        assert told(9.0, wrong, 0, 1, 1, 1, 1) == [False, True, True]
    assert told(9.0, 0, 2, 1, 1, 1, 1) == [False, True, True]
    assert told(9.0, 0, 0, 1, 1, 0, 0) == [True, True, False]

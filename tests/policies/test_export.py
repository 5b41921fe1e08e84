"""Policies in other programs: ``to_torch`` and ``lockstep export`` beside ``load_policy``."""

import json
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from golden_cases import GRPO, IMAGES, JAX, LSTM, MASKED, NORMALIZED, SHORT
from gymnasium import spaces
from variants import variants

from lockstep import load_policy
from lockstep.cli import main
from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import observation_layout
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.make import make_environment
from lockstep.policies.exported import CLEAR, ExportError, clear_choices, compare, input_arrays
from lockstep.policies.policy import Policy
from lockstep.policies.rows import random_masks
from lockstep.runs.checkpoint import POLICY
from lockstep.torch_engine.export.program import write_program
from lockstep.torch_engine.state import make_net
from lockstep.training.session import policy_of

KINDS = {
    "MLP": ("lockstep/CartPole-v1", *SHORT),
    "normalised HalfCheetah": ("HalfCheetah-v5", *SHORT, *NORMALIZED),
    "masked": ("small_worlds:Doors-v0", *SHORT, *MASKED),
    "image": ("lockstep/GridWorldPixels-v0", *SHORT, *IMAGES),
    "Dict": ("small_worlds:Lantern-v0", *SHORT, *IMAGES, "--normalize.observations"),
    "LSTM": ("lockstep/CartPole-v1", *SHORT, *LSTM),
    "GRPO": ("lockstep/PushCube-v0", *SHORT, *GRPO),
}
SQUASHED = ("Pendulum-v1", *SHORT, "--network.squash", "true", "--network.state-dependent-std", "true")
ENGINES = [pytest.param((), id="torch"), pytest.param(JAX, id="jax", marks=pytest.mark.long)]


def near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def stacked(observations):
    """A batch of observations, each part of a Dict with a leading axis."""
    if isinstance(observations[0], dict):
        return {key: stacked([each[key] for each in observations]) for key in observations[0]}
    return np.stack(observations)


def tensors(observations):
    if isinstance(observations, dict):
        return {key: tensors(each) for key, each in observations.items()}
    return torch.from_numpy(observations)


def batches(policy):
    """1,000 observations of the environment's own space, and masks: eight steps of 125 for what remembers."""
    environment = make_environment(policy.config.env)
    environment.observation_space.seed(0)
    generator = np.random.default_rng(0)
    steps = 8 if policy.config.network.recurrent else 1
    for _ in range(steps):
        count = 1000 // steps
        observations = stacked([environment.observation_space.sample() for _ in range(count)])
        apart = policy.observation.mask is not None and policy.observation.mask.apart
        yield observations, random_masks(policy.action.choices, count, generator) if apart else None
    environment.close()


def hold(policy, found, observations, mask):
    """Compares one step of a module or a file with the policy, which remembers the step."""
    rows, _ = policy._rows(observations, mask)
    wanted = policy.outputs(rows, policy.recurrent_state(len(rows)))
    if policy.config.algorithm == "ppo":
        near(found["value"], policy.value(observations, mask))
    assert ("value" in found) == (policy.config.algorithm == "ppo")
    if policy.action.discrete:
        shares = policy.probabilities(observations, mask)
        shares = np.concatenate(shares, -1) if isinstance(shares, tuple) else shares
        parts = torch.from_numpy(found["logits"]).split(policy.action.choices, -1)
        near(torch.cat([p.softmax(-1) for p in parts], -1), shares)
    actions = policy(observations, action_mask=mask)
    assert found["action"].shape == actions.shape
    if policy.action.discrete:
        clear = clear_choices(policy.action, wanted["logits"]).reshape(actions.shape)
        assert clear.mean() > 0.9
        assert np.array_equal(found["action"][clear], actions[clear])
        near(found["logits"], wanted["logits"])
        return
    near(found["action"], actions)
    density = torch.distributions.Normal(torch.from_numpy(found["mean"]), torch.from_numpy(found["std"]))
    if not policy.config.network.squash:
        near(density.log_prob(torch.from_numpy(actions).flatten(1)).sum(-1), policy.log_prob(observations, actions))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", variants(KINDS, [kind for kind in KINDS if kind not in ("image", "masked", "GRPO")]))
def test_module_and_files_are_the_policy(trained, tmp_path, capsys, kind, engine):
    ort = pytest.importorskip("onnxruntime")
    run, model, program = trained(*KINDS[kind], *engine), tmp_path / "policy.onnx", tmp_path / "policy.pt2"
    assert main(["export", str(run.path), "--onnx", str(model), "--torch", str(program)]) == 0
    assert capsys.readouterr().out.count("on 1,000 random observations, differs from the policy by ") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy.onnx", "policy.pt2"]

    session, loaded = ort.InferenceSession(str(model)), torch.export.load(str(program)).module()
    facts = session.get_modelmeta().custom_metadata_map
    names = [output.name for output in session.get_outputs()]
    inputs = [each.name for each in session.get_inputs()]
    assert facts["environment"] == KINDS[kind][0]
    assert facts["params_sha256"] == run.summary["params_sha256"]
    assert [each["name"] for each in json.loads(facts["inputs"])] == inputs
    assert facts["step"] == str(run.summary["global_step"])

    policies = [load_policy(run.path) for _ in range(3)]
    module = policies[0].to_torch()
    size = module.state_size
    states = [np.zeros((125, size), np.float32) for _ in range(3)]
    for observations, mask in batches(policies[0]):
        given = input_arrays(policies[0].observation, policies[0]._rows(observations, mask)[0], states[0])
        with torch.no_grad():
            own = module(tensors(observations), mask, torch.from_numpy(states[0]) if size else None)
            ran = loaded(*(torch.from_numpy(given[n] if n != "state" else states[1]) for n in inputs))
        found = [{name: x.numpy() for name, x in each.items()} for each in (own, ran)]
        given = {name: x if name != "state" else states[2] for name, x in given.items()}
        found.append(dict(zip(names, session.run(None, given), strict=True)))
        for policy, each in zip(policies, found, strict=True):
            assert list(each) == names
            hold(policy, each, observations, mask)
        states = [each.get("next_state", states[0]) for each in found]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_squashed_policy_has_its_density_within_the_bounds(trained, engine):
    policy = load_policy(trained(*SQUASHED, *engine).path)
    module, generator = policy.to_torch(), np.random.default_rng(0)
    observations = generator.normal(size=(1000, 3)).astype(np.float32)
    with torch.no_grad():
        found = {name: x.numpy() for name, x in module(torch.from_numpy(observations)).items()}
    hold(policy, found, observations, None)
    low, high = policy.action.low[0], policy.action.high[0]
    grid = np.linspace(low, high, 200_001)[1:-1, None]
    densities = np.exp(policy.log_prob(np.repeat(observations[:1], len(grid), 0), grid))
    assert float(densities.sum() * (high - low) / 200_000) == pytest.approx(1.0, abs=1e-2)


def test_values_probabilities_and_log_probs_of_one_observation(trained):
    policy = load_policy(trained(*KINDS["masked"]).path)
    observation, mask = np.eye(3, dtype=np.float32)[1], np.array([1, 0, 1, 0, 1])
    door, push = policy.probabilities(observation, mask)
    assert [door.shape, push.shape, door.dtype] == [(3,), (2,), np.float32]
    assert [door[1], *push.tolist()] == [0.0, 0.0, 1.0]
    assert door.sum() == pytest.approx(1.0)
    assert isinstance(policy.value(observation, mask), float)
    assert policy.log_prob(observation, [2, 1], mask) == pytest.approx(np.log(door[2]), rel=1e-5)
    assert policy.log_prob(observation, [1, 1], mask) < -1e7
    assert policy.value(observation[None], mask).shape == (1,)


def test_what_has_no_answer_is_said_in_a_line(trained):
    grpo, cheetah = (load_policy(trained(*KINDS[kind]).path) for kind in ("GRPO", "normalised HalfCheetah"))
    masked, observation = load_policy(trained(*KINDS["masked"]).path), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"value: a policy of algorithm grpo has no critic"):
        grpo.value(np.zeros(grpo.observation.width, np.float32))
    with pytest.raises(ValueError, match=r"probabilities: actions are continuous and have densities; use log_prob"):
        cheetah.probabilities(np.zeros(17, np.float32))
    with pytest.raises(ValueError, match=r"action of shape \(5,\) for 1 observations; needed is \(1, 6\) or \(6,\)"):
        cheetah.log_prob(np.zeros(17, np.float32), np.zeros(5))
    with pytest.raises(ValueError, match=r"action: \[3, 0\] is out of range; use 0 to 2, 0 to 1"):
        masked.log_prob(observation, [3, 0])
    with pytest.raises(ValueError, match=r"observation of shape \(17,\); this policy takes batches \(n, 17\)$"):
        cheetah.to_torch()(torch.zeros(17))


def test_a_recurrent_policy_estimates_from_what_it_remembers_and_remembers_nothing_of_that(trained):
    policy = load_policy(trained(*KINDS["LSTM"]).path)
    observations = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    module, state, values = policy.to_torch(), None, []
    assert torch.equal(module.initial_state(2), torch.zeros(2, 32))
    for observation in observations:
        with torch.no_grad():
            found = module(torch.from_numpy(observation[None]), state=state)
        state = found["next_state"]
        values.append((policy.value(observation), policy.value(observation), float(found["value"])))
        policy(observation)
    near([first for first, _, _ in values], [third for _, _, third in values])
    assert all(first == second for first, second, _ in values)
    policy.reset()
    assert abs(policy.value(observations[-1]) - values[-1][0]) > 1e-4


def test_a_module_can_be_trained_further(trained):
    module = load_policy(trained(*KINDS["normalised HalfCheetah"]).path).to_torch()
    found = module(torch.randn(8, 17))
    (found["mean"].square().sum() + found["value"].sum() + found["std"].sum()).backward()
    assert {name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()} == set()
    assert {name for name, _ in module.named_buffers()} == {
        *("observation_mean", "observation_scale", "action_low", "action_high"),
    }
    assert "policy.actor.0.weight" in module.state_dict()


def test_an_index_beyond_the_whole_numbers_of_float32_is_given_as_it_is():
    layout = observation_layout(spaces.Dict({"at": spaces.Discrete(4, start=2**24), "to": spaces.Discrete(3)}))
    rows = np.array([[0, 2], [1, 0], [3, 1]], np.float32)
    arrays = input_arrays(layout, rows, np.zeros((3, 0), np.float32))
    assert arrays["observation/at"].tolist() == [2**24, 2**24 + 1, 2**24 + 3]
    assert arrays["observation/to"].tolist() == [2, 0, 1]


class Wide(gymnasium.Env):
    """Takes numbers within some bounds."""

    observation_space = spaces.Box(-1, 1, (3,))

    def __init__(self, low, high):
        self.action_space = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


def squashed_within(low, high, engine="torch"):
    """A policy of random parameters."""
    gymnasium.register("Wide-v0", lambda **kwargs: Wide(**kwargs))
    try:
        settings = {"env": {"id": "Wide-v0", "kwargs": {"low": low, "high": high}}, "engine": engine}
        config = resolve(Config.model_validate({**settings, "network": {"squash": True, "hidden_sizes": [8]}}))
        description = describe(config.env)
        net, generator = make_net(config, description.observation, description.action), np.random.default_rng(0)
        arrays = {name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in net.shapes().items()}
        return policy_of(config, description, {POLICY + name: array for name, array in arrays.items()}, 0)
    finally:
        del gymnasium.registry["Wide-v0"]


def test_a_file_is_held_to_squashed_actions_by_half_their_span():
    """A tanh that is rounded otherwise shows around 0, where float32 has no more digits than at the bounds."""
    policy = squashed_within([-1e4, 0.0], [1e4, 1.0])

    def run(inputs, differing=(0.0, 0.0)):
        found = policy.outputs(inputs["observation"], np.zeros((len(inputs["observation"]), 0), np.float32))
        half = np.array([1e4, 0.5], np.float32)
        tanh = np.tanh(found["mean"]) + np.float32(1.0) + np.array(differing, np.float32)
        return found | {"action": np.array([-1e4, 0.0], np.float32) + half * tanh}

    assert compare(policy, run) == 0.0
    assert 1e-3 < compare(policy, lambda inputs: run(inputs, (1.2e-7, 1.2e-7))) < 3e-3
    for component in np.eye(2):
        with pytest.raises(ExportError, match="action differs from the policy's by up to"):
            compare(policy, lambda inputs, moved=component: run(inputs, 2e-3 * moved))


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_squashed_component_with_equal_bounds_has_no_part_in_the_density(engine):
    policy = squashed_within([-2.0, 0.5, 0.1], [2.0, 0.5, 0.1], engine)
    observation = np.array([0.3, -0.4, 0.9], np.float32)
    grid = np.linspace(-2.0, 2.0, 20_001)[1:-1]
    actions = np.stack([grid, np.full(len(grid), 0.5), np.full(len(grid), 0.1)], 1)
    densities = np.exp(policy.log_prob(np.repeat(observation[None], len(grid), 0), actions))
    assert float(densities.sum() * 4.0 / 20_000) == pytest.approx(1.0, abs=1e-2)
    assert np.isfinite(policy.log_prob(observation, policy(observation)))


OUTSIDE = """
import json, sys, torch
program, inputs, out = sys.argv[1:]
extra = {"metadata.json": ""}
loaded = torch.export.load(program, extra_files=extra).module()
facts = json.loads(extra["metadata.json"])
given = torch.load(inputs)
found = loaded(*(given[each["name"]] for each in facts["inputs"]))
assert not any(name.partition(".")[0] == "lockstep" for name in sys.modules)
try:
    import lockstep
except ImportError:
    torch.save(found, out)
"""


def test_a_program_runs_where_there_is_no_lockstep(trained, tmp_path):
    run = trained(*KINDS["Dict"])
    assert main(["export", str(run.path), "--torch", str(tmp_path / "policy.pt2")]) == 0
    policy = load_policy(run.path)
    rows = policy.random_rows(1000, keyed_generator(1, "test"))
    arrays = input_arrays(policy.observation, rows, policy.recurrent_state(len(rows)))
    torch.save({name: torch.from_numpy(x) for name, x in arrays.items()}, tmp_path / "inputs.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    hidden = "import sys; sys.modules['lockstep'] = None\n" if installed_for_all() else ""
    script = hidden + OUTSIDE.replace("sys.modules)\ntry", "sys.modules if sys.modules[name])\ntry")
    command = [sys.executable, "-I", "-c", script, *(str(tmp_path / n) for n in ("policy.pt2", "inputs.pt", "out.pt"))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, wanted = torch.load(tmp_path / "out.pt"), policy.outputs(rows, policy.recurrent_state(len(rows)))
    for name, each in wanted.items():
        near(found[name].detach(), each)


def installed_for_all():
    """Whether this Python finds lockstep by itself, so that the other program must be kept from it."""
    words = [sys.executable, "-I", "-c", "import lockstep"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def changed(module):
    """The module with one weight of its actor changed."""
    with torch.no_grad():
        module.policy.get_parameter("actor.0.weight")[0, 0] += 0.1
    return module


def test_a_changed_weight_is_found(trained, tmp_path, monkeypatch, capsys):
    policy, whole = load_policy(trained(*KINDS["MLP"]).path), Policy.to_torch
    assert compare(policy, write_program(whole(policy), tmp_path / "same.pt2", {})) < 1e-5
    with pytest.raises(ExportError, match=r"logits differs from the policy's by up to 0\.\d+"):
        compare(policy, write_program(changed(whole(policy)), tmp_path / "other.pt2", {}))
    monkeypatch.setattr(Policy, "to_torch", lambda policy: changed(whole(policy)))
    path = tmp_path / "new" / "policy.pt2"
    assert main(["export", str(trained(*KINDS["MLP"]).path), "--torch", str(path)]) == 1
    error = capsys.readouterr().err
    assert "policy.pt2: logits differs from the policy's by up to 0." in error
    assert error.count("\n") == 1
    assert not any(path.parent.iterdir())


def test_a_clear_action_that_is_another_is_found(trained):
    policy = load_policy(trained(*KINDS["MLP"]).path)

    def run(inputs):
        found = policy.outputs(inputs["observation"], np.zeros((1000, 0), np.float32))
        return found | {"action": found["logits"].argmin(-1)}

    with pytest.raises(ExportError, match=r"\d+ of \d+ clear actions are others than the policy's"):
        compare(policy, run)
    assert CLEAR == 1e-4


def test_what_export_refuses(trained, capsys):
    run = str(trained(*KINDS["MLP"]).path)
    for words, line in (
        ((), "which file? give --onnx FILE.onnx, --torch FILE.pt2, or both (lockstep export --help)"),
        (("--onnx", "policy.pb"), "--onnx policy.pb must end in .onnx"),
        (("--torch", "policy.pt"), "--torch policy.pt must end in .pt2"),
        (("--torch", "p.pt2", "--checkpoint", "7"), "holds no checkpoint of step 7"),
    ):
        assert main(["export", run, *words]) == 2
        assert line in capsys.readouterr().err


def test_the_check_of_an_onnx_model_leaves_nothing_at_home(trained, tmp_path):
    """ONNX Runtime's telemetry keeps an id and a database there, except where ``CI`` is set."""
    pytest.importorskip("onnxruntime")
    home, run = tmp_path / "home", trained(*KINDS["MLP"]).path
    home.mkdir()
    gone = ("XDG_CACHE_HOME", "CI", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY")
    environment = {name: value for name, value in os.environ.items() if name not in gone} | {"HOME": str(home)}
    command = [sys.executable, "-m", "lockstep", "export", str(run), "--onnx", "policy.onnx"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not [file for file in home.rglob("*") if "onnxruntime" in str(file) or "Microsoft" in str(file)]


CUSTOM = (*KINDS["MLP"], "--network.custom")


def test_a_custom_network_is_exported_where_it_can_be_traced(trained, tmp_path, capsys):
    run = trained(*CUSTOM, "users_nets:Tiny")
    assert main(["export", str(run.path), "--torch", str(tmp_path / "policy.pt2")]) == 0
    run = trained(*CUSTOM, "branching_nets:Branching")
    assert main(["export", str(run.path), "--torch", str(tmp_path / "other.pt2")]) == 1
    error = capsys.readouterr().err
    assert "other.pt2: branching_nets:Branching can't be traced: " in error
    assert error.count("\n") == 1

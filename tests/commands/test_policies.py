"""A trained policy: ``lockstep eval``, ``lockstep play`` and ``load_policy``."""

import json
import re
import shutil
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from command_line import CARTPOLE, NEEDS_PROC, SMALL, lockstep, marked, running, wait_until

from lockstep import load_policy
from lockstep.cli import main
from lockstep.core.shards import keyed_seed
from lockstep.envs.gymnasium.make import make_environment
from lockstep.policies import videos

PENDULUM = ("Pendulum-v1", *SMALL, "--normalize.observations", "--stop-at-step", 256)


def evaluation(run, capsys, *words):
    assert main(["eval", str(run.path), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def returns_by_hand(run, env_id, episodes):
    """Returns of the policy in a plain Gymnasium loop, on the starts of an evaluation."""
    policy, env, returns = load_policy(run.path), gymnasium.make(env_id), []
    for episode in range(episodes):
        observation, _ = env.reset(seed=keyed_seed(0, "eval", episode))
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy(observation))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


@pytest.mark.parametrize(("words", "tolerance"), [(CARTPOLE, 0), (PENDULUM, 1e-4)], ids=["CartPole", "Pendulum"])
def test_an_evaluation_is_what_a_plain_loop_finds(trained, capsys, words, tolerance):
    run = trained(*words)
    found, returns = evaluation(run, capsys, "--episodes", "5"), returns_by_hand(run, words[0], 5)
    for name, value in (
        ("mean", np.mean(returns)),
        ("std", np.std(returns)),
        ("min", min(returns)),
        ("max", max(returns)),
    ):
        assert found[f"return_{name}"] == pytest.approx(value, rel=tolerance)
    assert found["episodes"] == 5
    assert found["environment"] == words[0]
    assert found["global_step"] == run.summary["global_step"]
    assert found["length_mean"] == (found["return_mean"] if words is CARTPOLE else 200)


LSTM = (*CARTPOLE, "--network.recurrent", "lstm", "--network.recurrent-size", 8, "--network.sequence-length", 8)
DOORS = ("small_worlds:Doors-v0", *SMALL, "--env.action-mask", "info", "--stop-at-step", 256)
LANTERN = ("small_worlds:Lantern-v0", *SMALL, "--normalize.observations", "--stop-at-step", 256)


@pytest.mark.parametrize("words", [LSTM, DOORS, LANTERN], ids=["LSTM", "masked MultiDiscrete", "Dict with an image"])
def test_evaluating_and_playing_are_what_a_plain_loop_finds(trained, capsys, monkeypatch, words):
    monkeypatch.setattr(videos, "drawn_environment", lambda config, *_: make_environment(config))
    run, returns = trained(*words), []
    policy, env = load_policy(run.path), gymnasium.make(words[0])
    for episode in range(4):
        policy.reset()
        observation, info = env.reset(seed=keyed_seed(0, "eval", episode))
        total, over = 0.0, False
        while not over:
            action = policy(observation, action_mask=mask_of(info))
            observation, reward, terminated, truncated, info = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    assert evaluation(run, capsys, "--episodes", "4")["return_mean"] == pytest.approx(np.mean(returns))
    assert [r for r, *_ in videos.play(policy, None, 4)] == pytest.approx(returns)


def mask_of(info):
    return np.concatenate(info["action_mask"]) if "action_mask" in info else None


def test_a_recurrent_policy_remembers_until_it_is_reset(trained):
    policy, observation = load_policy(trained(*LSTM).path), np.array([0.5, -1.0, 0.1, 2.0], np.float32)
    rows = policy.observation.encode(observation)[None]
    policy.native(rows)
    first = policy._recurrent_state.copy()
    policy.native(rows)
    assert not np.array_equal(policy._recurrent_state, first)
    policy.reset()
    policy.native(rows)
    assert np.array_equal(policy._recurrent_state, first)


def test_a_masked_policy_never_takes_what_is_forbidden(trained):
    policy, masks = load_policy(trained(*DOORS).path), np.array([[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]])
    observations = np.eye(3, dtype=np.float32)[[1, 0]]
    for _ in range(50):
        actions = policy(observations, deterministic=False, action_mask=masks)
        assert [actions[0][0] in (0, 2), actions[0][1], *actions[1]] == [True, 1, 1, 0]
    free = {tuple(policy(observations[0], deterministic=False)) for _ in range(50)}
    assert any(door == 1 or push == 0 for door, push in free)


def test_evaluations_repeat_themselves_and_depend_on_seed_and_checkpoint(trained, capsys):
    run = trained(*CARTPOLE)
    first = evaluation(run, capsys)
    assert evaluation(run, capsys) == first
    assert evaluation(run, capsys, "--seed", "7") != first
    assert evaluation(run, capsys, "--stochastic") != first
    early = evaluation(run, capsys, "--checkpoint", "384")
    assert early["global_step"] == 384
    assert early["return_mean"] < first["return_mean"]


def test_an_evaluation_in_words(trained, capsys):
    run = trained(*CARTPOLE)
    found = evaluation(run, capsys)
    assert main(["eval", str(run.path)]) == 0
    assert capsys.readouterr().out == (
        f"CartPole-v1 after 1,024 training steps, 20 episodes: return {found['return_mean']:,.2f} ± "
        f"{found['return_std']:,.2f} (min {found['return_min']:,.2f}, max {found['return_max']:,.2f}), "
        f"length {found['length_mean']:,.1f}\n"
    )
    one = evaluation(run, capsys, "--episodes", "1")
    assert main(["eval", str(run.path), "--episodes", "1"]) == 0
    assert capsys.readouterr().out == (  # one episode has no spread
        f"CartPole-v1 after 1,024 training steps, 1 episode: return {one['return_mean']:,.2f}, "
        f"length {one['length_mean']:,.1f}\n"
    )


def test_a_video_has_a_frame_of_every_step(trained, tmp_path):
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    video = tmp_path / "videos" / "out.mp4"
    ended = lockstep("play", trained(*CARTPOLE).path, "--video", video, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    match = re.fullmatch(rf"CartPole-v1: return (\d+)\.00 → {re.escape(str(video))}\n", ended.stdout)
    assert match, ended.stdout
    frames = [np.asarray(frame) for frame in imageio.get_reader(video)]
    assert len(frames) == int(match.group(1))  # CartPole pays 1 a step
    assert frames[0].shape == (400, 600, 3)
    assert frames[0].std() > 0
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 20


@NEEDS_PROC
def test_playing_ends_on_a_signal(trained, tmp_path):
    pytest.importorskip("pygame")
    words = ("play", trained("faulty:FaultyCartPole-v0", *SMALL).path, "--video", "out.mp4")
    with running(*words, cwd=tmp_path, FAULT="hang") as (process, mark):
        wait_until(lambda: len(marked(mark)) > 1, "no encoder is started")
        process.terminate()
        assert process.wait(600) in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_playing_needs_a_screen_or_an_mp4_file(trained, tmp_path, capsys, monkeypatch):
    run = trained(*CARTPOLE)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert main(["play", str(run.path)]) == 2
    assert "--video out.mp4 (or .gif) writes a file instead" in capsys.readouterr().err
    assert main(["play", str(run.path), "--video", str(tmp_path / "out.avi")]) == 2
    assert "out.avi must end in .mp4 or .gif" in capsys.readouterr().err
    assert main(["play", str(run.path), "--terminal", "--video", str(tmp_path / "out.gif")]) == 2
    assert "out.gif with --terminal; give one of them" in capsys.readouterr().err
    assert main(["play", str(run.path), "--terminal"]) == 2
    assert "CartPole-v1 can't be shown as text; --video out.mp4 (or .gif) shows it" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--n-eval-episodes", "5"], "--n-eval-episodes: write --episodes"),
        (["--deterministic"], "--deterministic: the most likely actions are the default; leave it out"),
        (["--luck"], "unrecognized arguments: --luck (lockstep eval --help)"),
    ],
)
def test_options_of_another_library_are_said_in_our_words(capsys, words, line):
    assert main(["eval", "run", *words]) == 2
    assert f"lockstep: error: {line}" in capsys.readouterr().err


def test_a_policy_takes_one_observation_or_a_batch(trained):
    policy = load_policy(trained(*CARTPOLE).path)
    observations = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    actions = policy(observations)
    assert actions.shape == (64,)
    assert set(actions.tolist()) == {0, 1}
    one = policy(observations[0])
    assert isinstance(one, int)
    assert one == actions[0]
    assert [policy(row) for row in observations] == actions.tolist()
    assert policy(observations.astype(np.float64).tolist()).tolist() == actions.tolist()


def test_continuous_actions_lie_within_their_bounds(trained):
    policy = load_policy(trained(*PENDULUM).path)
    observations = np.random.default_rng(0).normal(scale=3.0, size=(256, 3)).astype(np.float32)
    sampled = policy(observations, deterministic=False)
    assert sampled.shape == (256, 1)
    assert sampled.dtype == np.float32
    assert np.abs(sampled).max() == 2.0
    assert not np.array_equal(sampled, policy(observations))
    assert policy(observations[0]).shape == (1,)


@pytest.mark.parametrize("shape", [(3,), (5,), (2, 3), (2, 2, 4), ()])
def test_an_observation_of_another_shape_is_refused(trained, shape):
    policy = load_policy(trained(*CARTPOLE).path)
    with pytest.raises(ValueError, match=re.escape(f"observation of shape {shape}; this policy takes (4,)")):
        policy(np.zeros(shape, np.float32))


def test_what_is_no_observation_is_said(trained):
    with pytest.raises(ValueError, match=r"a pair of observation and info, as env\.reset"):
        load_policy(trained(*CARTPOLE).path)(gymnasium.make("CartPole-v1").reset())
    policy = load_policy(trained(*LANTERN).path)
    observation, _ = make_environment(policy.config.env).reset(seed=0)
    names = ", ".join(sorted(leaf.name for leaf in policy.observation.leaves))
    missing = dict(list(observation.items())[1:])
    for wrong, given in ((missing, f"a dict of {sorted(missing)}"), (np.zeros(4), "ndarray"), (None, "NoneType")):
        with pytest.raises(ValueError) as caught:
            policy(wrong)
        line = f"observation: {given}; this policy takes what its environment gives, with {names}"
        assert str(caught.value) == line


def test_a_policy_predicts_as_one_of_stable_baselines3(trained):
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation")
    monitor = pytest.importorskip("stable_baselines3.common.monitor")
    for words in (CARTPOLE, LSTM):
        policy, env = load_policy(trained(*words).path), gymnasium.make("CartPole-v1")
        returns, lengths = evaluation.evaluate_policy(
            policy, monitor.Monitor(env), 3, deterministic=True, return_episode_rewards=True
        )
        assert returns == [float(length) for length in lengths]
        observations = np.random.default_rng(0).normal(size=(6, 2, 4)).astype(np.float32)
        policy.reset()
        by_hand = [policy(each) for each in observations]
        state, found = None, []
        for each in observations:
            actions, state = policy.predict(each, state, np.zeros(2, bool), deterministic=True)
            found.append(actions)
        np.testing.assert_array_equal(found, by_hand)


def test_memory_of_predictions_goes_with_the_state(trained):
    policy = load_policy(trained(*LSTM).path)
    first, second = np.random.default_rng(1).normal(size=(2, 2, 4)).astype(np.float32)
    _, begun = policy.predict(second, deterministic=True)
    _, state = policy.predict(first, deterministic=True)
    assert state is not None
    _, later = policy.predict(second, state, [False, True], deterministic=True)
    assert begun is not None
    assert later is not None
    np.testing.assert_array_equal(later[1], begun[1])
    assert not np.array_equal(later[0], begun[0])
    assert load_policy(trained(*CARTPOLE).path).predict(first[0])[1] is None


def test_memory_that_is_not_of_the_batch_is_one_line(trained):
    policy = load_policy(trained(*LSTM).path)
    three = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    _, state = policy.predict(three, deterministic=True)
    assert state is not None
    actions, after = policy.predict(three, state, deterministic=True)
    assert after is not None
    for same in (state.astype(np.float64), state.tolist()):
        found, found_after = policy.predict(three, same, deterministic=True)
        np.testing.assert_array_equal(found, actions)
        np.testing.assert_array_equal(found_after, after)
    size = state.shape[1]
    for other in (state[0], state[:2], state[:, 1:], np.zeros((3, size + 1))):
        line = f"state: of shape {other.shape} for 3 observations; needed is (3, {size}), as predict returns it"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            policy.predict(three, other, deterministic=True)
    pair: Any = (state, state[0])
    with pytest.raises(ValueError, match=r"^state: tuple is no array of numbers; give what predict returned$"):
        policy.predict(three, pair, deterministic=True)
    for begins in ([True], [[True, False, True]], True):
        with pytest.raises(ValueError, match=r"^episode_start: of shape .* for 3 observations; needed is \(3,\)$"):
            policy.predict(three, state, begins, deterministic=True)
    np.testing.assert_array_equal(policy.predict(three[0], state[:1], True, True)[1], policy.predict(three[0])[1])


def test_policies_are_found_by_name_by_path_and_by_checkpoint(trained, monkeypatch):
    run = trained(*CARTPOLE)
    monkeypatch.chdir(run.path.parents[1])
    assert load_policy(run.path.name).global_step == 1024
    assert load_policy(str(run.path)).global_step == 1024
    assert load_policy(run.path / "checkpoints" / "step_384").global_step == 384
    assert load_policy(run.path, "768").global_step == load_policy(run.path, 768).global_step == 768
    assert load_policy(run.path, "best").global_step in (384, 768, 1024)
    with pytest.raises(ValueError, match=r"no checkpoint of step 99; there are: 1024, 768, 384"):
        load_policy(run.path, "99")
    with pytest.raises(ValueError, match="neither missing nor runs/missing is a run directory"):
        load_policy("missing")


def test_an_evaluation_has_a_success_rate_where_the_environment_knows(trained, capsys):
    push = trained("lockstep/PushCube-v0", *SMALL, "--env.max-episode-steps", 6)
    assert evaluation(push, capsys, "--episodes", "3")["success_rate"] in (0.0, 1 / 3, 2 / 3, 1.0)
    assert main(["eval", str(push.path), "--episodes", "3"]) == 0
    assert re.search(r"length \d\.\d, success rate \d+%\n$", capsys.readouterr().out)
    assert "success_rate" not in evaluation(trained(*CARTPOLE), capsys, "--episodes", "3")


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_what_no_environment_gives_is_refused_in_a_line(trained, engine):
    policy = load_policy(trained("FrozenLake-v1", *SMALL, "--engine", engine, "--stop-at-step", 256).path)
    assert policy(3) in range(4)
    for wrong, said in ((16, "16 is none of the 16 choices from 0 to 15"), (-1, "-1 is none"), (3.7, "3.7 is none")):
        with pytest.raises(ValueError, match=said):
            policy(wrong)
    with pytest.raises(ValueError, match="observation: it holds nan"):
        load_policy(trained(*PENDULUM).path)([np.nan, 0.0, 0.0])
    doors = load_policy(trained(*DOORS).path)
    seen = doors.observation.decode(doors.random_rows(1, np.random.default_rng(0))[0])
    choices = sum(doors.action.choices)
    with pytest.raises(ValueError, match="action_mask: it allows nothing"):
        doors(seen, action_mask=np.zeros(choices))
    assert doors(seen, action_mask=np.ones(choices)) is not None


def test_fewer_steps_than_are_done_are_refused(trained, tmp_path):
    run = trained(*CARTPOLE, "--stop-at-step", 256)
    before = (run.path / "config.json").read_text()
    ended = lockstep("train", "--resume", run.path, "--total-steps", 128, "--quiet", cwd=tmp_path)
    assert ended.code == 2
    assert ended.stderr.startswith(f"lockstep: error: total_steps: 128, but {run.path} has done 256 steps")
    assert (run.path / "config.json").read_text() == before


def test_ways_to_meet_that_decide_bits_are_told_when_they_change(trained, tmp_path):
    words = ("--stop-at-step", 256, "--nproc", 2, "--reduction")
    for reduction, warned in (("fast", True), ("exact", False)):
        run = trained(*CARTPOLE, *words, reduction)
        copy = shutil.copytree(run.path, tmp_path / reduction)
        ended = lockstep("train", "--resume", copy, "--collectives", "backend", "--nproc", 2, cwd=tmp_path)
        assert ended.code == 0, ended.stderr
        assert ("collectives was auto and is backend from here on; with reduction fast" in ended.stderr) == warned


def test_sharding_parameters_is_told_when_it_changes(trained, tmp_path):
    run = trained(*CARTPOLE, "--stop-at-step", 256, "--nproc", 2, "--reduction", "fast")
    warned = "lockstep: warning: fsdp was {} and is {} from here on; with reduction fast the order of sums follows it\n"
    words = ("--stop-at-step", 128, "--nproc", 2, "--resume", shutil.copytree(run.path, tmp_path / "run"))
    for option, change in (("--fsdp", ("false", "true")), ("--no-fsdp", ("true", "false"))):
        ended = lockstep("train", *words, option, cwd=tmp_path)
        assert ended.code == 0, ended.stderr
        assert ended.stderr.count(warned.format(*change)) == 1
    ended = lockstep("train", *words, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "order of sums" not in ended.stderr


def test_a_segmentation_fault_is_said_with_its_place(tmp_path):
    lines = ["import ctypes, gymnasium", "from gymnasium.envs.classic_control import CartPoleEnv", ""]
    lines += ["class Faulty(CartPoleEnv):", "    def step(self, action):", "        ctypes.string_at(0)"]
    (tmp_path / "broken_memory.py").write_text("\n".join(lines))
    ended = lockstep("train", "broken_memory:Faulty", "--total-steps", 1024, cwd=tmp_path)
    assert ended.code != 0
    assert "Segmentation fault" in ended.stderr
    assert re.search(r"broken_memory.py\", line 6 in step", ended.stderr)


def test_variables_of_jax_decide_nothing_in_an_evaluation_as_in_training(trained, tmp_path):
    words = ("eval", trained(*CARTPOLE, "--engine", "jax").path, "--episodes", 3, "--json")
    plain = lockstep(*words, cwd=tmp_path)
    odd = lockstep(*words, cwd=tmp_path, JAX_NUMPY_RANK_PROMOTION="raise", JAX_THREEFRY_PARTITIONABLE="0")
    assert (odd.code, odd.stdout) == (0, plain.stdout), odd.stderr

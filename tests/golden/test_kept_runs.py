"""Run directories made before the code was put in its present order: everything that reads a run goes on reading them.

They were written on 2026-11-22 by commit fe53d3d; whoever changes a format keeps reading these.
"""

import json
import shutil

import gymnasium
import numpy as np
import pytest
from command_line import lockstep, resume
from golden_cases import CASES, GOLDEN, KEPT, fitting
from test_golden_bits import GOLD, HERE

import lockstep as package

pytestmark = pytest.mark.optimized

RUNS = GOLDEN.parent / "runs"


@pytest.fixture
def kept(tmp_path):
    """A copy of a kept run directory, by name."""

    def copy(name):
        return shutil.copytree(RUNS / name, tmp_path / "runs" / name)

    return copy


def bits_where_made(name: str) -> dict[str, str]:
    """The bits of a kept run's whole case, with the processor on which its first half was trained.

    Where a case's bits were changed on purpose since then, those of old bits and new ones: the file's ``resumed``.
    """
    return GOLD["resumed"].get(name, GOLD["written"][0]["bits"][KEPT[name]])


def rank_words(name: str) -> tuple:
    """The options that say how many ranks or devices a case has."""
    words = CASES[KEPT[name]]
    for option in ("--nproc", "--simulate-devices"):
        if option in words:
            return words[words.index(option) :][:2]
    return ()


@pytest.mark.parametrize("name", KEPT)
def test_eval_reads_a_kept_run_and_finds_the_same_returns(kept, name, tmp_path):
    kept(name)
    ended = lockstep("eval", name, "--episodes", 4, "--json", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    mean, length = GOLD["evaluations"][name]
    assert found["return_mean"] == pytest.approx(mean, rel=1e-4)
    assert found["length_mean"] == length
    assert found["global_step"] == 256


@pytest.mark.parametrize("name", KEPT)
def test_load_policy_reads_a_kept_run(kept, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its warnings
    policy = package.load_policy(kept(name))
    env = gymnasium.make("HalfCheetah-v5" if name.endswith("cheetah") else "CartPole-v1")
    observation, _ = env.reset(seed=0)
    assert env.action_space.contains(policy(observation))
    other, _ = env.reset(seed=1)
    assert len(policy(np.stack([observation, other]))) == 2


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_run_resumed_ends_as_one_that_never_stopped(kept, name):
    resumed = resume(kept(name), *rank_words(name))
    assert resumed.summary["status"] == "finished"
    assert resumed.summary["restarted_environments"] == []
    bits, made_there = {key: resumed.summary[key] for key in ("params_sha256", "state_sha256")}, bits_where_made(name)
    there, here = GOLD["written"][0]["bits"][KEPT[name]], fitting(GOLD["written"], HERE, KEPT[name])
    if any(written["bits"][KEPT[name]] == there for written in here):  # else half of it is another processor's
        assert bits == made_there
    assert len(resumed.metrics) == 3


def test_a_damaged_kept_run_is_refused(kept, tmp_path):
    file = next(kept("torch_cartpole").glob("checkpoints/*/policy.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ended = lockstep("eval", "torch_cartpole", "--episodes", 4, cwd=tmp_path)
    assert ended.code != 0
    assert "policy.safetensors" in ended.stderr

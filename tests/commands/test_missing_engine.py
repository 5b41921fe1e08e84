"""A command whose engine isn't installed ends with one line that says what to install."""

import sys

import pytest
from command_line import run_words

WITHOUT = (
    "import sys; sys.modules.update(torch=None, jax=None); from lockstep.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_training_without_the_engine_says_what_to_install(engine, nproc, tmp_path):
    words = ("train", "CartPole-v1", "--engine", engine, "--nproc", nproc, "--env.backend", "gymnasium")
    ended = run_words([sys.executable, "-c", WITHOUT, *words], tmp_path)
    assert ended.code == 2
    assert ended.stderr == f"lockstep: error: engine: {engine} needs {engine}; pip install 'lockstep-rl[{engine}]'\n"
    assert not (tmp_path / "runs").exists()

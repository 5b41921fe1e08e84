"""What can't be run is refused in one line that names key and value, before anything is made or started."""

from pathlib import Path

import pytest
from command_line import error_line, lockstep

from lockstep.cli import main

FILES = {
    "typo.yaml": "env: CartPole-v1\nppo:\n  learning_rte: 0.001\n",
    "range.toml": 'env = "CartPole-v1"\n[ppo]\ngamma = 1.5\n',
    "list.json": "[1, 2]",
    "torn.json": '{"env": "CartPole-v1"',
    "code.yaml": "env: !!python/object/apply:os.system ['true']\n",
    "config.ini": "env=CartPole-v1",
}

BAD = [
    ("train NoSuchGame-v0", ["env.id", "'NoSuchGame-v0'"]),
    ("train no_such_module:Game-v0", ["env.id", "no_such_module:Game-v0"]),
    ("train CartPole-v1 --num-envs 10 --num-shards 4", ["num_shards: 10", "4 equal shards", "2 or 5", "8 or 12"]),
    ("train CartPole-v1 --num-shards 6", ["num_shards: 8", "6 equal shards", "4 or 8"]),
    ("train CartPole-v1 --num-envs 8 --num-shards 8 --nproc 9", ["nproc: 9", "8 shards", "at most 8"]),
    ("train CartPole-v1 --num-steps 16 --ppo.num-minibatches 3", ["ppo.num_minibatches: 3", "16 samples", "2 or 4"]),
    ("train CartPole-v1 --num-epoch 3", ["--num-epoch", "did you mean --num-epochs"]),
    ("train CartPole-v1 --lr", ["--lr: needs a value"]),
    ("train CartPole-v1 --lr -1", ["ppo.learning_rate: '-1'", "greater than 0"]),
    ("train CartPole-v1 --ppo.gamma nan", ["ppo.gamma: 'nan'"]),
    ("train CartPole-v1 --seed first", ["seed: 'first'"]),
    ("train CartPole-v1 --nproc 0", ["nproc: 0"]),
    ("train CartPole-v1 --nproc two", ["nproc", "'two'"]),
    ("train CartPole-v1 --engine numpy", ["engine: 'numpy'", "'torch'"]),
    ("train CartPole-v1 --name up/down", ["name: 'up/down'"]),
    ("train CartPole-v1 --stop-at-step 5000 --total-steps 1000", ["stop_at_step: 5000", "1000"]),
    ("train CartPole-v1 --env.kwargs {g:9}", ["--env.kwargs", "'{g:9}'"]),
    ('train CartPole-v1 --env.kwargs {"gravitee":1}', ["env.id: CartPole-v1", "gravitee"]),
    ("train lockstep/CartPole-v1 --env.workers 2", ["env.workers: 2", "lockstep/CartPole-v1"]),
    ("train CartPole-v1 Pendulum-v1", ["'Pendulum-v1'"]),
    ("train", ["config file or an environment id"]),
    ("train typo.yaml", ["typo.yaml", "ppo.learning_rte", "did you mean ppo.learning_rate"]),
    ("train range.toml", ["range.toml", "ppo.gamma: 1.5"]),
    ("train list.json", ["list.json", "list"]),
    ("train torn.json", ["torn.json", "can't be read"]),
    ("train code.yaml", ["code.yaml", "can't be read"]),
    ("train config.ini", ["config.ini", "a config file ends in .yaml"]),
    ("train missing.yaml", ["missing.yaml", "no such config file"]),
    ("train --resume nothing", ["nothing", "is a run directory"]),
    ("eval nothing", ["nothing", "is a run directory"]),
    ("eval", ["run"]),
    ("eval nothing --episodes 0", ["--episodes", "0 is below 1"]),
    ("eval nothing --epsodes 3", ["--epsodes"]),
    ("play nothing --video out.mp4", ["nothing", "is a run directory"]),
    ("verify", ["a config file or an environment id is needed", "lockstep verify CartPole-v1"]),
    ("verify CartPole-v1 --world-sizes 1,x", ["world-sizes: '1,x'"]),
    ("verify CartPole-v1 --num-envs 8 --world-sizes 1,9", ["nproc: 9", "8 shards"]),
    ("verify CartPole-v1 --iterations 0", ["iterations: 0"]),
    ("verify CartPole-v1 --iterations few", ["--iterations", "'few'"]),
    ("verify NoSuchGame-v0", ["env.id", "'NoSuchGame-v0'"]),
    ("trian CartPole-v1", ["'trian' is no command", "did you mean train"]),
    ("enjoy nothing", ["'enjoy' is no command", "did you mean play RUN?"]),
    ("qwertz", ["'qwertz' is no command", "there are train, check"]),
    ("train CartPole-v1 --rnd true", ["--rnd", "no intrinsic reward"]),
    ("--verbose", ["'--verbose' is no command"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_refused(code, captured, words):
    assert code == 2
    assert captured.out == ""
    assert "Traceback" not in captured.err
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("lockstep: error: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert sorted(path.name for path in Path().iterdir()) == sorted(FILES)


@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
@pytest.mark.usefixtures("folder")
def test_refused_in_one_line(line, words, capsys):
    try:
        code = main(line.split())
    except SystemExit as stop:
        pytest.fail(f"left through SystemExit {stop.code}: {capsys.readouterr().err}", pytrace=False)
    assert_refused(code, capsys.readouterr(), words)


@pytest.mark.usefixtures("folder")
def test_a_gpu_where_there_is_none(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code = main(["train", "CartPole-v1", "--device", "cuda"])
    assert_refused(code, capsys.readouterr(), ["device: cuda", "--device cpu"])


@pytest.mark.usefixtures("folder")
def test_help_is_no_error(capsys):
    assert main(["train", "CartPole-v1", "--help"]) == 0
    assert main(["--help"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train NoSuchGame-v0 --nproc 2", ["env.id", "'NoSuchGame-v0'"]),
        ("train CartPole-v1 --num-epoch 3", ["--num-epoch", "did you mean --num-epochs"]),
        ("eval nothing --json", ["nothing", "is a run directory"]),
    ],
)
def test_the_command_says_the_same_and_exits_with_two(tmp_path, line, words):
    ended = lockstep(*line.split(), cwd=tmp_path)
    assert ended.code == 2
    assert all(word in error_line(ended) for word in words)
    assert not any(tmp_path.iterdir())

"""``lockstep train --print-config`` prints what a run would have, and nothing where there could be none."""

import json

import pytest
from made_runs import make_run

from lockstep.cli import main


@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("NoSuch-v0", "env.id: no environment 'NoSuch-v0' is registered"),
        ("not_installed:Robot-v0", "env.id: not_installed:Robot-v0: No module named 'not_installed'"),
    ],
)
def test_an_environment_that_there_is_not_has_no_config(capsys, tmp_path, env_id, line):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"env": env_id}))
    for target in (env_id, str(file)):
        assert main(["train", target, "--print-config"]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"lockstep: error: {line}")
        assert said.out == ""


def test_where_nobody_looks_at_the_environment_its_config_is_printed(capsys, tmp_path):
    run = make_run(tmp_path / "runs" / "a", env={"id": "not_installed:Robot-v0"}, num_steps=24)
    for words, env_id in (([], "ALE/Pong-v5"), (["--resume", str(run), "--trust"], "not_installed:Robot-v0")):
        target = words or [env_id]
        assert main(["train", *target, "--total-steps", "4096", "--print-config"]) == 0
        text = capsys.readouterr().out
        assert f"  id: {env_id}\n" in text
        assert "total_steps: 4096\n" in text
        assert ("num_steps: 24\n" in text) == bool(words)


def test_a_resumed_run_is_not_printed_with_what_it_would_not_take(capsys, tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    assert main(["train", "--resume", str(run), "--num-steps", "24", "--print-config"]) == 2
    assert "num_steps: run" in capsys.readouterr().err

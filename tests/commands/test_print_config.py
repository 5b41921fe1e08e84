"""``lockstep train --print-config`` prints what a run would have, and nothing where there could be none."""

import json
import re
from pathlib import Path

import pytest
from made_runs import make_group, make_run

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


FOR_CLEANRL = Path(__file__).parents[2] / "docs" / "coming-from" / "cleanrl.md"


@pytest.mark.parametrize("words", re.findall(r"`lockstep (train PongNoFrameskip-v4[^`]*)`", FOR_CLEANRL.read_text()))
def test_what_stands_for_a_file_of_cleanrls_makes_a_config(capsys, words):
    assert main([*words.split(), "--print-config"]) == 0
    assert "  num_minibatches: 4\n" in capsys.readouterr().out


def test_a_resumed_run_is_not_printed_with_what_it_would_not_take(capsys, tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    assert main(["train", "--resume", str(run), "--num-steps", "24", "--print-config"]) == 2
    assert "num_steps: run" in capsys.readouterr().err


@pytest.fixture
def unknown(tmp_path, monkeypatch):
    """Makes this account one that has trained with nothing, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--checkpoint.mirror", "s3://new/runs"], "s3://new/runs"),
        (["--log.wandb"], "wandb: true"),
        (["--eval.record-video", "false"], "record_video: false"),
    ],
)
def test_a_resumed_run_is_printed_with_what_was_just_named(capsys, tmp_path, unknown, words, setting):
    run = make_run(tmp_path / "runs" / "a", eval={"interval": 10, "record_video": True})
    assert main(["train", "--resume", str(run), *words, "--print-config"]) == 0
    assert setting in capsys.readouterr().out


def test_what_a_strangers_run_names_is_not_printed_untrusted(capsys, tmp_path, unknown):
    run = make_run(tmp_path / "runs" / "a", checkpoint={"mirror": "s3://theirs/runs"})
    assert main(["train", "--resume", str(run), "--print-config"]) == 2
    assert "checkpoint.mirror: " in capsys.readouterr().err


def test_a_resumed_group_is_printed(capsys, tmp_path):
    group = make_group(tmp_path / "runs" / "many")
    assert main(["train", "--resume", str(group), "--total-steps", "4096", "--print-config"]) == 0
    assert "total_steps: 4096\n" in capsys.readouterr().out


def test_of_a_run_on_a_mirror_the_config_alone_is_fetched(capsys, tmp_path, unknown):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    run, url = make_run(tmp_path / "made", num_steps=24), f"memory://{tmp_path.name}/a"
    memory.pipe(f"{url}/config.json", (run / "config.json").read_bytes())
    assert main(["train", "--resume", url, "--print-config"]) == 0
    assert "num_steps: 24\n" in capsys.readouterr().out
    assert len(memory.find(url)) == 1  # nobody holds it
    assert not (tmp_path / "runs").exists()
    assert main(["train", "--resume", f"{url}b", "--print-config"]) == 2
    assert f"resume: there is no run at {url}b" in capsys.readouterr().err

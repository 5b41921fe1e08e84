"""A run's config, and the rows that its checkpoints count on: what is missing comes back or is said."""

import json
import re
import shutil

import pytest
from command_line import CARTPOLE, copy_of, error_line, lockstep, resume, same
from commands_here import refused
from made_runs import make_run

from lockstep import load_policy
from lockstep.launch.resume import resumed_config
from lockstep.runs.checkpoint import checkpoints_in
from lockstep.runs.stored import stored_config, written_config


@pytest.fixture
def stopped(trained, tmp_path):
    """A copy of a run that was stopped after five of eight iterations."""
    return copy_of(trained(*CARTPOLE, "--stop-at-step", 640), tmp_path / "run")


def manifests(run):
    return [json.loads((path / "manifest.json").read_text()) for path in checkpoints_in(run / "checkpoints")]


def test_every_checkpoint_holds_the_config_and_the_number_of_rows(stopped):
    config = json.loads((stopped / "config.json").read_text())
    assert [(each["rows"], each["config"] == config) for each in manifests(stopped)] == [(5, True), (3, True)]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("emptied", "Expecting value: line 1 column 1 (char 0)"),
        ("torn", "Unterminated string starting at: line 6"),
        ("removed", "it is missing"),
    ],
)
def test_a_config_that_is_gone_comes_back_from_the_checkpoint(trained, stopped, damage, why):
    file = stopped / "config.json"
    text = file.read_text()
    {"emptied": lambda: file.write_text(""), "torn": lambda: file.write_text(text[:99]), "removed": file.unlink}[
        damage
    ]()
    run = resume(stopped)
    (line,) = run.ended.stderr.splitlines()
    assert line.startswith(f"lockstep: warning: {file} can't be read ({why}")
    assert line.endswith("); taken from checkpoint step_640")
    same(trained(*CARTPOLE), run)
    assert json.loads(file.read_text()) == json.loads(text)


def test_an_edit_by_an_editor_that_marks_utf_8_counts(stopped, capsys):
    """Notepad and PowerShell begin such files with a byte order mark."""
    file = stopped / "config.json"
    edited = json.loads(file.read_text()) | {"total_steps": 1152}
    file.write_text(json.dumps(edited), encoding="utf-8-sig")
    assert stored_config(stopped).total_steps == 1152
    assert capsys.readouterr().err == ""


def test_without_a_checkpoint_it_is_an_error(stopped, tmp_path):
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "config.json").write_text("")
    assert str(stopped / "config.json") in error_line(lockstep("train", "--resume", stopped, cwd=tmp_path))


def test_a_config_that_was_edited_is_refused_as_an_option_is(stopped, tmp_path):
    file = stopped / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"ppo": config["ppo"] | {"learning_rate": 0.5}}))
    message = error_line(lockstep("train", "--resume", stopped, cwd=tmp_path))
    assert f"ppo.learning_rate: {file} says 0.5, but it was 0.005 when step_640 was written; put it back" in message
    file.write_text(json.dumps(config | {"eval": config["eval"] | {"interval": 4}, "total_steps": 1152}))
    assert resume(stopped, "--total-steps", 1024).summary["iteration"] == 8


EDITS = [
    ("network", {"activation": "relu"}, "network.activation: {} says relu, but it was tanh"),
    ("network", {"hidden_sizes": [4, 64]}, "network.hidden_sizes: {} says [4, 64], but it was [64, 64]"),
    ("normalize", {"observations": True}, "normalize.observations: {} says True, but it was False"),
    (None, {"precision": "bf16"}, "precision: {} says bf16, but it was fp32"),
]


@pytest.mark.parametrize(("section", "edit", "said"), EDITS, ids=[next(iter(edit)) for _, edit, _ in EDITS])
def test_an_edited_config_makes_no_other_policy(stopped, section, edit, said):
    file = stopped / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | (edit if section is None else {section: config[section] | edit})))
    for step in (384, 640):
        line = f"{said.format(file)} when step_{step} was written; put it back"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            load_policy(stopped, step)
    file.write_text(json.dumps(config | {"eval": config["eval"] | {"interval": 4}, "total_steps": 1152}))
    assert load_policy(stopped, 384).global_step == 384


@pytest.mark.parametrize(
    "words", [("eval",), ("play", "--video", "a.gif"), ("export", "--onnx", "a.onnx"), ("record", "--out", "a.npz")]
)
def test_commands_refuse_such_a_config_before_they_write(stopped, tmp_path, monkeypatch, capsys, words):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = stopped / "config.json"
    file.write_text(file.read_text().replace('"tanh"', '"relu"'))
    said = refused(capsys, words[0], stopped, *words[1:])
    assert said.startswith(f"lockstep: error: network.activation: {file} says relu, but it was tanh when step_640 was")
    assert not any((tmp_path / "here").iterdir())


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_arrays_of_other_shapes_than_the_configs_are_refused(stopped, engine):
    """Also if the checkpoint's own config was edited, or an older version kept none in it."""
    for path in checkpoints_in(stopped / "checkpoints"):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["config"]
        (path / "manifest.json").write_text(json.dumps(manifest))
    file = stopped / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"network": config["network"] | {"hidden_sizes": [4, 64]}}))
    said = r"^network: actor\.0\.weight has shape \(64, 4\) in the checkpoint, but \(4, 4\) in the networks that the "
    with pytest.raises(ValueError, match=said):
        load_policy(stopped, engine=engine)


def test_a_run_of_a_version_that_kept_no_config_in_checkpoints_is_read_as_before(stopped):
    for path in checkpoints_in(stopped / "checkpoints"):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["config"], manifest["rows"]
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert written_config(stopped) is None
    assert stored_config(stopped).seed == 0
    assert resume(stopped).ended.stderr == ""


@pytest.mark.parametrize(
    ("keep", "stretches", "said"),
    [
        ([], [[1, 5]], "misses 5 of 5 rows, of iterations 1 to 5; they stay lost"),
        ([1, 3, 4], [[2, 2], [5, 5]], "misses 2 of 5 rows, of iterations 2, 5; they stay lost"),
    ],
)
def test_rows_that_are_gone_are_said_and_listed(trained, stopped, keep, stretches, said):
    file = stopped / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[n - 1] for n in keep))
    run = resume(stopped)
    assert run.ended.stderr == f"lockstep: warning: metrics.jsonl {said}\n"
    assert run.summary["missing_rows"] == stretches
    assert run.agent == trained(*CARTPOLE).agent
    assert [row["iteration"] for row in run.metrics] == [*keep, 6, 7, 8]


def test_a_torn_last_row_that_no_checkpoint_counts_on_is_nothing(stopped):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "glo')
    run = resume(stopped)
    assert run.ended.stderr == ""
    assert run.summary["missing_rows"] == []


@pytest.mark.parametrize("kept", [None, 0, 3])
def test_a_table_that_lost_its_tail_comes_back_from_the_records(trained, stopped, kept):
    file = stopped / "metrics.csv"
    whole = file.read_bytes().splitlines(keepends=True)
    assert len(whole) == 6
    file.unlink() if kept is None else file.write_bytes(b"".join(whole[:kept]))
    run = resume(stopped)
    misses = {None: 5, 0: 5, 3: 3}[kept]
    said = f"lockstep: warning: {file} misses {misses} of 5 rows that metrics.jsonl has; it was written anew\n"
    assert run.ended.stderr == said
    assert file.read_bytes().splitlines(keepends=True)[:6] == whole
    assert len(file.read_bytes().splitlines()) == 1 + 8
    assert run.agent == trained(*CARTPOLE).agent


def test_zeros_that_a_power_loss_leaves_do_not_stop_a_run(trained, stopped):
    rows, table = stopped / "metrics.jsonl", stopped / "metrics.csv"
    lines, whole = rows.read_bytes().splitlines(keepends=True), table.read_bytes()
    rows.write_bytes(b"".join([*lines[:2], bytes(999) + lines[3], lines[4], bytes(999) + b"\n", lines[4][:9]]))
    table.write_bytes(whole + bytes(999) + b"\n" + b"9,9,9\n")
    run = resume(stopped)
    assert run.ended.stderr.splitlines() == [
        f"lockstep: warning: {rows}: line 3 held zeros, as a power loss leaves them, and was removed",
        "lockstep: warning: metrics.jsonl misses 2 of 5 rows, of iterations 3 to 4; they stay lost",
    ]
    assert [row["iteration"] for row in run.metrics] == [1, 2, 5, 6, 7, 8]
    assert table.read_bytes().startswith(whole)
    assert run.agent == trained(*CARTPOLE).agent


@pytest.mark.parametrize(
    ("new", "is_refused"),
    [
        ('{"flag": 1, "at": [{"a": 0.0, "b": 2}]}', True),
        ('{"flag": true, "at": [{"a": -0.0, "b": 2}]}', True),
        ('{"flag": true, "at": [{"a": 0.0, "b": 2.0}]}', True),
        ('{"at": [{"b": 2, "a": 0.0}], "flag": true}', False),
    ],
)
def test_a_setting_of_another_type_or_sign_is_another_setting(tmp_path, new, is_refused):
    kwargs = {"flag": True, "at": [{"a": 0.0, "b": 2}]}
    run = make_run(tmp_path / "run", env={"id": "CartPole-v1", "kwargs": kwargs})
    changed = {"env": {"kwargs": json.loads(new)}}
    if not is_refused:
        assert resumed_config(run, changed).env.kwargs == kwargs
        return
    with pytest.raises(ValueError, match=r"^env.kwargs: run .* was started with .* and can't be resumed with"):
        resumed_config(run, changed)

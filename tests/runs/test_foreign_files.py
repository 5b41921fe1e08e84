"""Of files that are links, or a newer version's, it is said that they are that, and not that they are damaged."""

import json
import shutil

import pytest
from made_runs import make_group, make_run

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.launch.resume import open_directory
from lockstep.report.reading import read_run
from lockstep.runs.checkpoint import CheckpointError, find_checkpoint, problem_with, to_files
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.links import odd_entry
from lockstep.runs.listing import DAMAGED, row_of
from lockstep.runs.making import create_run
from lockstep.runs.stored import stored_config, written_config

CONFIG = resolve(Config())


@pytest.fixture
def run(tmp_path):
    made = create_run(str(tmp_path), "a", CONFIG)
    made.unlock()
    (made.path / "metrics.jsonl").touch()
    commit(made.checkpoints, 100, to_files({}, {}, {}), 1.0, {"config": CONFIG.model_dump(mode="json")})
    return made.path


def into_links(run):
    """As ``snapshot_download``, git-annex and DVC leave a directory: its files lie elsewhere, under other names."""
    blobs = run.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(p for p in run.rglob("*") if p.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    return blobs


@pytest.mark.parametrize("which", ["latest", "best", "100"])
def test_a_checkpoint_of_links_says_so_and_a_copy_is_read(run, which):
    into_links(run)
    step = run / "checkpoints" / "step_100"
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(run / "checkpoints", which)
    link = step / "manifest.json"
    assert str(caught.value) == f"{link} is a link to {link.readlink()}; copy the run with cp -rL"
    shutil.copytree(run, run.with_name("copy"))
    assert find_checkpoint(run.with_name("copy") / "checkpoints", which).path is not None


def test_a_link_to_nothing_says_so(run):
    blobs = into_links(run)
    shutil.rmtree(blobs)
    problem = problem_with(run / "checkpoints" / "step_100")
    assert problem is not None
    assert problem.endswith("; nothing is there: fetch the run's files first")


def test_so_does_the_list_and_the_report(run):
    into_links(run)
    row = row_of(run, "a")
    link = run / "config.json"
    assert (row.status, row.problem) == (DAMAGED, f"{link} is a link to {link.readlink()}; copy the run with cp -rL")
    assert f"{run / 'metrics.jsonl'} is a link to " in "\n".join(read_run(run, "a").problems)


def test_neither_reads_another_run_that_a_seed_is_a_link_to(tmp_path):
    group, private = make_group(tmp_path / "many"), make_run(tmp_path / "private", scale=1000.0)
    (group / "summary.json").unlink()
    shutil.rmtree(group / "seed_0")
    (group / "seed_0").symlink_to(private)
    found = read_run(group, "many")
    problem = f"{group}/seed_0 is a link to {private}; copy the run with cp -rL"
    assert [seed.name for seed in found.seeds] == [seed.name for seed in found.counted] == ["seed_1", "seed_2"]
    assert found.problems == [problem]
    row = row_of(group, "many")
    assert (row.seeds, row.final_return, row.problem, row) == (3, 40.5, problem, found.row)


def test_a_seed_that_leads_back_to_its_group_is_not_read(tmp_path):
    """Two of them would be 2⁴⁰ runs."""
    group = make_group(tmp_path / "many", seeds=1)
    (group / "seed_0" / "seed_7").mkdir()
    shutil.copy(group / "config.json", group / "seed_0" / "seed_7")
    (group / "seed_1").symlink_to(".")
    found = read_run(group, "many")
    assert [seed.name for seed in found.seeds] == ["seed_0"]
    assert found.seeds[0].seeds == []
    assert found.problems == [f"{group}/seed_1 is a link to .; copy the run with cp -rL"]


def test_nor_are_checkpoints_that_lie_behind_a_link(run, tmp_path):
    stranger = make_run(tmp_path / "stranger")
    (stranger / "checkpoints").symlink_to(run / "checkpoints")
    for name in ("metrics.jsonl", "summary.json"):
        (stranger / name).unlink()
    found = read_run(stranger, "stranger")
    link = f"{stranger}/checkpoints is a link to {run}/checkpoints; copy the run with cp -rL"
    assert found.problems[0] == link
    assert (found.row.steps, found.edited, found.environment) == (None, None, {})
    (stranger / "config.json").write_text("{")
    assert read_run(stranger, "stranger").config == {}


def test_a_run_of_ones_own_that_is_named_by_a_link_is_read(tmp_path):
    group = make_group(tmp_path / "disk" / "runs" / "many")
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    (tmp_path / "mine").symlink_to(group)
    for path in (tmp_path / "runs" / "many", tmp_path / "mine"):
        found = read_run(path, "many")
        assert (len(found.seeds), found.problems, found.row.final_return) == (3, [], 60.0)


def test_a_checkpoint_of_a_newer_version_is_called_that(run):
    file = run / "checkpoints" / "step_100" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 7}))
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(run / "checkpoints")
    newer = f"{file.parent} was written by a newer lockstep (format 7; this one reads up to 1)"
    assert str(caught.value) == f"{newer}; use that lockstep"
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(run / "checkpoints", "best")
    assert str(caught.value) == newer


@pytest.fixture
def later(run):
    """A run whose newer checkpoint a newer version has written."""
    state = {"environment": {}, "global_step": 100, "iteration": 1}
    for step in (100, 200):
        shutil.rmtree(run / "checkpoints" / f"step_{step}", ignore_errors=True)
        commit(run / "checkpoints", step, to_files({}, {}, state | {"global_step": step}), 1.0)
    file = run / "checkpoints" / "step_200" / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 7'))
    return run


def test_a_run_does_not_go_on_before_a_checkpoint_of_a_newer_version(later):
    """Which it would remove, with all rows after its own."""
    folder = later / "checkpoints"
    options = RunOptions(quiet=True)
    for which in ("latest", None):
        with pytest.raises(CheckpointError) as caught:
            open_directory(CONFIG, options, later, which, writer=True)
        assert str(caught.value) == (
            f"resume: {folder}/step_200 was written by a newer lockstep (format 7; this one reads up to 1), and going "
            f"on from step_100 would remove it; resume with that lockstep, or give --resume {folder}/step_100 to go on "
            "from there all the same"
        )
    opened, which = open_directory(CONFIG, options, later, "step_100", writer=True)
    opened.unlock()
    assert which == "step_100"
    (folder / "step_200").rename(folder / "step_50")  # behind the one that is read: nothing is lost by it
    open_directory(CONFIG, options, later, "latest", writer=True)[0].unlock()


def test_a_damaged_checkpoint_still_stops_no_run(later):
    (later / "checkpoints" / "step_200" / "manifest.json").write_text("{}")
    open_directory(CONFIG, RunOptions(quiet=True), later, "latest", writer=True)[0].unlock()


@pytest.mark.parametrize("which", ["latest", "best"])
def test_who_only_reads_a_run_is_told_of_what_a_newer_version_wrote(later, which, capfd):
    found = find_checkpoint(later / "checkpoints", which)
    assert found.state["global_step"] == 100
    said = f"lockstep: warning: {later}/checkpoints/step_200 was written by a newer lockstep (format 7; this one "
    assert capfd.readouterr().err.count(said) == 1
    shutil.rmtree(later / "checkpoints" / "step_200")
    find_checkpoint(later / "checkpoints", which)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("content", ["{}", "[]", '{"format": 0}', '{"format": "7"}', '{"format": 1}', "[" * 100_000])
def test_what_is_none_is_called_that(run, content):
    file = run / "checkpoints" / "step_100" / "manifest.json"
    file.write_text(content)
    assert problem_with(file.parent) == f"{file.parent} has no valid manifest.json"


def test_an_unknown_key_of_a_stored_config_may_be_of_a_newer_version(run):
    newer = "; a newer lockstep may have written it, and reads it"
    file = run / "config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"ppo": stored["ppo"] | {"new_thing": 1}}))
    with pytest.raises(ValueError, match=r"config.json: ppo.new_thing: unknown key") as caught:
        stored_config(run)
    assert str(caught.value).endswith(newer)
    file.write_text(json.dumps(stored | {"num_steps": -1}))
    with pytest.raises(ValueError, match="num_steps") as caught:
        stored_config(run)
    assert newer not in str(caught.value)
    manifest = run / "checkpoints" / "step_100" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"config": stored | {"other_thing": 1}}))
    with pytest.raises(ValueError, match="other_thing: unknown key") as caught:
        written_config(run)
    assert str(caught.value).endswith(newer)


@pytest.mark.parametrize(
    ("link", "is_odd"),
    [
        ("wandb/latest-run", False),
        ("seed_3/wandb/debug.log", False),
        ("wandb", True),
        ("seed_3/wandb", True),
        ("checkpoints/wandb/debug.log", True),
        ("seed_3/checkpoints/wandb/debug.log", True),
    ],
)
def test_links_are_wandbs_where_wandb_makes_them(tmp_path, link, is_odd):
    """A run with W&B, and a group of such runs, can be resumed; elsewhere a link would be written through."""
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to("/elsewhere")
    found = f"{link} is a link to /elsewhere, which would be written"
    assert odd_entry(tmp_path) == (found if is_odd else None)

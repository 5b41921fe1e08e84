"""What a page says that trains, evaluates and verifies a run once more: of what was stopped, cloned or handed over."""

import html
import json

import pytest
from made_runs import add_verification, make_group, make_run, summary_of

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from lockstep.report.again import again_of
from lockstep.report.page import page_of
from lockstep.report.reading import read_run


def page(path):
    return html.unescape(page_of([read_run(path, path.name)]))


def test_a_run_that_was_stopped_is_stopped_there_again(tmp_path):
    run = make_run(tmp_path / "demo", summary_of(status="stopped by a callback", global_step=5120))
    assert again_of(read_run(run, "demo")).train == f"lockstep train {run}/config.json --stop-at-step 5120"
    handed = make_run(
        tmp_path / "handed", summary_of(status="stopped at step", global_step=256), env={"id": "python:Reach2D"}
    )
    train = again_of(read_run(handed, "handed")).train
    assert train == f"lockstep.train(Reach2D, config='{handed}/config.json', stop_at_step=256)"


def test_a_second_file_of_metrics_is_not_written_again(tmp_path):
    """It holds the run's records, so that a command that names it is refused."""
    run = make_run(tmp_path / "demo", log={"jsonl": "mine.jsonl"})
    assert again_of(read_run(run, "demo")).train == f"lockstep train {run}/config.json --log.jsonl none"
    handed = make_run(tmp_path / "handed", log={"jsonl": "mine.jsonl"}, env={"id": "python:Reach2D"})
    train = again_of(read_run(handed, "handed")).train
    assert train == f"lockstep.train(Reach2D, config='{handed}/config.json', log=dict(jsonl=None))"


def on_two_ranks(run):
    """Has all of a run be trained on two ranks."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"time/world_size": 2}) + "\n" for row in rows))
    return run


def test_a_run_that_has_left_the_promise_is_not_said_to_keep_it(tmp_path):
    exact, fast = (page(on_two_ranks(make_run(tmp_path / name, reduction=name))) for name in ("exact", "fast"))
    for words in ("on any number of ranks it ends with these hashes", "The same agent again, on any number of ranks:"):
        assert words in exact
        assert words not in fast
    assert "on as many ranks it ends with these hashes" in fast
    assert "The same agent again, on as many ranks:" in fast


ENDS, AGAIN = "it ends with these hashes", "The same agent again"


def test_a_run_whose_environments_began_anew_does_not_come_again(tmp_path):
    run = make_run(tmp_path / "demo", summary_of(restarted_environments=[3, 5]))
    text = page(run)
    assert "not the same again, since environments began new episodes where it was resumed" in text
    assert "Outside of the promise: environments began new episodes where it was resumed" in text
    assert not any(words in text for words in (ENDS, AGAIN))


@pytest.mark.parametrize(
    ("facts", "why", "line"),
    [
        (
            {"first_machine_until": 5120},
            "not all of it was trained with the same hardware and versions (see Proof)",
            "from step 5120 on its hardware or versions are others than those it began with",
        ),
        (
            {"orders": [{"global_step": 5120, "setting": "collectives", "was": "auto", "is": "backend"}]},
            "its sums were added in another order from a resume on (see Proof)",
            "collectives was auto until step 5120 and is backend since, and with reduction fast the order of sums",
        ),
    ],
)
def test_nor_does_a_run_that_went_on_elsewhere_or_in_another_way(tmp_path, facts, why, line):
    text = page(make_run(tmp_path / "demo", summary_of(**facts)))
    assert f"not the same again, since {why}" in text
    assert f"Outside of the promise: {line}" in text
    assert not any(words in text for words in (ENDS, AGAIN))
    text = page(make_run(tmp_path / "whole", summary_of(first_machine_until=None, orders=[])))
    assert "Outside of the promise" not in text
    assert all(words in text for words in (ENDS, AGAIN))


def test_nor_does_a_group_with_such_a_seed(tmp_path):
    group = make_group(tmp_path / "many")
    summary = json.loads((group / "seed_1" / "summary.json").read_text())
    assert ENDS in page(group)
    (group / "seed_1" / "summary.json").write_text(json.dumps(summary | {"restarted_environments": [3]}))
    text = page(group)
    assert text.count("Outside of the promise: environments began new episodes") == 1
    assert not any(words in text for words in (ENDS, AGAIN))


@pytest.mark.parametrize(("reduction", "comes"), [("fast", False), ("exact", True)])
def test_a_run_on_changing_numbers_of_ranks_comes_again_if_they_do_not_matter(tmp_path, reduction, comes):
    text = page(make_run(tmp_path / "demo", reduction=reduction))
    assert "world size" in text
    assert "(iterations 11 to 40)" in text
    assert [words in text for words in (ENDS, AGAIN)] == [comes] * 2
    assert ("not the same again, since not all of it was trained on one number of ranks" in text) != comes
    assert ("Outside of the promise: its number of ranks was changed on the way" in text) != comes
    assert "on as many" not in text


def test_nor_do_seeds_that_were_trained_on_different_numbers_of_ranks_where_these_matter(tmp_path):
    group = make_group(tmp_path / "many")
    for path in (group, *group.glob("seed_*")):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"reduction": "fast"}))
    for seed in group.glob("seed_*"):
        on_two_ranks(seed)
    assert again_of(read_run(group, "many")).changed is None
    text = (group / "seed_1" / "metrics.jsonl").read_text().replace('"time/world_size": 2', '"time/world_size": 4')
    (group / "seed_1" / "metrics.jsonl").write_text(text)
    assert again_of(read_run(group, "many")).changed == "not all of it was trained on one number of ranks (see Proof)"


def test_seeds_that_stopped_apart_do_not_come_again(tmp_path):
    group = make_group(tmp_path / "many")
    assert again_of(read_run(group, "many")).changed is None
    summary = json.loads((group / "seed_1" / "summary.json").read_text())
    (group / "seed_1" / "summary.json").write_text(json.dumps(summary | {"status": "stopped at step"}))
    assert again_of(read_run(group, "many")).changed == "its seeds did not stop at the same step"
    assert "not the same again, since its seeds did not stop at the same step" in page(group)


def test_a_policy_that_was_cloned_is_not_said_to_come_from_training(tmp_path):
    run = make_run(tmp_path / "demo", summary_of(status="cloned"))
    add_verification(run)
    text = page(run)
    assert "No training made this policy" in text
    assert "The same agent" not in text
    assert "Verified" not in text
    assert "lockstep verify" not in text
    again = again_of(read_run(run, "demo"))
    assert (again.train, again.verify) == (None, None)
    assert again.evaluate.startswith(f"lockstep eval {run} ")


def test_a_loss_that_was_handed_over_is_given_again_to_train_but_not_to_evaluate(tmp_path):
    run = make_run(tmp_path / "demo", ppo={"loss": "python:mine"})
    again = again_of(read_run(run, "demo"))
    assert again.train == f"lockstep.train(config='{run}/config.json', ppo=dict(loss=mine))"
    assert again.verify is None
    assert again.evaluate.startswith(f"lockstep eval {run} --episodes 100 ")
    assert (again.is_python, again.evaluates_in_python) == (True, False)
    assert "its network or its loss was given as an object" in page(run)


def lengthened(path, **more):
    run = make_run(path, ppo={"schedule": "linear"}, total_steps=2048)
    (run / "summary.json").unlink()
    checkpoint = run / "checkpoints" / "step_1280"
    checkpoint.mkdir(parents=True)
    row = {"global_step": 1280, "was": 1280, "is": 2048}
    (checkpoint / "state.json").write_text(json.dumps({"global_step": 1280, "total_steps": 2048, "lengths": [row]}))
    config = json.loads((run / "config.json").read_text()) | {"num_envs": 8, "num_steps": 32} | more
    (run / "config.json").write_text(json.dumps(config | {"total_steps": 2048}))
    add_verification(run, config=config)
    return run


def test_a_run_that_was_lengthened_and_goes_on_is_verified_by_its_first_length(tmp_path):
    run = lengthened(tmp_path / "first", total_steps=1280)
    assert again_of(read_run(run, "first")).changed == "its length was changed on the way (see Proof)"
    text = page(run)
    assert "total_steps was 1280 until step 1280" in text
    assert "is of another config than this run's" not in text
    for name, more in (("now", {"total_steps": 2048}), ("longer", {"total_steps": 1280, "num_steps": 64})):
        assert "is of another config than this run's" in page(lengthened(tmp_path / name, **more))

"""A ``Run`` keeps what it was handed and trained with, wherever it stands for its directory."""

import shutil

import handed_envs
import pytest
from made_runs import make_run
from scripts_classes import of_a_script

import lockstep

SMALL = {"num_steps": 16, "total_steps": 256, "quiet": True}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # whose list no other test writes
    return tmp_path / "runs"


@pytest.fixture
def no_list(tmp_path, monkeypatch):
    """An account that can keep no list of trusted names."""
    (tmp_path / "account").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "account"))


def test_what_this_process_has_trained_with_is_trusted_without_a_list(no_list):
    run = lockstep.train("handed_envs:Counting", name="a", network={"custom": "users_nets:Tiny"}, **SMALL)
    assert run.policy([0.0, 0.0]) in (0, 1)
    assert lockstep.load_policy(run)([0.0, 0.0]) in (0, 1)
    assert run.evaluate(1)["episodes"] == 1
    assert run.resume(512, quiet=True).policy.global_step == 512
    assert lockstep.train(resume=run, total_steps=768, quiet=True).policy.global_step == 768
    for again in (lockstep.load_run(run.path), lockstep.load_run("a")):
        with pytest.raises(ValueError, match=r"give trust=True$"):
            _ = again.policy
    with pytest.raises(ValueError, match=r"^env\.id: .* names handed_envs:Counting, .* give trust=True$"):
        lockstep.load_policy(run.path)


def test_a_config_that_names_something_else_by_now_is_refused(no_list):
    run = lockstep.train("handed_envs:Counting", name="a", **SMALL)
    theirs = lockstep.train("handed_envs:short", name="b", **SMALL)
    shutil.copy(theirs.path / "config.json", run.path / "config.json")
    for use in (lambda: run.policy, lambda: run.evaluate(1), lambda: run.resume(512)):
        with pytest.raises(ValueError, match=r"names handed_envs:short, which would be imported"):
            use()


def test_a_run_that_logs_and_is_mirrored_goes_on_without_a_list(no_list, tmp_path):
    places = {"log": {"jsonl": str(tmp_path / "log.jsonl")}, "checkpoint": {"mirror": f"file://{tmp_path}/copies"}}
    run = lockstep.train("CartPole-v1", name="a", **places, **SMALL)
    assert run.resume(512, quiet=True).policy.global_step == 512
    assert lockstep.train(resume=run, total_steps=768, quiet=True).policy.global_step == 768
    for use in (lambda: lockstep.load_run(run.path).resume(1024), lambda: lockstep.train(resume=run.path)):
        with pytest.raises(ValueError, match=r"give trust=True$"):
            use()


def test_seeds_of_a_mirrored_group_may_import_what_the_group_was_trained_with(request, tmp_path):
    mirror = {"mirror": f"file://{tmp_path}/copies"}
    group = lockstep.train("handed_envs:Counting", name="a", seeds=range(2), checkpoint=mirror, **SMALL)
    request.getfixturevalue("no_list")
    assert group.seeds[1].policy([0.0, 0.0]) in (0, 1)
    assert group.seeds[1].evaluate(1)["episodes"] == 1
    assert group.seeds[1].resume(512, quiet=True).policy.global_step == 512
    assert [run.policy.global_step for run in group.resume(768, quiet=True).seeds] == [768, 768]


def test_a_group_is_trained_with_code_of_ones_own_and_a_mirror_without_a_list(no_list, tmp_path):
    mirror = {"mirror": f"file://{tmp_path}/copies"}
    group = lockstep.train("handed_envs:Counting", name="a", seeds=range(2), checkpoint=mirror, **SMALL)
    assert [run.policy.global_step for run in group.seeds] == [256, 256]
    assert lockstep.train(resume=group, total_steps=512, quiet=True).seeds[0].policy.global_step == 512
    with pytest.raises(ValueError, match=r"give trust=True$"):
        lockstep.load_run("a").resume(768)


def test_seeds_with_places_of_their_own_keep_them_where_their_group_goes_on(tmp_path):
    shared, own = (f"file://{tmp_path}/{name}" for name in ("shared", "own"))
    places = {"checkpoint": {"mirror": shared}}
    group = lockstep.train("CartPole-v1", name="a", seeds=range(2), **places, **SMALL)
    group.seeds[1].resume(512, checkpoint={"mirror": own}, quiet=True)
    longer = group.resume(768, quiet=True)
    assert [run.config.checkpoint.mirror for run in longer.seeds] == [f"{shared}/a", own]
    assert [run.summary["global_step"] for run in longer.seeds] == [768, 768]
    again = longer.resume(1024, checkpoint={"mirror": shared}, quiet=True)
    assert [run.config.checkpoint.mirror for run in again.seeds] == [f"{shared}/a"] * 2


def test_a_run_stands_for_what_it_was_handed_too():
    network = of_a_script("users_nets", "Tiny")
    run = lockstep.train(of_a_script("handed_envs", "Counting"), name="a", network={"custom": network}, **SMALL)
    assert (run.config.env.id, run.config.network.custom) == ("python:Counting", "python:Tiny")
    observation = [0.5, 1.0]
    expected = run.policy.value(observation)
    assert lockstep.load_policy(run).value(observation) == expected
    again = lockstep.load_run(run)
    assert again.policy.value(observation) == expected
    assert again.evaluate(1)["length_mean"] == 10
    longer = lockstep.train(resume=run, total_steps=512, quiet=True)
    assert longer.summary["global_step"] == 512
    assert longer.evaluate(1)["length_mean"] == 10
    counting = of_a_script("handed_envs", "Counting")
    assert lockstep.train(counting, resume=longer, total_steps=528, quiet=True).policy.value(observation)


def test_a_run_in_hand_may_be_given_others():
    run = lockstep.train(of_a_script("handed_envs", "Counting"), name="a", **SMALL)
    again = lockstep.load_run(run, env=handed_envs.Counting)
    assert [each.given for each in again.given] == [handed_envs.Counting]
    assert not again.trust
    assert lockstep.load_run(lockstep.load_run(run, trust=True)).trust


METHODS = {
    "load_policy": lambda run: run.load_policy(),
    "evaluate": lambda run: run.evaluate(1),
    "record_video": lambda run: run.record_video("a.mp4"),
    "export": lambda run: run.export(torch="a.pt2"),
    "lockstep.load_policy": lockstep.load_policy,
}


@pytest.mark.parametrize("method", METHODS)
def test_refusals_of_strangers_runs_name_an_argument(method):
    run = lockstep.load_run(lockstep.train("handed_envs:Counting", name="a", trust=True, **SMALL).path)
    with pytest.raises(ValueError, match=r"give trust=True$") as refusal:
        METHODS[method](run)
    assert "--" not in str(refusal.value)


def test_a_report_overwrites_no_file_of_another_kind(tmp_path):
    run = lockstep.load_run(make_run(tmp_path / "a"))
    config, policy = run.path / "config.json", tmp_path / "policy.pt2"
    policy.write_text("weights")
    before = config.read_bytes()
    for file in (config, policy):
        with pytest.raises(ValueError, match=rf"^out: \S+{file.name} must end in \.html or \.htm$"):
            run.report(file)
    assert (config.read_bytes(), policy.read_text()) == (before, "weights")


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda run: run.export(onnx="a.bin"), r"onnx: a\.bin must end in \.onnx"),
        (lambda run: run.evaluate(0), "episodes: 0 is below 1"),
        (lambda run: run.report(5), r"out: 5 names no file; give text or a path, e\.g\. 'report\.html'"),
        (lambda run: run.report(""), r"out: '' names no file; give text or a path, e\.g\. 'report\.html'"),
        (lambda run: run.evaluate(seed="x"), "seed: 'x' is no whole number"),
    ],
)
def test_what_a_method_refuses_is_its_argument(use, said):
    run = lockstep.train("CartPole-v1", name="a", **SMALL)
    with pytest.raises(ValueError, match=f"^{said}$"):
        use(run)


def test_a_resumed_run_takes_no_other_name_and_no_other_run():
    run, other = (lockstep.train("CartPole-v1", name=name, **SMALL) for name in ("a", "b"))
    named = r"^name: 'u' with resume '.*'; a resumed run keeps its name$"
    with pytest.raises(ValueError, match=named):
        lockstep.train(resume="a", name="u", total_steps=512, quiet=True)
    with pytest.raises(ValueError, match=named):
        run.resume(512, name="u")
    with pytest.raises(ValueError, match=r"^resume: 'b' is given, but this resumes .*/runs/a; leave it out$"):
        run.resume(512, resume="b")
    assert [each.summary["global_step"] for each in (run, other)] == [256, 256]
    assert run.resume(512, name=None, resume=None, quiet=True).summary["global_step"] == 512


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_summary_is_called_that_and_ends_no_prompt(tmp_path, content):
    run = lockstep.load_run(make_run(tmp_path / "a"))
    (run.path / "summary.json").write_text(content)
    assert run.status == "not finished"
    assert "not finished" in repr(run)
    with pytest.raises(ValueError, match=r"^\S+summary\.json is damaged: "):
        _ = run.final_return

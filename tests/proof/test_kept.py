"""``verify.json``: which runs a verification is kept beside, and what it says."""

import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_runs import make_run, rows_of, summary_of

from lockstep.cli import main
from lockstep.commands import verify as command
from lockstep.config.run import Config
from lockstep.core.fingerprint import array_digest, sha256_of
from lockstep.proof.kept import keep, run_of
from lockstep.proof.verify import Comparison, Trace, compare, recorded_config, verify
from lockstep.report.lengths import lengths_of
from lockstep.report.proof import proof_of
from lockstep.report.reading import read_run
from lockstep.runs.checkpoint import to_files


def compared(equal=True):
    tensors = [{"iteration": 1, "policy/w": "a", "policy/b": "b"}]
    traces = [Trace(n, None, tensors, [{}], facts={"torch": "2.13", "wall_time": 1.0}) for n in (1, 2)]
    return [Comparison(traces[0], True, ""), Comparison(traces[1], equal, "" if equal else "iteration 1: policy/w")]


def ended_early(error, number=1):
    """Results of which one world size ended with an error before it had trained."""
    results = compared()
    trace = replace(results[number].trace, error=error, tensors=[], metrics=[], facts={})
    results[number] = replace(results[number], trace=trace)
    return [compare(results[0].trace, result.trace) for result in results]


KILLED = "rank 1 of 2 was killed by SIGKILL; out of memory?"
OUT_OF_SYNC = "ranks are out of sync at the start: rank 1 of 2 holds other bytes than rank 0 in 1 of 2 tensors, first w"


def config_of(run):
    return Config.model_validate_json((run / "config.json").read_text())


def test_a_run_is_found_by_its_directory_its_config_and_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "demo")
    make_run(tmp_path / "runs" / "CartPole-v1")
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert run_of(str(run)) == run_of(str(run / "config.json")) == run
    assert (tmp_path / (run_of("demo") or "")).samefile(run)
    assert [run_of(name) for name in ("CartPole-v1", "config.json", "nothing", "some/where")] == [None] * 4


def test_of_a_group_of_seeds_one_is_to_be_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = tmp_path / "runs" / "many"
    text = (make_run(group / "seed_0") / "config.json").read_text()
    make_run(group / "seed_1")
    (group / "config.json").write_text(text)
    for target in ("many", "runs/many"):
        with pytest.raises(ValueError, match="many holds a run for each of 2 seeds; give one of them"):
            run_of(target)
    assert run_of("runs/many/seed_0") is not None


@pytest.mark.parametrize("equal", [True, False])
def test_what_was_found_is_kept(tmp_path, equal):
    run = make_run(tmp_path / "demo")
    said = json.loads(keep(run, compared(equal), config_of(run), 5).read_text())
    assert (said["equal"], said["iterations"], said["reduction"]) == (equal, 5, "exact")
    rows = [(row["label"], row["equal"], row["tensors"], row["difference"]) for row in said["world_sizes"]]
    assert rows == [("1", True, 2, ""), ("2", equal, 2, "" if equal else "iteration 1: policy/w")]
    assert said["machine"] == {"torch": "2.13"}
    assert said["config"] == json.loads((run / "config.json").read_text())


@pytest.mark.parametrize("number", [0, 1], ids=["the reference", "another"])
def test_a_world_size_that_failed_is_no_difference_and_leaves_what_was_kept(tmp_path, monkeypatch, capsys, number):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "demo")
    before = keep(run, compared(), config_of(run), 5).read_bytes()
    monkeypatch.setattr(command, "verify", lambda *_: ended_early(KILLED, number))
    assert main(["verify", "demo", "--world-sizes", "1,2"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"NOT VERIFIED: world size {number + 1} failed; the table says why"
    lines = [line.split("│") for line in said.out.splitlines() if line.startswith("│")]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines}
    others = ["yes", "2", ""] if number else ["–", "2", "not compared: the first world size did not end"]
    assert rows == {str(number + 1): ["failed", "–", KILLED], str(2 - number): others}
    assert f"nothing is kept of this beside the run: world size {number + 1} failed, which says nothing" in said.err
    assert (run / "verify.json").read_bytes() == before


def test_ranks_out_of_sync_are_kept_with_the_machine_of_those_that_ended(tmp_path, capsys):
    run = make_run(tmp_path / "demo")
    results = ended_early(OUT_OF_SYNC)
    said = json.loads(keep(run, results, config_of(run), 5).read_text())
    assert (said["equal"], said["machine"]) == (False, {"torch": "2.13"})
    assert said["world_sizes"][1]["difference"] == OUT_OF_SYNC
    command.print_table(config_of(run), results, 5)
    assert "NOT VERIFIED: the run depends on its world size, or a rank left the others" in capsys.readouterr().out


def test_the_page_compares_the_machine_of_a_verification_with_that_of_the_runs_first_steps(tmp_path):
    run = run_here(tmp_path / "demo", HERE | {"torch": "2.12"})
    keep(run, compared(), config_of(run), 3)
    assert proof_of(read_run(run, "demo")).verified.apart == ("torch 2.13 there, 2.12 here",)


def test_of_another_config_nothing_is_kept(tmp_path):
    run = make_run(tmp_path / "demo")
    config = config_of(run)
    with pytest.raises(ValueError, match=r"seed is 0 in .*demo and was 3 here"):
        keep(run, compared(), config.model_copy(update={"seed": 3}), 5)
    assert not (run / "verify.json").exists()


def test_another_spelling_of_the_reference_policy_is_the_same_config(tmp_path):
    grpo = config_of(make_run(tmp_path / "any")).grpo.model_dump() | {"kl_coef": 0.1}
    run = make_run(tmp_path / "demo", algorithm="grpo", grpo=grpo | {"reference": "/old/first/checkpoints/step_128"})
    stored = config_of(run)

    def naming(reference):
        return stored.model_copy(update={"grpo": stored.grpo.model_copy(update={"reference": reference})})

    same, other = naming("first/checkpoints/step_128"), naming("second/checkpoints/step_128")
    assert recorded_config(run, same, 5).grpo == same.grpo  # trained with the place that was given
    assert json.loads(keep(run, compared(), same, 5).read_text())["config"] == stored.model_dump(mode="json")
    with pytest.raises(ValueError, match=r"^against: .*demo was trained with grpo\.reference /old/first"):
        recorded_config(run, other, 5)
    with pytest.raises(ValueError, match=r"^grpo\.reference is /old/first/.* in .*demo and was second"):
        keep(run, compared(), other, 5)


SHORTER = {"total_steps": 999}


def test_of_another_length_it_is_kept_if_no_schedule_follows_it(tmp_path):
    ppo = config_of(make_run(tmp_path / "any")).ppo.model_dump(mode="json")
    constant = ppo | {"schedule": "constant", "clip_schedule": "constant"}
    run = make_run(tmp_path / "constant", ppo=constant)
    assert keep(run, compared(), config_of(run).model_copy(update=SHORTER), 5).is_file()
    run = make_run(tmp_path / "linear", ppo=constant | {"clip_schedule": "linear"})
    with pytest.raises(ValueError, match=r"total_steps was \d+ in these iterations of .*linear and 999 here"):
        keep(run, compared(), config_of(run).model_copy(update=SHORTER), 5)
    assert not (run / "verify.json").exists()


@pytest.mark.parametrize(
    ("iterations", "total_steps", "said"),
    [
        (2, 1024, None),
        (2, 2048, "total_steps was 1024 in these iterations"),
        (3, 1024, "until step {two} and by 2048 from there on; use --iterations 2"),
    ],
)
def test_of_a_run_with_two_lengths_that_of_these_iterations_counts(tmp_path, iterations, total_steps, said):
    made = make_run(tmp_path / "made")
    two = 2 * config_of(made).steps_per_iteration
    ppo = config_of(made).ppo.model_dump(mode="json") | {"schedule": "linear"}
    summary = summary_of(lengths=[{"global_step": two, "was": 1024, "is": 2048}])
    run = make_run(tmp_path / "resumed", summary, total_steps=2048, ppo=ppo)
    config = config_of(run).model_copy(update={"total_steps": total_steps})
    if said is None:
        assert keep(run, compared(), config, iterations).is_file()
        assert recorded_config(run, config_of(run), iterations).total_steps == 1024
        return
    with pytest.raises(ValueError, match=re.escape(said.format(two=two))):
        keep(run, compared(), config, iterations)
    if iterations == 3:
        with pytest.raises(ValueError, match=r"against: schedules of .* use --iterations 2"):
            recorded_config(run, config, iterations)


def test_what_was_trained_with_the_length_of_the_recorded_run_is_kept_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "recorded")
    assert config_of(run).ppo.schedule == "linear"
    monkeypatch.setattr(command, "verify", lambda *_: compared())
    words = ["--world-sizes", "1,2", "--against", "recorded", "--total-steps", "999"]
    assert main(["verify", "CartPole-v1", *words]) == 0
    assert json.loads((run / "verify.json").read_text())["config"] == json.loads((run / "config.json").read_text())


def test_more_iterations_than_schedules_have_are_refused(tmp_path):
    config = config_of(make_run(tmp_path / "made"))
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"schedule": "linear"})})
    config = config.model_copy(update={"total_steps": 4 * config.steps_per_iteration + 1})
    with pytest.raises(ValueError, match=r"iterations: 6, .* which are 5; use --iterations 5, or a larger"):
        verify(config, [(1, 1), (2, 1)], 6)


def test_the_command_keeps_it_beside_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, other = make_run(tmp_path / "runs" / "demo"), make_run(tmp_path / "runs" / "recorded")
    asked = []

    def verify(config, *words):
        asked.append((config, *words))
        return compared()

    monkeypatch.setattr(command, "verify", verify)
    assert main(["verify", "demo", "--world-sizes", "1,2", "--iterations", "3"]) == 0
    assert (asked[0][0], asked[0][2]) == (config_of(run), 3)
    assert json.loads((run / "verify.json").read_text())["equal"] is True
    assert main(["verify", "CartPole-v1", "--world-sizes", "1,2", "--against", "recorded"]) == 0
    assert (other / "verify.json").is_file()
    (run / "verify.json").unlink()
    capsys.readouterr()
    assert main(["verify", "demo", "--world-sizes", "1,2", "--seed", "3"]) == 0
    assert "nothing is kept of this beside the run: seed is 0" in capsys.readouterr().err
    assert not (run / "verify.json").exists()


def lengthened(path, summary=None):
    """A run whose schedules fell by 1024 steps until its first iterations were done, and is killed or goes on."""
    made = config_of(make_run(path.parent / f"{path.name}_made"))
    two = 2 * made.steps_per_iteration
    ppo = made.ppo.model_dump(mode="json") | {"schedule": "linear"}
    run = make_run(path, summary, total_steps=2048, ppo=ppo)
    (run / "summary.json").unlink()
    return run, two


def add_state(run, **state):
    checkpoint = run / "checkpoints" / f"step_{state['global_step']}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["since a checkpoint", "before the next checkpoint"])
def test_a_run_without_a_summary_says_by_its_checkpoint_with_which_length_it_began(tmp_path, has_checkpoint):
    run, two = lengthened(tmp_path / "runs" / "demo")
    row = {"global_step": two, "was": 1024, "is": 2048}
    if has_checkpoint:
        add_state(run, global_step=two + 256, total_steps=2048, lengths=[row])
    else:
        add_state(run, global_step=two, total_steps=1024, lengths=[])
    config = config_of(run)
    assert lengths_of(run, config.model_dump(mode="json")) == [row]
    assert recorded_config(run, config, 2).total_steps == 1024
    with pytest.raises(ValueError, match=r"total_steps was 1024 in these iterations"):
        keep(run, compared(), config, 2)


def test_the_command_takes_the_length_with_which_a_run_began(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, two = lengthened(tmp_path / "runs" / "demo")
    add_state(run, global_step=two, total_steps=2048, lengths=[{"global_step": two, "was": 1024, "is": 2048}])
    asked = []
    monkeypatch.setattr(command, "verify", lambda config, *words: asked.append((config, *words)) or compared())
    assert main(["verify", "demo", "--world-sizes", "1,2"]) == 0
    assert (asked[0][0].total_steps, asked[0][2]) == (1024, 2)
    assert "total_steps 1024, as in the first iterations of" in capsys.readouterr().err
    assert json.loads((run / "verify.json").read_text())["config"]["total_steps"] == 1024
    assert main(["verify", "demo", "--world-sizes", "1,2", "--iterations", "3"]) == 2
    assert "use --iterations 2" in capsys.readouterr().err
    assert main(["verify", "demo", "--world-sizes", "1,2", "--total-steps", "2048"]) == 0
    assert asked[1][0].total_steps == 2048
    assert "nothing is kept" in capsys.readouterr().err


def test_iterations_that_nobody_gave_are_no_more_than_schedules_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(command, "verify", lambda *words: asked.append(words[2]) or compared())
    steps = 2 * config_of(make_run(tmp_path / "made")).steps_per_iteration
    for words in (["--total-steps", str(steps)], ["--iterations", "4", "--total-steps", str(steps)], []):
        assert main(["verify", "CartPole-v1", "--world-sizes", "1,2", *words]) == 0
    assert asked == [2, 4, 5]


def checkpointed(run, **then):
    """Leaves a checkpoint that a run wrote with its config, of which some settings were others then."""
    checkpoint = run / "checkpoints" / "step_512"
    checkpoint.mkdir(parents=True)
    config = json.loads((run / "config.json").read_text()) | then
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": {}, "step": 512, "config": config}))
    return run


def test_of_a_config_that_was_edited_by_hand_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = checkpointed(make_run(tmp_path / "runs" / "demo", seed=5), seed=0)
    monkeypatch.setattr(command, "verify", lambda *_: compared())
    assert main(["verify", "demo", "--world-sizes", "1,2"]) == 0
    said = "seed: runs/demo/config.json says 5, but it was 0 when step_512 was written; put it back"
    assert f"nothing is kept of this beside the run: {said}" in capsys.readouterr().err
    assert not (run / "verify.json").exists()
    with pytest.raises(ValueError, match=f"^against: {said.replace('runs/demo', str(run))}"):
        recorded_config(run, config_of(run), 2)


def test_settings_that_a_resumed_run_may_change_are_not_said_to_be_edited(tmp_path):
    run = make_run(tmp_path / "demo")
    checkpointed(run, total_steps=999, eval=config_of(run).eval.model_dump() | {"interval": 7})
    assert keep(run, compared(), config_of(run), 2).is_file()
    assert recorded_config(run, config_of(run), 2).eval.interval == config_of(run).eval.interval


HERE = {"lockstep": "0.1.0", "cpu": "Some Processor (family 1)", "torch": "2.13.0+cpu"}


def trained_now(rows, facts=HERE, recorded=None):
    """Results of which the first trace has these metrics."""
    tensors = [{"iteration": row["iteration"], "policy/w": "a"} for row in rows]
    first, second = Trace(1, None, tensors, rows, facts=facts), Trace(2, None, tensors, rows, facts=facts)
    results = [Comparison(first, True, ""), Comparison(second, True, "")]
    if recorded is not None:
        results.insert(0, Comparison(replace(first, recorded=recorded), True, ""))
    return results


def first_rows(**changes):
    rows = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows_of()[:3]]
    rows[1] |= changes
    return rows


def run_here(path, first=HERE, **summary):
    """A run that began with those facts of machine and versions, and whose last session had those of here."""
    return make_run(path, summary_of(**HERE | {"first_machine": first} | summary))


OTHER_RETURN = {"rollout/episode_return_mean": 99.0}
REFUSED = r"iteration 2: rollout/episode_return_mean is 2.0 in {run}/metrics.jsonl and was 99.0 here"


def test_beside_a_run_whose_first_rows_are_others_nothing_is_kept(tmp_path):
    run = run_here(tmp_path / "demo")
    with pytest.raises(ValueError, match=f"^{REFUSED.format(run=run)}, with the same config, versions and machine;"):
        keep(run, trained_now(first_rows(**OTHER_RETURN)), config_of(run), 3)
    assert not (run / "verify.json").exists()
    with pytest.raises(
        ValueError, match=r"train/entropy is 0\.6799999999999999 in .* and was 0\.6800000000000002 here"
    ):
        keep(run, trained_now(first_rows(**{"train/entropy": 0.6800000000000002})), config_of(run), 3)


@pytest.mark.parametrize(
    "changes", [{}, {"mine": 3.0, "my/metric": 7.0, "eval/return_mean": 1.0}, {"train/new": 1.0}, {"global_step": 1}]
)
def test_what_a_run_has_otherwise_than_rollout_and_train_is_no_difference(tmp_path, changes):
    run = run_here(tmp_path / "demo")
    assert keep(run, trained_now(first_rows(**changes)), config_of(run), 3).is_file()


@pytest.mark.parametrize(
    "summary",
    [
        *({"first": HERE | other} for other in ({"cpu": "Another"}, {"lockstep": "0.0.9"}, {"torch": None})),
        {"first": None},
        {"restarted_environments": [3]},
        {"first_machine_until": 256},
    ],
    ids=["machine", "version", "unknown", "an older version", "environments that began anew", "from iteration 2 on"],
)
def test_rows_of_a_run_that_other_things_explain_are_not_compared(tmp_path, summary):
    run = run_here(tmp_path / "demo", **summary)
    assert keep(run, trained_now(first_rows(**OTHER_RETURN)), config_of(run), 3).is_file()


@pytest.mark.parametrize("since", [{}, {"first_machine_until": 512, "torch": "2.14.0+cpu", "cpu": "Another"}])
def test_rows_are_those_of_the_first_machine_and_versions_whatever_the_last_session_had(tmp_path, since):
    run = run_here(tmp_path / "demo", num_envs=8, **since)
    assert config_of(run).steps_per_iteration == 256
    with pytest.raises(ValueError, match=REFUSED.format(run=run)):
        keep(run, trained_now(first_rows(**OTHER_RETURN)), config_of(run), 3)


def test_rows_are_compared_under_exact_alone_and_up_to_a_missing_one(tmp_path):
    run = make_run(tmp_path / "fast", summary_of(first_machine=HERE), reduction="fast")
    assert keep(run, trained_now(first_rows(**OTHER_RETURN)), config_of(run), 3).is_file()
    run = run_here(tmp_path / "short")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]))
    assert keep(run, trained_now(first_rows(**OTHER_RETURN)), config_of(run), 3).is_file()


def test_a_recorded_run_was_compared_with_its_own_rows_already(tmp_path):
    run, other = run_here(tmp_path / "demo"), run_here(tmp_path / "other")
    results = trained_now(first_rows(**OTHER_RETURN), recorded=run)
    assert keep(run, results, config_of(run), 3).is_file()
    with pytest.raises(ValueError, match=REFUSED.format(run=other)):
        keep(other, results, config_of(other), 3)


def trained_weights(iteration):
    return {"policy/w": np.full(3, float(iteration), np.float32)}


def trained_with_weights():
    """Results whose policies :func:`trained_weights` has, of three iterations."""
    tensors = [
        {"iteration": number} | {name: array_digest(array).hex() for name, array in trained_weights(number).items()}
        for number in (1, 2, 3)
    ]
    return [replace(each, trace=replace(each.trace, tensors=tensors)) for each in trained_now(first_rows())]


def add_checkpoint(run, iteration, arrays, damaged=False):
    path = run / "checkpoints" / f"step_{iteration * config_of(run).steps_per_iteration}"
    path.mkdir(parents=True)
    files = to_files(arrays, {}, {"iteration": iteration})
    manifest = {"format": 1, "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}}
    for name, content in files.items():
        (path / name).write_bytes(content)
    if damaged:
        (path / "policy.safetensors").write_bytes(to_files({"policy/w": np.zeros(3)}, {}, {})["policy.safetensors"])
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_beside_a_run_whose_fingerprints_are_others_nothing_is_kept(tmp_path):
    run, results = run_here(tmp_path / "demo"), trained_with_weights()
    rows = [dict(row) for row in results[0].trace.tensors]
    (run / "fingerprints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert keep(run, results, config_of(run), 3).is_file()
    rows[2]["policy/w"] = rows[1]["policy/w"]
    (run / "fingerprints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"iteration 3 of .*fingerprints.jsonl has other bytes .* first policy/w"):
        keep(run, results, config_of(run), 3)


def test_beside_a_run_with_a_checkpoint_of_another_nothing_is_kept(tmp_path):
    run, results = run_here(tmp_path / "demo"), trained_with_weights()
    add_checkpoint(run, 3, trained_weights(3))
    add_checkpoint(run, 4, trained_weights(9))  # later than what was trained here
    assert keep(run, results, config_of(run), 3).is_file()
    add_checkpoint(run, 2, trained_weights(1))
    with pytest.raises(ValueError, match=r"step_\d+ has other bytes than were trained here, in 1 of 1 tensors"):
        keep(run, results, config_of(run), 3)


def test_beside_a_run_whose_newest_checkpoint_was_changed_nothing_is_kept(tmp_path):
    run = run_here(tmp_path / "demo")
    add_checkpoint(run, 7, trained_weights(7), damaged=True)
    with pytest.raises(ValueError, match=r"policy.safetensors is damaged"):
        keep(run, compared(), config_of(run), 1)
    ends = {"global_step": 7 * config_of(run).steps_per_iteration, "state_sha256": sha256_of(trained_weights(7))}
    right, wrong = (run_here(tmp_path / name, **ends) for name in ("right", "wrong"))
    add_checkpoint(right, 7, trained_weights(7))
    add_checkpoint(wrong, 7, trained_weights(8))
    assert keep(right, compared(), config_of(right), 1).is_file()
    with pytest.raises(ValueError, match=r"holds another state \(sha256 .*\) than summary.json names"):
        keep(wrong, compared(), config_of(wrong), 1)


def test_beside_a_run_with_a_damaged_row_nothing_is_kept(tmp_path):
    run = run_here(tmp_path / "demo")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n{"itera\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is no metrics record"):
        keep(run, trained_now(first_rows()), config_of(run), 3)


def test_settings_that_differ_only_in_type_are_another_config(tmp_path):
    run = make_run(tmp_path / "demo", env={"id": "CartPole-v1", "kwargs": {"flag": True, "more": [{"x": 1.0}]}})
    assert keep(run, compared(), config_of(run), 5).is_file()
    for kwargs in ({"flag": 1, "more": [{"x": 1.0}]}, {"flag": True, "more": [{"x": 1}]}):
        env = config_of(run).env.model_copy(update={"kwargs": kwargs})
        with pytest.raises(ValueError, match=r"env.kwargs is .* in .*demo and was .* here"):
            keep(run, compared(), config_of(run).model_copy(update={"env": env}), 5)

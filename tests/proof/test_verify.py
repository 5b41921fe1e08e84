import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import config_of

from lockstep.commands.verify import print_table
from lockstep.config.run import Config
from lockstep.proof import verify as module
from lockstep.proof.verify import Comparison, Trace, compare, machines_apart, parse_worlds, recorded_trace, run_trace

GOLDEN = Path(__file__).parents[1] / "golden" / "runs" / "torch_cartpole"


def tensors():
    return [{"iteration": i, "policy/w": f"w{i}", "policy/b": f"b{i}", "optimizer/step": f"s{i}"} for i in (1, 2, 3)]


def metrics():
    return [{"iteration": i, "global_step": 8 * i, "train/loss": 0.5 / i, "rollout/return": None} for i in (1, 2, 3)]


def trace(world_size=2, error=None, **changes):
    return replace(Trace(world_size, error, tensors(), metrics()), **changes)


def with_rows(kind, rows):
    return replace(trace(), **{kind: rows})


def changed(rows, iteration, **values):
    return [row | (values if row["iteration"] == iteration else {}) for row in rows]


def without(rows, key):
    return [{k: v for k, v in row.items() if k != key} for row in rows]


REFERENCE = trace(1)


def test_equal_traces_are_equal():
    result = compare(REFERENCE, trace(2))
    assert (result.equal, result.difference) == (True, "")
    assert result.trace.world_size == 2
    assert compare(REFERENCE, REFERENCE).equal


def test_the_first_tensor_that_differs_is_named_with_its_iteration():
    other = changed(changed(tensors(), 2, **{"policy/b": "x"}), 3, **{"policy/w": "y"})
    result = compare(REFERENCE, trace(tensors=other))
    assert not result.equal
    assert result.difference == "iteration 2: 1 of 3 tensors, first policy/b"


def test_all_tensors_that_differ_are_counted():
    other = changed(tensors(), 1, **{"policy/w": "x", "optimizer/step": "y"})
    assert compare(REFERENCE, trace(tensors=other)).difference == "iteration 1: 2 of 3 tensors, first policy/w"


def test_a_metric_that_differs_is_named_with_both_values():
    result = compare(REFERENCE, trace(metrics=changed(metrics(), 2, **{"train/loss": 0.25000000000000006})))
    assert not result.equal
    assert result.difference == "iteration 2: no tensor; metric train/loss: 0.25 against 0.25000000000000006"


def test_a_tensor_and_a_metric_together():
    other = trace(
        tensors=changed(tensors(), 3, **{"policy/w": "x"}), metrics=changed(metrics(), 3, **{"rollout/return": 1.0})
    )
    difference = compare(REFERENCE, other).difference
    assert difference == "iteration 3: 1 of 3 tensors, first policy/w; metric rollout/return: None against 1.0"


@pytest.mark.parametrize("kind", ["tensors", "metrics"])
def test_a_missing_iteration_is_a_difference(kind):
    rows = {"tensors": tensors(), "metrics": metrics()}[kind]
    result = compare(REFERENCE, with_rows(kind, rows[:2]))
    assert (result.equal, result.difference) == (False, "2 iterations against 3")
    result = compare(REFERENCE, with_rows(kind, []))
    assert (result.equal, result.difference) == (False, "0 iterations against 3")


@pytest.mark.parametrize(("kind", "key"), [("tensors", "policy/b"), ("metrics", "rollout/return")])
def test_a_missing_tensor_or_metric_is_a_difference_on_either_side(kind, key):
    rows = {"tensors": tensors(), "metrics": metrics()}[kind]
    less = with_rows(kind, without(rows, key))
    for reference, other in ((REFERENCE, less), (less, REFERENCE)):
        result = compare(reference, other)
        assert not result.equal
        assert key in result.difference


def test_a_run_that_failed_is_not_equal_and_says_why():
    result = compare(REFERENCE, trace(error="env.id: no such environment", tensors=[], metrics=[]))
    assert (result.equal, result.difference) == (False, "env.id: no such environment")
    failed = trace(1, error="out of memory")
    assert not compare(failed, failed).equal


def test_if_the_reference_failed_nothing_is_compared_with_it():
    failed = trace(1, error="out of memory", tensors=[], metrics=[])
    result = compare(failed, trace(2))
    assert (result.equal, result.difference) == (False, "not compared: the first world size did not end")


@pytest.mark.parametrize("text", [b"libworld: caf\xe9", b"lockstep: error: env.id: caf\xe9"])
def test_what_a_run_prints_may_be_any_bytes(tmp_path, monkeypatch, text):
    code = f"import os; os.write(2, {text!r}); os._exit(1)"
    monkeypatch.setattr(module, "command_that_ends_with_us", lambda *_: [sys.executable, "-S", "-c", code])
    config = Config.model_validate(config_of())
    assert run_trace(config, 2, 1, tmp_path).error == text.decode(errors="replace").removeprefix("lockstep: error: ")


def test_a_reference_policy_may_be_named_by_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "runs" / "first")
    asked = []

    def trained(config, world_size, iterations, directory, processes):
        del iterations, directory, processes
        asked.append(config.grpo.reference)
        return trace(world_size)

    monkeypatch.setattr(module, "run_trace", trained)
    grpo = {"kl_coef": 0.1, "reference": "first"}
    settings = {"algorithm": "grpo", "grpo": grpo, "network": {"hidden_sizes": [16, 16]}}
    config = Config.model_validate(settings | {"num_envs": 32, "ppo": {"schedule": "constant"}})
    assert all(result.equal for result in module.verify(config, [(1, 1), (2, 1)], 3))
    assert asked == [str(tmp_path / "runs" / "first" / "checkpoints" / "step_256")] * 2


@pytest.mark.parametrize(("total", "trained"), [(100, 512), (1000, 1000)])
def test_a_run_without_schedules_is_as_long_as_its_iterations_need(monkeypatch, total, trained):
    """If its length isn't enough, it ends before there is anything to compare; more of it changes nothing."""
    asked = []

    def run_trace(config, world_size, *_):
        asked.append(config.total_steps)
        return trace(world_size)

    monkeypatch.setattr(module, "run_trace", run_trace)
    config = Config.model_validate({"num_envs": 8, "num_steps": 16, "total_steps": total})
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"schedule": "constant"})})
    module.verify(config, [(1, 1), (2, 1)], 4)
    assert asked == [trained] * 2


def test_nothing_is_no_proof():
    nothing = trace(tensors=[], metrics=[])
    assert not compare(nothing, nothing).equal


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_world_sizes(engine):
    assert parse_worlds("1,2, 4", engine) == [(1, 1), (2, 1), (4, 1)]


def test_processes_of_several_devices():
    assert parse_worlds("1,2x1,2x4", "jax") == [(1, 1), (2, 2), (8, 2)]
    with pytest.raises(ValueError, match=r"^world-sizes: 2x1: with engine torch every rank is a process"):
        parse_worlds("1,2x1", "torch")
    assert Trace(8, None, [], [], processes=2).label == "2x4"
    assert Trace(8, None, [], []).label == "8"


@pytest.mark.parametrize("text", ["", "0", "1,,2", "two", "-1", "1x", "x2", "0x2", "2x0", "1.5", "2x2x2"])
def test_what_is_no_list_of_world_sizes(text):
    with pytest.raises(
        ValueError, match=r"^world-sizes: '.*' is not a list of numbers of ranks such as 1,2,4"
    ) as caught:
        parse_worlds(text, "jax")
    assert "2x1" in str(caught.value)
    with pytest.raises(ValueError, match=r"such as 1,2,4$"):
        parse_worlds(text, "torch")


def test_the_table_shows_brackets_as_they_are(capsys):
    error = "engine: torch needs torch; pip install 'lockstep-rl[torch]'"
    print_table(Config(), [Comparison(Trace(2, error, [], []), False, error)], 5)
    assert "'lockstep-rl[torch]'" in " ".join(capsys.readouterr().out.split())


def test_packages_of_environments_and_kernel_variables_are_named_where_machines_differ():
    facts = {"kernel variables": "", "packages of environments": "box2d 2.3.10"}
    other = {"kernel variables": "MKL_CBWR=AVX2", "packages of environments": "box2d 2.3.8"}
    assert machines_apart(trace(facts=facts), trace(facts=other)) == [
        "kernel variables none there, MKL_CBWR=AVX2 here",
        "packages of environments box2d 2.3.10 there, box2d 2.3.8 here",
    ]
    assert machines_apart(trace(facts=facts), trace(facts={})) == []


def recorded(path, fingerprints, rows):
    path.mkdir(exist_ok=True)
    for name, kept in (("fingerprints.jsonl", fingerprints), ("metrics.jsonl", rows)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


def tear(file):
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize("names", [["fingerprints.jsonl"], ["metrics.jsonl"], ["fingerprints.jsonl", "metrics.jsonl"]])
def test_a_recorded_run_that_goes_on_or_was_killed_is_read_up_to_its_last_whole_row(tmp_path, names):
    run = recorded(tmp_path / "run", tensors(), metrics())
    for name in names:
        tear(run / name)
    found = recorded_trace(run, 2)
    assert (found.tensors, found.metrics) == (tensors()[:2], metrics()[:2])
    with pytest.raises(ValueError, match="has recorded 2 iterations from the first on; use --iterations 2"):
        recorded_trace(run, 3)


@pytest.mark.parametrize("name", ["fingerprints.jsonl", "metrics.jsonl"])
def test_a_damaged_row_of_a_recorded_run_is_named_with_its_file(tmp_path, name):
    run = recorded(tmp_path / "run", tensors(), metrics())
    tear(run / name)
    with (run / name).open("a") as file:
        file.write("\n{}\n")
    with pytest.raises(ValueError, match=rf"^against: {run / name}: line 3 is no metrics record"):
        recorded_trace(run, 2)


@pytest.mark.parametrize(
    ("fingerprints", "rows", "said"),
    [
        (tensors()[1:], metrics(), "has recorded 0 iterations from the first on, and without the first nothing"),
        (tensors(), [metrics()[0], metrics()[2]], "has recorded 1 iterations from the first on; use --iterations 1"),
    ],
)
def test_rows_that_a_recorded_run_lacks_are_not_compared_with_others(tmp_path, fingerprints, rows, said):
    with pytest.raises(ValueError, match=said):
        recorded_trace(recorded(tmp_path / "run", fingerprints, rows), 2)


def evaluated(rows, *iterations, episodes=8, mean=20.0):
    more = {"eval/episodes": episodes, "eval/return_mean": mean}
    return [row | (more if row["iteration"] in iterations else {}) for row in rows]


def of_a_record(rows):
    return trace(1, recorded=Path("runs/rec"), metrics=rows)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (metrics(), evaluated(metrics(), 1, 2, 3)),
        (evaluated(metrics(), 2), metrics()),
        (evaluated(metrics(), 2, 3), evaluated(metrics(), 1, 2)),
        (evaluated(metrics(), 1), evaluated(metrics(), 1, episodes=16, mean=30.0)),
    ],
    ids=["evaluated since it was resumed", "not evaluated here", "at other iterations", "over other episodes"],
)
def test_evaluations_that_only_one_of_a_record_and_a_run_has_are_no_difference_and_are_named(theirs, ours):
    result = compare(of_a_record(theirs), trace(metrics=ours))
    assert (result.equal, result.difference) == (True, "")
    assert result.not_compared == ("eval/episodes", "eval/return_mean")


def test_evaluations_that_a_record_and_a_run_have_are_compared():
    theirs = of_a_record(evaluated(metrics(), 2))
    result = compare(theirs, trace(metrics=evaluated(metrics(), 2)))
    assert (result.equal, result.not_compared) == (True, ())
    result = compare(theirs, trace(metrics=evaluated(metrics(), 2, mean=21.0)))
    assert result.difference == "iteration 2: no tensor; metric eval/return_mean: 20.0 against 21.0"


def test_metrics_of_a_callback_are_not_compared_with_a_run_that_has_none():
    theirs = [row | {"mine": 1.0, "train/mine": 2.0} for row in metrics()]
    result = compare(of_a_record(theirs), trace())
    assert (result.equal, result.not_compared) == (True, ("mine", "train/mine"))
    result = compare(of_a_record(theirs), trace(metrics=changed(metrics(), 3, **{"train/loss": 9.0})))
    assert result.difference.startswith("iteration 3: no tensor; metric train/loss: ")


def test_a_metric_that_both_recorded_and_one_lacks_in_an_iteration_is_a_difference():
    lacks = [metrics()[0], *without(metrics()[1:], "train/loss")]
    assert compare(of_a_record(metrics()), trace(metrics=lacks)).difference.startswith("iteration 2: no tensor")


def test_a_line_says_which_metrics_were_not_compared(capsys):
    theirs = of_a_record([row | {f"mine/{n}": 1.0 for n in range(7)} for row in metrics()])
    print_table(Config(), [compare(theirs, theirs), compare(theirs, trace())], 3)
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said[0] == (
        "not compared, because runs/rec and the runs here don't both have them by the same settings: "
        "mine/0, mine/1, mine/2, mine/3, mine/4 and 2 more"
    )
    assert said[1] == "verified: every tensor and every metric that was compared has the same bytes at every iteration"


@pytest.mark.parametrize("eval_then", [{"max_steps": 5}, {"episodes": 32}])
def test_evaluations_by_other_settings_than_a_recorded_run_has_now_are_not_compared(tmp_path, eval_then):
    run = recorded(tmp_path / "run", tensors(), evaluated(metrics(), 2))
    config = config_of(eval={"episodes": 16})
    (run / "config.json").write_text(json.dumps(config))
    assert "eval/episodes" in recorded_trace(run, 2).metrics[1]
    checkpoint = run / "checkpoints" / "step_16"
    checkpoint.mkdir(parents=True)
    then = config | {"eval": config["eval"] | eval_then}
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": {}, "step": 16, "config": then}))
    assert recorded_trace(run, 2).metrics == metrics()[:2]


def test_a_recorded_run_has_the_machine_and_versions_with_which_it_began(tmp_path):
    run = recorded(tmp_path / "run", tensors(), metrics())
    last = {"world_size": 2, "torch": "2.13.0", "platform version": "CUDA 13"}
    (run / "summary.json").write_text(json.dumps(last | {"first_machine": {"torch": "2.12.0"}}))
    here = trace(facts={"torch": "2.13.0", "platform version": "CUDA 13"})
    assert machines_apart(recorded_trace(run, 2), here) == ["torch 2.12.0 there, 2.13.0 here"]
    (run / "summary.json").write_text(json.dumps(last))  # of a version that didn't record it
    assert machines_apart(recorded_trace(run, 2), here) == []


def test_environments_of_a_recorded_run_that_began_anew_are_said_if_something_differs(capsys):
    record = replace(of_a_record(metrics()), facts={"restarted_environments": [3, 5]})
    print_table(Config(), [compare(record, record), compare(record, trace())], 3)
    assert "began new episodes" not in capsys.readouterr().out
    other = trace(metrics=changed(metrics(), 3, **{"train/loss": 9.0}))
    print_table(Config(), [compare(record, record), compare(record, other)], 3)
    said = "runs/rec was resumed where 2 of its environments began new episodes: from there on it is another run"
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("text", ["[]", "{", '{"world_size": null}', '{"world_size": "two"}', "\0"])
def test_a_damaged_summary_of_a_recorded_run_is_one_line(tmp_path, capsys, text):
    run = recorded(tmp_path / "run", tensors(), metrics())
    (run / "summary.json").write_text(text)
    found = recorded_trace(run, 2)
    assert (found.world_size, found.label) == (0, "run (?)")
    said = capsys.readouterr().err.splitlines()
    if text.startswith('{"'):
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith(f"lockstep: warning: {run / 'summary.json'} is damaged")
    assert said[0].endswith("; its number of ranks and its machine stay unknown")


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, 1.0), (1, True), (0, False)])
@pytest.mark.parametrize("was_recorded", [False, True])
def test_metrics_of_another_sign_or_type_are_different(one, other, was_recorded):
    theirs, ours = (changed(metrics(), 2, **{"train/loss": value}) for value in (one, other))
    reference = trace(1, metrics=theirs, recorded=Path("runs/rec") if was_recorded else None)
    result = compare(reference, trace(metrics=ours))
    assert result.difference == f"iteration 2: no tensor; metric train/loss: {one} against {other}"
    assert compare(reference, trace(metrics=theirs)).equal

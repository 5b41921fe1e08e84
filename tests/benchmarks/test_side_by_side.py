import dataclasses

import pytest

from benchmarks import side_by_side
from benchmarks.cases import CASES, J3, REJAX_CALLS, T1, T2, T3, our_config, programs_of, scaling_programs
from benchmarks.peer_environment import PEERS
from lockstep.config.checks import resolve
from lockstep.config.keys import validate
from lockstep.config.run import Config


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_configs_are_valid_and_of_the_case(case):
    for program in programs_of(case):
        if program.config is None:
            continue
        config: Config = resolve(validate(Config, program.config, program.label))
        assert config.steps_per_iteration == program.steps_per_iteration == case.steps_per_iteration
        assert config.num_iterations == case.iterations
        assert (config.threads, config.reduction) == (1, program.reduction)
        assert config.normalize.observations == config.normalize.returns == case.normalize


def test_weak_scaling_doubles_the_work_and_strong_does_not():
    by_label = {(p.scaling, p.env, p.reduction): p for p in scaling_programs(T2)}
    found = {key[0]: p.steps_per_iteration * p.copies for key, p in by_label.items()}
    assert sorted(found.values()) == [T2.steps_per_iteration, *[2 * T2.steps_per_iteration] * 2]


def test_peers_and_we_get_the_same_case():
    sb3 = next(p for p in programs_of(T3) if p.package == "stable-baselines3")
    words = dict(zip(sb3.command[2::2], sb3.command[3::2], strict=False))
    assert (words["--num-envs"], words["--num-steps"], words["--num-epochs"]) == ("8", "256", "10")
    assert "--normalize" in sb3.command
    assert our_config(T3, T3.env, "exact")["ppo"]["num_minibatches"] == 32


def test_repetitions_are_interleaved_and_failures_kept(scripted, monkeypatch, capsys):
    good = dataclasses.replace(scripted("for _ in range(8):\n    time.sleep(0.001)\n    say()\n"), label="good")
    gone = dataclasses.replace(good, label="gone", command=("/nonexistent/python", "{lines}"))
    rows = side_by_side.run_interleaved([good, gone], 2, 60)
    assert [(row.label, len(row.rates), len(row.failures)) for row in rows] == [("good", 2, 0), ("gone", 0, 2)]
    order = [line.split(": ")[0].split()[-2] for line in capsys.readouterr().out.splitlines()]
    assert order == ["good", "gone", "gone", "good"]


def test_bad_arguments_are_refused(capsys):
    for words, message in ((["--cases", "T1,T9"], "'T9' is no case"), (["--repeats", "0"], "0 is below 1")):
        with pytest.raises(SystemExit):
            side_by_side.read_arguments(words)
        assert message in capsys.readouterr().err


def test_a_quick_look_writes_elsewhere_and_runs_less():
    quick, full = side_by_side.read_arguments(["--quick"]), side_by_side.read_arguments([])
    assert (quick.repeats, full.repeats) == (1, 3)
    assert quick.out != full.out
    assert quick.cases[0].iterations < T1.iterations == full.cases[0].iterations


def test_a_line_of_rejax_is_a_call_of_several_iterations():
    rejax = next(p for p in programs_of(J3) if p.package == "rejax")
    assert rejax.steps_per_iteration == J3.steps_per_iteration * J3.iterations // REJAX_CALLS
    assert f"CALLS = {REJAX_CALLS}\n" in (PEERS / "rejax_ppo.py").read_text()

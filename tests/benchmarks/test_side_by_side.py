import dataclasses
import json

import pytest

from benchmarks import side_by_side
from benchmarks.cases import A1, A1_BOTH, ARRAY_CARTPOLE, BREAKOUT, CASES, J1, J3, R1, T1, T2, T2_BOTH, T3, T3_BOTH
from benchmarks.peer_environment import PEERS, REQUIREMENTS
from benchmarks.programs import CALLS, CLEANRL, SEQUENCE, all_programs, our_config, programs_of, scaling_programs
from benchmarks.report import Results
from benchmarks.steady_rate import MeasurementError
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


def test_scaling_comes_right_after_the_single_rank_in_every_repetition():
    programs = all_programs([T1, T2, T3])
    after = next(i for i, program in enumerate(programs) if program.scaling is not None)
    scaling = scaling_programs(T2)
    assert programs[after : after + len(scaling)] == scaling
    single = programs[after - 4 : after]
    assert {(p.case, p.env, p.reduction) for p in scaling} <= {(p.case, p.env, p.reduction) for p in single}
    assert programs[after + len(scaling)].case == T3.name
    assert not any(program.scaling for program in all_programs([T1, T3]))


def test_peers_and_we_get_the_same_case():
    sb3 = next(p for p in programs_of(T3) if p.package == "stable-baselines3")
    words = dict(zip(sb3.command[2::2], sb3.command[3::2], strict=False))
    assert (words["--num-envs"], words["--num-steps"], words["--num-epochs"]) == ("8", "256", "10")
    assert "--normalize" in sb3.command
    assert our_config(T3, T3.env, "exact")["ppo"]["num_minibatches"] == 32


def test_repetitions_are_interleaved_and_failures_kept(scripted, capsys):
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


def test_a_line_of_what_jax_compiled_is_a_call_of_several_iterations():
    peers = [p for p in programs_of(J3) if not p.is_ours]
    assert {p.steps_per_iteration for p in peers} == {J3.steps_per_iteration * J3.iterations // CALLS}
    assert f"CALLS = {CALLS}\n" in (PEERS / "settings.py").read_text()


def test_figures_are_kept_though_no_picture_can_be_drawn(tmp_path, monkeypatch, capsys, row):
    def missing(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(side_by_side.bars, "draw", missing)
    side_by_side.write(Results({"date": "today"}, [T1], rows=[row(10.0)]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers.json", "peers.md"]
    assert "no peers.png: No module named 'matplotlib'" in capsys.readouterr().out


def test_a_run_fails_by_ours_alone_and_not_for_want_of_envpool(row):
    peer, pools = row(failures=["killed"]), row(ours=True, env="CartPole-v1 of EnvPool", failures=["no envpool"])
    assert side_by_side.broken([peer, pools, row(1.0, ours=True)]) == []
    mine = row(1.0, ours=True, failures=["killed"])
    assert side_by_side.broken([peer, pools, mine]) == [mine]


def test_an_environment_alone_is_measured_once_a_round_whatever_cases_have_it(monkeypatch):
    asked = []

    def measured(module, words, timeout):
        asked.append((json.loads(words[0])["id"], int(words[1])))
        if asked[-1] == (T3.env, 8) and len(asked) > 6:
            raise MeasurementError("no mujoco")
        return json.dumps({"lockstep": float(len(asked))})

    monkeypatch.setattr(side_by_side, "run_module", measured)
    results = Results({}, [T1, T2, T3, R1, T2_BOTH, J1])
    side_by_side.add_ceilings(results, 2, 60)
    each = [(ARRAY_CARTPOLE, 8), ("CartPole-v1", 8), (ARRAY_CARTPOLE, 64), ("CartPole-v1", 64), (T3.env, 8)]
    assert asked == [*each, *each]
    assert results.ceilings[ARRAY_CARTPOLE, 8] == {"lockstep": [1.0, 6.0]}
    assert results.ceilings[T3.env, 8] == "no mujoco"


def test_single_ranks_are_profiled_as_they_are_each_once(monkeypatch):
    configs = []
    monkeypatch.setattr(side_by_side, "split", lambda config, timeout: configs.append(config) or {})
    results = Results({}, [R1, T2_BOTH, J1])
    side_by_side.add_splits(results, 60)
    said = ["exact", "exact, 2 shards, sequences of 128"]
    assert list(results.splits) == [("R1", "CartPole-v1", what) for what in said]
    assert [config["network"]["sequence_length"] for config in configs] == [32, 128]
    assert [config.get("num_shards") for config in configs] == [None, 2]
    assert {config["total_steps"] for config in configs} == {R1.steps_per_iteration * side_by_side.PROFILED}


def labels(case) -> list[str]:
    return [program.label for program in programs_of(case)]


def test_images_and_recurrent_policies_have_peers_with_the_same_networks():
    config = our_config(A1, BREAKOUT, "exact")
    assert (config["env"]["frame_stack"], config["network"]["image"]) == (4, {"kind": "nature"})
    pooled = [f"{name}, EnvPool" for name in ("Stable-Baselines3", CLEANRL)]
    assert labels(A1)[:5] == ["Stable-Baselines3", CLEANRL, *pooled, "SBX (JAX)"]
    assert all("--images" in program.command for program in programs_of(A1)[:5])
    config = our_config(R1, R1.env, "exact")
    assert (config["network"]["recurrent"], config["network"]["recurrent_size"]) == ("lstm", 64)
    recurrent = [program for program in programs_of(R1) if not program.is_ours]
    assert [program.package for program in recurrent] == ["sb3-contrib", "skrl"]
    assert [program.command[program.command.index("--lstm") + 1] for program in recurrent] == ["64", "64"]
    assert f"SEQUENCE = {SEQUENCE}\n" in (PEERS / "skrl_recurrent.py").read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_get_as_many_cores_as_their_case(case):
    for program in programs_of(case):
        words = program.command
        if not program.is_ours:
            assert words[words.index("--threads") + 1] == str(program.threads) == str(case.cores)
        elif case.engine == "torch" and case.cores == 1:
            assert words[words.index("--nproc") + 1] == "1"
            assert (program.config or {})["env"].get("workers", 0) == 0


def ways_of(case) -> set[tuple[str | None, str]]:
    """Packages of peers, with who steps their environments."""
    return {(p.package, p.command[p.command.index("--vector") + 1]) for p in programs_of(case) if not p.is_ours}


def test_on_one_core_peers_have_every_way_that_they_have_on_both():
    for one, both in ((T1, T2_BOTH), (T2, T2_BOTH), (T3, T3_BOTH), (A1, A1_BOTH)):
        wanted = {way for way in ways_of(both) if way[1] != "processes"} - (
            {("torch", "envpool")} if one == T2 else set()
        )
        assert wanted <= ways_of(one)
        assert ("sbx-rl", "envpool") in ways_of(one) or one == A1
    assert all("--normalize" in p.command for p in programs_of(T3) if p.package == "sbx-rl")


def test_on_both_cores_everybody_has_every_way():
    said = " ".join(labels(T2_BOTH))
    for way in ("EnvPool", "vector entry point", "2 ranks", "2 workers"):
        assert way in said
    assert any("SubprocVecEnv" in label for label in labels(T3_BOTH))
    assert any("SubprocVecEnv" in label for label in labels(A1_BOTH))
    assert any(program.devices == 2 for program in programs_of(A1_BOTH))
    for one, both in ((T2, T2_BOTH), (T3, T3_BOTH), (A1, A1_BOTH)):
        peers = [program.label.partition(" (JAX)")[0] for program in programs_of(one) if not program.is_ours]
        slow = {"SBX"} if one == A1 else set()  # its row with one thread counts on both cores, too
        assert all(any(label.startswith(name) for label in labels(both)) for name in set(peers) - slow)
    for case in (T2_BOTH, T3_BOTH):
        assert "SBX (JAX), EnvPool, both cores" in labels(case)


def test_rows_of_a_case_are_told_apart():
    for case in CASES:
        named = [(program.label, program.env) for program in programs_of(case)]
        assert len(set(named)) == len(named)


def test_peers_are_pinned():
    for name in REQUIREMENTS:
        lines = (PEERS / name).read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))
    assert "sb3_contrib==" in (PEERS / REQUIREMENTS[0]).read_text()

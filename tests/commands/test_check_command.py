"""``lockstep check``: what it says of environments that are fit, and of one mistake each."""

import importlib
import itertools
import re
import threading

import pytest
from command_line import lockstep

from lockstep.cli import main


@pytest.fixture
def check(capfd):
    """Runs ``lockstep check``; its exit status, its lines, and what it wrote to standard error."""

    def run(*words):
        code = main(["check", *words])
        out, err = capfd.readouterr()
        return code, out.splitlines(), err

    return run


def problems(lines):
    return [line.removeprefix("PROBLEM  ") for line in lines if line.startswith("PROBLEM")]


def said(lines, level, pattern):
    return [line for line in lines if line.startswith(level) and re.search(pattern, line)]


def test_a_fit_environment(check):
    code, lines, err = check("--seed", "3", "unfit:Fit-v0", "--steps", "200")
    assert (code, err, problems(lines)) == (0, "", [])
    assert said(lines, "ok", "sees vector 4; does one of 2; at most 500 steps")
    assert said(lines, "note", "no preset; .* defaults for discrete actions")
    assert said(lines, "ok", r"resumes exactly .* by replaying its \d+ actions$")
    assert said(lines, "ok", "worker process .* the same bytes")
    assert said(lines, "ok", r"speed: [\d,]+ steps a second")
    assert lines[-1] == "unfit:Fit-v0: fit for training"
    assert not any("\x1b" in line for line in lines)


def test_environments_in_arrays_and_inside_the_program_too(tmp_path):
    for env_id in ("lockstep/Snake-v0", "gymnax/CartPole-v1"):
        ended = lockstep("check", env_id, "--steps", "50", cwd=tmp_path)  # JAX begins anew in it
        assert ended.code == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert said(lines, "ok", "the same seeds and actions give the same bytes")
        assert said(lines, "ok", "resumes exactly")


def test_actions_of_several_numbers_are_the_same_ones_in_a_worker(check):
    """More steps are taken in the process than in the worker, where they are the first of as many."""
    code, lines, _ = check("several_numbers:Dials-v0", "--steps", "130")
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "ok", "worker process .* the same bytes")


def test_one_that_keeps_its_own_state(check):
    code, lines, _ = check("unfit:Hooked-v0", "--steps", "50")
    assert code == 0
    assert said(lines, "ok", "resumes exactly in the middle of an episode, by its own state")


def test_one_that_remembers_earlier_episodes(check):
    """As curricula do; the replay of a live episode shows it only where that is long enough already."""
    code, lines, _ = check("unfit:Harder-v0", "--steps", "200")
    assert code == 1
    (problem,) = problems(lines)
    assert re.search(r"episode \d+ gave something else in its step 6 where those before it weren't played", problem)
    assert "offer get_env_state() and set_env_state() that hold it" in problem
    code, lines, _ = check("unfit:Fit-v0", "--steps", "200")
    assert said(lines, "ok", "an episode depends on none before it")
    code, lines, _ = check("unfit:HarderButKept-v0", "--steps", "200")
    assert (code, problems(lines)) == (0, [])
    assert not said(lines, "ok", "an episode depends on none before it")


def test_what_the_second_of_two_remembers_is_not_laid_on_the_first(check):
    """By this seed no episode of the first environment ends, and one of the second does."""
    code, lines, _ = check("unfit:HarderForSome", "--steps", "40", "--seed", "10")
    assert code == 1
    assert said(lines, "ok", "; 1 episode ended")
    (problem,) = problems(lines)
    assert "episode 2 gave something else in its step 6 where those before it weren't played" in problem


@pytest.mark.parametrize("steps", [100, 200])
def test_an_episode_that_has_just_begun_is_not_what_is_resumed(check, steps):
    """Where a time limit divides the steps, an episode ended with the last of them."""
    words = ("--steps", str(steps), "--env.max-episode-steps", "100")
    code, lines, _ = check("unfit:HarderWithoutEnd", *words)
    assert code == 1
    (problem,) = problems(lines)
    assert "gave something else in its step 6 where those before it weren't played" in problem
    assert not said(lines, "ok", "resumes exactly")
    code, lines, _ = check("Pendulum-v1", *words)
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "ok", "resumes exactly in the middle of an episode, by replaying its 50 actions$")
    assert said(lines, "ok", "an episode depends on none before it")


def test_episodes_of_one_step_have_no_middle(check):
    code, lines, _ = check("unfit:Fit-v0", "--steps", "20", "--env.max-episode-steps", "1")
    assert code == 0
    assert said(lines, "ok", "resumes exactly where an episode begins, by replaying its reset$")


@pytest.mark.parametrize("name", ["HookedAndDrawing", "HookedAndHarder"])
def test_a_state_that_is_not_all_of_it(check, name):
    code, lines, _ = check(f"unfit:{name}-v0", "--steps", "200")
    assert code == 1
    (problem,) = problems(lines)
    assert re.search(r"what get_env_state\(\) gave and set_env_state\(\) took went on otherwise in step \d+", problem)
    assert problem.endswith("a wrapper class of your own that has neither has its actions replayed")
    assert not said(lines, "ok", "resumes exactly")


def test_a_wrapper_without_hooks_leaves_those_inside_of_it_aside(check):
    code, lines, _ = check("unfit:unhooked", "--steps", "100", "--env.max-episode-steps", "60")
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "ok", r"resumes exactly in the middle of an episode, by replaying its \d+ actions$")


def test_one_that_depends_on_those_beside_it(check):
    code, lines, _ = check("unfit:Crowded", "--steps", "100")
    assert code == 1
    (problem,) = problems(lines)
    assert re.search("replayed by itself gave something else: .* on the environments beside it", problem)


def test_a_preset_is_named(check):
    _, lines, _ = check("CartPole", "--steps", "20")
    assert said(lines, "ok", "lockstep train CartPole-v1 has a preset")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("OldStep", r"step\(\) must return observation, .* returned 4 values.*unfit\.py:\d+\)"),
        ("OldReset", r"reset\(\) must return observation, info, .*unfit\.py:\d+\)"),
        ("Endless", r"environment 0 \(unfit:Endless-v0\) gave reward -inf in step 60 of random actions$"),
        ("Unseen", r"gave observation nan in 'arm/pole' \(component 2\) in step \d+ of random actions$"),
        ("Unseeded", r"Unseeded\.reset\(\) takes no seed; write def reset\(self, \*, seed=None, options=None\)"),
        ("Unpaid", r"the reward returned by step\(\) must be a number, and is None"),
        ("Late", r"environment 0 \(unfit:Late-v0\) raised in step: OSError: out of order"),
        ("Picky", "raised in step: AssertionError: forbidden"),
        ("Clocked", r"the same seed and actions gave something else in step 1:"),
        ("Kept", "the same seed and actions gave something else in step 1:"),
    ],
)
def test_a_problem_is_named(check, name, problem):
    code, lines, _ = check(f"unfit:{name}-v0", "--steps", "100")
    assert code == 1
    assert any(re.search(problem, line) for line in problems(lines)), lines
    assert re.search(r"\d problems?$", lines[-1])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("LastIsNaN", r"observation nan \(component 0\)"),
        ("LastIsOutside", r"observation 4 \(component 0\), none of the 4 choices from 0 to 3,"),
    ],
)
def test_the_last_observation_of_an_episode_is_looked_at(check, name, what):
    """After the step that truncates, an environment's row is the next episode's first one already."""
    code, lines, _ = check(f"unfit_later:{name}", "--steps", "30")
    assert code == 1
    (problem,) = problems(lines)
    assert re.search(f"gave {what} in step 20 of random actions$", problem)


@pytest.mark.parametrize(("workers", "level"), [(0, "note"), (2, "PROBLEM")])
def test_what_only_worker_processes_forbid_is_a_problem_where_they_are_wanted(check, workers, level):
    code, lines, _ = check("unfit_later:HasAChild", "--steps", "20", "--env.workers", str(workers))
    assert code == (1 if workers else 0)
    assert said(lines, level, "daemonic processes are not allowed to have children")
    assert bool(said(lines, "note", "can't be stepped in worker processes, so leave env.workers at 0: ")) == (
        not workers
    )


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_environment_that_exits_is_a_problem(check, where):
    """Its exit isn't that of the command, whose status 0 would call it fit."""
    code, lines, _ = check(f"unfit_later:ExitsIn{where.title()}", "--steps", "30")
    assert code == 1
    (problem,) = problems(lines)
    assert f"environment 0 (unfit_later:ExitsIn{where.title()}) raised in {where}: SystemExit: 0" in problem
    assert bool(said(lines, "note", "Gymnasium's checker: SystemExit: 0")) == (where == "reset")


def test_an_environment_that_hangs_before_the_trial_is_named_in_time(check, monkeypatch):
    module, told = importlib.import_module("unfit_later"), []
    monkeypatch.setattr(module, "RELEASED", threading.Event())
    monkeypatch.setattr("lockstep.envs.examine.fail", lambda line: told.append(line) or module.RELEASED.set())
    check("unfit_later:WaitsInStep", "--steps", "30", "--env.timeout", "1")
    assert told[0] == "unfit_later:WaitsInStep didn't answer within 1 s (env.timeout)"


@pytest.mark.parametrize(("numbers", "code"), [(itertools.repeat(5), 2), (itertools.count(), 1)])
def test_an_environment_that_exits_where_it_is_made_can_not_be_made(check, monkeypatch, numbers, code):
    monkeypatch.setattr(importlib.import_module("unfit_later"), "MADE", numbers)
    name = "unfit_later:ExitsWhereMade"
    ended, lines, err = check(name, "--steps", "30", "--env.kwargs", '{"made_before": 5}')
    assert ended == code
    assert f"env.id: {name} can't be made: SystemExit: 3" in (err if code == 2 else problems(lines)[0])


def test_a_last_observation_that_no_seed_decides_can_not_be_repeated(check):
    code, lines, _ = check("unfit_later:LastIsRandom", "--steps", "50")
    assert code == 1
    assert problems(lines)[0].startswith("the same seed and actions gave something else in step 20:")
    code, lines, _ = check("unfit_later:Fit", "--steps", "50")
    assert (code, problems(lines)) == (0, [])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "NoInfo",
            r": step\(\) must return .*, info, and its info must be a dict and is None \(.*unfit_later\.py:\d+\)",
        ),
        (
            "Swapped",
            r": step\(\) must return .*, info, and its info must be a dict and is True \(.*unfit_later\.py:\d+\)",
        ),
        ("PaidInText", r" raised in step: TypeError: the reward returned by step\(\) must be a number, and is '1\.5'"),
        ("SeenInText", r" raised in reset: ValueError: observation of dtype <U\d+, its space says real numbers"),
    ],
)
def test_what_a_step_returns_of_another_type_is_a_problem(check, name, problem):
    code, lines, _ = check(f"unfit_later:{name}", "--steps", "30")
    assert code == 1
    assert any(re.search(rf"environment 0 \(unfit_later:{name}\){problem}", line) for line in problems(lines)), lines


@pytest.mark.parametrize(
    ("name", "moved", "workers"),
    [("DrawsGlobally", r"numpy\.random", 0), ("SeedsGlobally", "random", 2), ("SeedsTorch", "torch", 0)],
)
def test_a_generator_that_all_environments_share_is_a_problem(check, name, moved, workers):
    code, lines, _ = check(f"heedless:{name}-v0", "--steps", "60", "--env.workers", str(workers))
    assert code == 1
    pattern = f"^it draws from or seeds the global generator of {moved}, .*; draw every .* from self.np_random"
    assert any(re.search(pattern, line) for line in problems(lines)), lines


def test_one_whose_state_can_not_be_had(check, monkeypatch):
    monkeypatch.setenv("STATE_FAILS", "get")
    code, lines, _ = check("heedless:Saving-v0", "--steps", "20")
    assert code == 1
    assert any("raised in get_env_state: RuntimeError: the disk is gone" in line for line in problems(lines))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Listed", "it must return a dict of arrays by name, or None, and returned list"),
        ("Numbered", "the arrays' names must be texts, and one is 0"),
        (
            "Imaginary",
            "'wave' is of dtype complex128, which no checkpoint holds; give bools, integers, or floats of 64",
        ),
        ("Long", "'t' is of dtype float128, which no checkpoint holds; give bools, integers, or floats of 64 bits"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_a_problem(check, name, why):
    code, lines, _ = check(f"unfit_later:{name}", "--steps", "30")
    assert code == 1
    assert f"environment 0 (unfit_later:{name}) raised in get_env_state: TypeError: {why}" in problems(lines)[0]


def test_what_a_run_can_live_with_is_a_note(check):
    code, lines, _ = check("unfit:Wide-v0", "--steps", "50")
    assert code == 0
    assert said(lines, "note", "the observation is of dtype float64, its space says float32")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("Outside-v0", "The first element returned by `env.reset.*` is not within the observation space"),
        ("Unmeasured-v0", "Deterministic step info are not equivalent"),
        ("SeededByItself-v0", r"does not call `super\(\).reset\(seed=seed\)`"),
        ("OfNumpy-v0", None),
        ("narrowed", None),
    ],
)
def test_what_only_the_checker_of_gymnasium_dislikes_is_none_either(check, name, note):
    code, lines, _ = check(f"unfit:{name}", "--steps", "50")
    assert (code, problems(lines)) == (0, [])
    assert lines[-1] == f"unfit:{name}: fit for training"
    checkers = said(lines, "note", "Gymnasium's checker: (?!A Box observation space)")
    assert bool(checkers) == (note is not None), checkers
    assert note is None or said(lines, "note", f"Gymnasium's checker: .*{note}")
    assert said(lines, "note" if name == "Outside-v0" else "ok", "observation")


def test_what_cannot_be_made_is_bad_input(check):
    code, lines, err = check("NoSuch-v0")
    assert (code, lines) == (2, [])
    assert "no environment 'NoSuch-v0' is registered" in err
    code, lines, err = check("unfit:Spaceless-v0")
    assert (code, lines) == (2, [])
    assert err.endswith(
        "env.id: unfit:Spaceless-v0 has no observation_space; set self.observation_space where it is made, to a space\n"
    )
    _, _, err = check("unfit:Picki")
    assert err.endswith("env.id: unfit has no Picki; did you mean unfit:Picky?\n")
    code, _, err = check("unfit:Listed-v0")
    assert code == 2
    assert "observation 'names': space Sequence" in err
    assert "FilterObservation" in err


def test_text_that_a_policy_would_not_see_is_named(check):
    _, lines, _ = check("unfit:Worded-v0", "--steps", "20")
    assert said(lines, "ok", r"sees vector 4 \(pole\), not the text 'name'; does one of 2")


@pytest.mark.parametrize("name", ["unfit:Named-v0", "MiniGrid-Empty-5x5-v0"])
def test_texts_lie_in_the_space_where_frames_are_stacked(check, name):
    """Gymnasium's checker is shown the environment as it is, for in a stack another space stands for its texts."""
    if name.startswith("MiniGrid"):
        pytest.importorskip("minigrid")
    code, lines, _ = check(name, "--steps", "20", "--env.frame-stack", "2")
    assert (code, problems(lines)) == (0, [])
    assert not said(lines, "note", "within the observation space")
    assert said(lines, "ok", "20 observations lie in the space")


def test_options_of_the_environment_count(check):
    _, lines, _ = check("unfit:Fit-v0", "--steps", "20", "--env.frame-stack", "3")
    assert said(lines, "ok", "sees vector 12|sees vector 3×4")
    assert check("CartPole-v1", "--steps", "0")[0] == 2
    assert check("CartPole-v1", "--nproc", "2")[0] == 2


def test_an_environment_of_masks_is_asked_for_them(check):
    _, lines, _ = check("unfit:Picky-v0", "--steps", "20")
    assert said(lines, "note", r"action_masks\(\) says which actions are allowed: --env\.action-mask method")
    _, lines, _ = check("Taxi-v4", "--steps", "20")
    assert said(lines, "note", r"info\['action_mask'\] says which actions are allowed: --env\.action-mask info")
    code, lines, _ = check("unfit:Picky-v0", "--steps", "20", "--env.action-mask", "method")
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "note", "takes forbidden actions too, and met: forbidden")
    assert not said(lines, "note", "says which actions are allowed")


def test_statistics_of_a_wrapper_are_named(check):
    _, lines, _ = check("unfit:normalized", "--steps", "20")
    assert said(lines, "note", "wrapped in NormalizeObservation, .* give --normalize.observations")
    assert not said(check("unfit:Fit-v0", "--steps", "20")[1], "note", "wrapped in")


# --- simulators -------------------------------------------------------------------------------------------------------

ON_TENSORS = ("--env.backend", "tensor", "--steps", "30")


def test_a_simulator_that_keeps_its_own_state(check):
    pytest.importorskip("torch")
    code, lines, _ = check("simulators:maniskill", *ON_TENSORS)
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "ok", "resumes exactly .*, by its own state$")
    code, lines, _ = check("simulators:forgetful", *ON_TENSORS)
    assert code == 1
    (problem,) = problems(lines)
    assert "went on otherwise in step" in problem
    assert "replayed" not in problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("broken", r"raised in set_env_state: KeyError: 'velocity' \(simulators\.py:\d+\)$"),
        (
            "of_arrays",
            r"in get_env_state: TypeError: 'place' must be a tensor \[2, …\], and is ndarray of shape \(2, 2\)",
        ),
        (
            "of_gymnasium",
            r"in step: TypeError: info\['final_obs'\] must be .* a tensor \[2, …\] .*; stack it, or leave it out: ",
        ),
    ],
)
def test_what_a_simulator_gives_or_raises_is_a_problem(check, name, problem):
    pytest.importorskip("torch")
    code, lines, err = check(f"simulators:{name}", *ON_TENSORS)
    assert (code, err) == (1, "")
    (line,) = problems(lines)
    assert re.search(problem, line)


def test_a_simulator_with_one_of_the_two_hooks_has_none(check):
    pytest.importorskip("torch")
    code, lines, _ = check("simulators:half_hooked", *ON_TENSORS)
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "note", r"resumes with a new episode, as .* simulators without get_env_state\(\) and set")


def test_a_simulator_of_which_a_process_holds_one_is_fit(check):
    pytest.importorskip("torch")
    code, lines, _ = check("simulators:alone", *ON_TENSORS)
    assert (code, problems(lines)) == (0, [])
    assert said(lines, "ok", "resumes exactly .*, by its own state$")


@pytest.fixture
def played(monkeypatch):
    """The CPU as ``--device xpu``."""
    torch = pytest.importorskip("torch")
    from lockstep.torch_engine.setup import accelerator

    monkeypatch.setitem(accelerator.TYPES, "xpu", "cpu")
    monkeypatch.setattr(accelerator, "NEEDED", ())
    monkeypatch.setattr(torch.cpu, "current_device", lambda: 0)
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # put back afterwards
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(("words", "repeats"), [((), (True, False)), (("--reduction", "fast"), (True, True))])
def test_a_simulators_kernels_repeat_their_bits_as_in_a_run(check, words, repeats):
    (simulators := importlib.import_module("simulators")).KERNELS.clear()
    code, lines, _ = check("simulators:noting", *ON_TENSORS, "--device", "xpu", *words)
    assert (code, problems(lines)) == (0, [])
    _of_spaces, *others = simulators.KERNELS  # that one is on the CPU, before the device is looked for
    assert set(others) == {repeats}
    simulators.KERNELS.clear()


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_a_simulator_is_tried_on_the_device_of_the_run(check, device):
    code, lines, err = check("simulators:elsewhere", *ON_TENSORS, "--device", device)
    assert (code, err) == (1, "")
    where = {"cpu": "cpu", "xpu": "cpu:0"}[device]
    assert problems(lines) == [
        f"env.id: simulators:elsewhere can't be made, 2 on {where}: RuntimeError: no room on {where}"
    ]


def test_a_device_that_is_not_here_is_bad_input(check):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, lines, err = check("simulators:maniskill", *ON_TENSORS, "--device", "cuda")
    assert (code, lines) == (2, [])
    assert re.search("device: cuda, but .* use --device cpu", err)
    assert check("unfit:Fit-v0", "--steps", "20", "--device", "cuda")[0] == 0

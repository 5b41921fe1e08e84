"""The command that a group keeps with each seed trains that seed by itself."""

import contextlib
from dataclasses import replace

import pytest

from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.launch.rank import Assignment
from lockstep.launch.request import request_of
from lockstep.launch.seeds import group as groups
from lockstep.launch.seeds.seed_run import SeedRun
from lockstep.launch.start import commands_of, group_of, prepare, start_run
from lockstep.runs.directory import RunDirectory, open_seed
from lockstep.runs.progress import Progress
from lockstep.runs.session_facts import SessionFacts


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Gives the commands that the seeds of a group are started with, which begins by words or goes on by them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for name in ("adopt_orphans", "kill_children"):  # this process has others
        monkeypatch.setattr(groups, name, lambda: None)
    monkeypatch.setattr(groups, "make_progress", lambda *_: Progress())
    found = {}

    def start(self, file, command):
        found[self.path.name] = command

    def has_ended(self):
        self.code = 0
        return True

    monkeypatch.setattr(SeedRun, "start", start)
    monkeypatch.setattr(SeedRun, "has_ended", has_ended)

    def train(*words):
        found.clear()
        assert start_run(request_of(words), command=["train", *words]) == 0
        return dict(found)

    return train


@pytest.mark.parametrize(
    "of_the_group",
    [
        ("--seeds", "3-4", "--name", "many"),
        ("seeds=3-4", "name=many"),
        ("--seeds=3-4", "--run-name", "many"),
        ("--seeds", "3-4", "exp_name=many"),
        ("--seed", "3", "--num_seeds=2", "--seeds-at-once", "1"),
        ("+seed=3", "++num_seeds=2", "seeds_at_once=2"),
        ("--seeds", "3-4", "--name", "many", "--resume", "auto"),
        ("seeds=3-4", "name=many", "resume=auto"),
    ],
)
def test_of_a_new_group_it_begins_a_run_of_that_seed(kept, of_the_group):
    given = ("--n-steps", "16", "--quiet", "--network.hidden-sizes", "32", "16", "lr=1e-3")
    found = kept("CartPole-v1", *of_the_group, *given)
    assert list(found) == ["seed_3", "seed_4"]
    for number, (name, words) in enumerate(found.items()):
        assert words == ["train", "CartPole-v1", *given, "--seed", str(3 + number)]
        request = request_of(words[1:])
        assert (f"seed_{request.config.seed}", request.config.num_steps) == (name, 16)
        assert not request.options.is_group
        assert (request.options.name, request.options.resume) == (None, None)


def test_of_a_config_file_it_leaves_out_what_the_file_says_of_the_group(kept, tmp_path):
    for options, given in (
        ("seeds: 3-4\nname: many\n", ()),
        ("seed: 3\nnum_seeds: 2\nname: other\n", ()),
        ("seeds: 3-4\nseeds_at_once: 2\n", ()),
        ("seeds: 3-4\nname: again\nresume: auto\n", ()),
        ("seeds: 7-9\nname: mine\nresume: auto\n", ("--seeds", "3-4", "--name", "yours", "--resume", "auto")),
    ):
        (tmp_path / "group.yaml").write_text(f"env: CartPole-v1\nnum_steps: 16\nquiet: true\n{options}")
        words = kept("group.yaml", *given)["seed_4"]
        request = request_of(words[1:])
        assert (request.config.seed, request.config.num_steps) == (4, 16)
        assert request.options == RunOptions(quiet=True)


@pytest.mark.parametrize("resume", [("--resume", "many"), ("resume=runs/many/",), ("--resume=many", "--seeds", "3-4")])
def test_of_a_resumed_group_it_goes_on_with_that_seed(kept, resume):
    kept("CartPole-v1", "--seeds", "3-4", "--name", "many", "--num-steps", "16", "--quiet")
    words = kept(*resume, "--total-steps", "4096", "--quiet")["seed_4"]
    given = resume[0].removeprefix("--").removeprefix("resume").lstrip("=") or resume[1]
    assert words == ["train", "--resume", f"{given.rstrip('/')}/seed_4", "--total-steps", "4096", "--quiet"]
    trained = kept_alone(words)
    assert trained.path.name == "seed_4"
    assert trained.config.seed == 4


def test_seeds_of_one_program_are_told_their_own(tmp_path):
    """Their runs are opened far from the launcher, which alone knows the words."""
    (tmp_path / "many").mkdir()
    words = ("train", "CartPole-v1", "--num-seeds", "2", "--seed", "3", "--name", "many", "--env.kwargs", '{"key": 7}')
    assignment = Assignment(Config(seed=3), tmp_path / "many", RunOptions(num_seeds=2, name="many"))
    told = Assignment.from_json(replace(assignment, facts=SessionFacts(**commands_of(assignment, words))).to_json())
    run = RunDirectory(told.path, facts=told.facts)
    own = open_seed(run, Config(seed=4))
    own.unlock()
    left = ("--env.kwargs", '{"key": ***}', "--seed", "4")
    assert own.facts.command == ("lockstep", "train", "CartPole-v1", *left)
    assert run.facts.command == ("lockstep", *words[:-1], left[1])
    assert commands_of(assignment, None) == {}
    assert commands_of(replace(assignment, options=RunOptions()), words)["commands"] == {}


def kept_alone(words):
    """The run that words go on with, as they are prepared."""
    request, group = group_of(request_of(words[1:]), Topology())
    assert group is None
    with contextlib.ExitStack() as stack:
        prepared = prepare(request, Topology(), stack)
        stack.callback(prepared.run.unlock)
    return prepared.assignment

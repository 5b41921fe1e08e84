"""Ranks other than the first write no files: what importing the integration does there."""

import inspect
import os
import subprocess
import sys

import cloudpickle
import pytest
from command_line import surroundings
from stable_baselines3.common.vec_env import SubprocVecEnv, VecVideoRecorder

from lockstep.core.errors import RunError
from lockstep.integrations.sb3 import files
from lockstep.integrations.sb3.files import QuietEnvironment, save_on_one_rank

LOADS = """
import sys
from pathlib import Path
import cloudpickle
env = cloudpickle.loads(Path(sys.argv[1]).read_bytes())()
env.reset()
while not any(env.step(env.action_space.sample())[2:4]):
    pass
"""


def monitored(path):
    def make():
        import gymnasium
        from stable_baselines3.common.monitor import Monitor

        return Monitor(gymnasium.make("CartPole-v1"), str(path))

    return make


@pytest.mark.parametrize("quiet", [True, False])
def test_a_process_of_environments_is_as_quiet_as_its_rank(quiet, tmp_path):
    """It starts fresh and knows of us by what it is given to run; what isn't wrapped would write there."""
    make = monitored(tmp_path / "0")
    (tmp_path / "maker").write_bytes(cloudpickle.dumps(QuietEnvironment(make) if quiet else make))
    place = {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = [sys.executable, "-c", LOADS, str(tmp_path / "maker")]
    subprocess.run(words, env=surroundings("", place), check=True, capture_output=True, timeout=600)
    assert (tmp_path / "0.monitor.csv").exists() != quiet


@pytest.mark.parametrize(("cls", "argument"), [(VecVideoRecorder, "record_video_trigger"), (SubprocVecEnv, "env_fns")])
def test_what_is_changed_in_the_library_is_there(cls, argument):
    assert argument in inspect.signature(cls.__init__).parameters


@pytest.mark.parametrize("how", ["by place", "by name"])
def test_one_argument_of_a_constructor_is_changed(how):
    class Recorder:
        def __init__(self, folder, trigger, length=5):
            self.given = (folder, trigger, length)

    files._change_init(Recorder, "trigger", lambda trigger: (trigger, "changed"))
    made = Recorder("here", 1, length=7) if how == "by place" else Recorder(trigger=1, folder="here", length=7)
    assert made.given == ("here", (1, "changed"), 7)


@pytest.fixture
def second_rank(monkeypatch):
    """This process as the second of two, beside a first that has saved ``count[0]`` files of a name."""
    count = [0]
    monkeypatch.setattr(files, "place", lambda: (1, 2))
    monkeypatch.setattr(files, "is_writer", lambda: False)
    monkeypatch.setattr(files, "joined", lambda: True)
    monkeypatch.setattr(files, "count_so_far", lambda key: count[0])
    monkeypatch.setattr(files, "WAIT", 0.05)
    monkeypatch.setattr(files, "_saved", files.Counter())
    return count


def test_nobody_waits_before_the_ranks_have_met(second_rank, monkeypatch):
    monkeypatch.setattr(files, "joined", lambda: False)
    save_on_one_rank("model", lambda: pytest.fail("the second rank wrote"))
    assert not files._saved
    monkeypatch.setattr(files, "is_writer", lambda: True)
    written = []
    save_on_one_rank("model", lambda: written.append(1))
    assert written == [1]


def test_a_rank_waits_for_its_nth_file_only(second_rank):
    def written():
        pytest.fail("the second rank wrote")

    second_rank[0] = 1
    save_on_one_rank("model", written)
    with pytest.raises(
        RunError, match=r"rank 1 waited 0\.05 s for rank 0 to save model; call save on every rank with the same"
    ):
        save_on_one_rank("model", written)
    save_on_one_rank("another", written)


def test_files_of_before_the_ranks_met_end_no_wait(second_rank, monkeypatch):
    """The first rank may have saved them alone; it and the others count from where they meet."""
    counts = files.Counter()
    monkeypatch.setattr(files, "count_so_far", counts.__getitem__)
    monkeypatch.setattr(files, "count_up", lambda key: counts.update([key]))
    monkeypatch.setattr(files, "is_writer", lambda: True)
    save_on_one_rank("model", lambda: None)
    files.count_anew()
    monkeypatch.setattr(files, "is_writer", lambda: False)
    with pytest.raises(RunError, match="rank 1 waited"):
        save_on_one_rank("model", lambda: None)


def test_a_rank_that_learns_waits_for_nobody(second_rank):
    with files.learning():
        save_on_one_rank("model", lambda: pytest.fail("the second rank wrote"))
    with pytest.raises(RunError):
        save_on_one_rank("model", lambda: None)

"""Waiting isn't hanging: a rank that is slow is waited for, one that does nothing ends the run, by name."""

import pytest
from command_line import SMALL, error_line, lockstep, metrics_of
from variants import variants

WAITS = """
import os, time, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
RANK, HOW, LIMIT = os.environ.get("RANK", "0"), os.environ.get("HOW", ""), float(os.environ["LIMIT"])
slept = 0
def sleep():
    global slept
    if slept < 11:  # longer than the limit, and never long at once
        slept += 1
        time.sleep(LIMIT / 8)
        with open("slept", "w") as file:
            file.write(str(slept))
class Waiting(CartPoleEnv):
    made, steps = 0, 0
    def __init__(self, **given):
        super().__init__(**given)
        Waiting.made += 1
        self.number = Waiting.made
    def step(self, action):
        Waiting.steps += 1
        if HOW == "hang" and RANK == "1" and Waiting.steps == 150:
            time.sleep(3600)
        if HOW == "slow evaluation" and RANK == "0" and self.number > 5:
            sleep()  # of those that were made last, which are an evaluation's
        return super().step(action)
    def render(self):
        if HOW == "slow video":
            sleep()
        return super().render()
gymnasium.register("Waiting-v0", Waiting, max_episode_steps=40)
"""
LIMIT = 10
"""Seconds; a machine that is busy lets a rank stand still for some."""
HOW_THEY_MEET = {
    "memory": ("--engine", "torch"),
    "gloo": ("--engine", "torch", "--collectives", "backend"),
    "jax": ("--engine", "jax", "--devices", 1),
}


@pytest.fixture
def waiting(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITS)

    def run(how, meeting, *words):
        given = ("train", "waiting:Waiting-v0", *SMALL, "--name", "run", "--nproc", 2, *HOW_THEY_MEET[meeting], *words)
        return lockstep(*given, "--collective-timeout", LIMIT, cwd=tmp_path, HOW=how, LIMIT=str(LIMIT))

    return run


@pytest.mark.parametrize("meeting", variants(HOW_THEY_MEET, ["memory"]))
def test_a_rank_that_hangs_ends_the_run_by_name(waiting, meeting):
    ended = waiting("hang", meeting)
    assert ended.code == 1
    said = error_line(ended)
    time = f"{LIMIT} s"
    silent = f"rank 1 made no progress for {time} in a rollout (collective_timeout)"
    waited = (
        f"rank 0 lost its peers: nobody has made progress for {time} (collective_timeout); rank 1 was last heard of in"
    )
    assert said.endswith(silent) or said.endswith(f"{waited} a rollout"), said


@pytest.mark.parametrize("meeting", variants(HOW_THEY_MEET, ["memory"]))
def test_an_evaluation_that_is_slow_on_one_rank_is_waited_for(waiting, tmp_path, meeting):
    evaluates = ("--eval.interval", 8, "--eval.episodes", 8, "--eval.max-steps", 40)
    ended = waiting("slow evaluation", meeting, *evaluates)
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "slept").read_text() == "11"
    assert [row["iteration"] for row in metrics_of(tmp_path / "runs" / "run") if "eval/episodes" in row] == [8]


@pytest.mark.long
def test_a_video_that_is_slow_to_draw_is_waited_for(waiting, tmp_path):
    evaluates = ("--eval.interval", 8, "--eval.episodes", 8, "--eval.max-steps", 40, "--eval.record-video")
    ended = waiting("slow video", "memory", *evaluates)
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "slept").read_text() == "11"
    assert [file.name for file in (tmp_path / "runs" / "run" / "videos").iterdir()] == ["step_1024.mp4"]

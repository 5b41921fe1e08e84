"""An episode at play: what an environment returns is read as training reads it, and shown at its own pace."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from lockstep.config.run import Config
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout, observation_layout
from lockstep.policies import videos
from lockstep.policies.videos import frames_per_second, play_episode, video_writer


class Shaped(gymnasium.Wrapper):
    """Gives each reward in an array of one element."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, np.array([reward]), *rest


class Left:
    """Pushes to the left."""

    config = SimpleNamespace(env=SimpleNamespace(id="Shaped"), eval=SimpleNamespace(max_steps=500))
    environment = {"mask_from": ""}  # noqa: RUF012
    observation = ObservationLayout((Leaf("", "vector", (4,)),))
    action = ActionLayout("discrete", (2,), (0,))

    def reset(self, seed=None):
        pass

    def act(self, rows, *_):
        return np.zeros(len(rows), np.int64)


def test_rewards_of_one_element_are_added_as_numbers():
    policy: Any = Left()
    plain = play_episode(gymnasium.make("CartPole-v1"), policy, None, 3, True)
    assert play_episode(Shaped(gymnasium.make("CartPole-v1")), policy, None, 3, True) == plain
    assert plain[0] == plain[1] > 5


def test_an_environment_that_observes_what_no_policy_is_shown_is_named():
    class Counts(Left):
        observation = ObservationLayout((Leaf("", "one_hot", (4,), (2, 2, 2, 2), (0, 0, 0, 0)),))

    policy: Any = Counts()
    with pytest.raises(
        EnvironmentFailureError, match=r"^environment Shaped gave what no policy is shown: .* is none of"
    ):
        play_episode(gymnasium.make("CartPole-v1"), policy, None, 3, True)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (ActionLayout("discrete", (2,), (0,)), "nothing"),
        (
            ActionLayout("multi_discrete", (2, 3), (0, 0), (2,)),
            "nothing of index 1 (allow every choice of an index that doesn't matter)",
        ),
    ],
    ids=["one-index", "two-indices"],
)
def test_a_mask_that_allows_nothing_ends_what_is_shown(action, said):
    class Masked(gymnasium.Wrapper):
        """Allows nothing of the last index from the third step on."""

        steps = 0

        def step(self, action):
            self.steps += 1
            return self.env.step(0)

        def action_masks(self):
            allowed = np.ones(action.outputs)
            allowed[-action.choices[-1] :] = self.steps < 3
            return allowed

    class Careful(Left):
        environment = {"mask_from": "method"}  # noqa: RUF012
        observation = observation_layout(Box(-9.0, 9.0, (4,), np.float32), mask_size=action.outputs)

        def act(self, rows, *_):
            return np.zeros((len(rows), *action.row_shape), np.int64)

    policy: Any = Careful()
    policy.action = action
    env = Masked(gymnasium.make("CartPole-v1"))
    with pytest.raises(EnvironmentFailureError) as caught:
        play_episode(env, policy, None, 3, True)
    assert str(caught.value) == f"environment Shaped gave what no policy is shown: action_mask: it allows {said}"
    assert env.steps == 3


@pytest.mark.parametrize(("fps", "frames"), [(8, 100), (12, 100), (30, 100), (50, 100), (67, 50), (125, 34), (500, 10)])
def test_a_gif_takes_as_long_as_its_episode_with_delays_that_browsers_keep(tmp_path, fps, frames):
    """A delay of less than two hundredths of a second is ten to them."""
    Image = pytest.importorskip("PIL.Image")  # noqa: N806
    pytest.importorskip("imageio_ffmpeg")
    writer = video_writer(tmp_path / "out.gif", fps)
    for step in range(100):
        writer.append_data(np.full((8, 8, 3), 2 * step, np.uint8))
    writer.close()
    delays = []
    with Image.open(tmp_path / "out.gif") as gif:
        for at in range(gif.n_frames):
            gif.seek(at)
            delays.append(gif.info["duration"])
    assert len(delays) == frames
    assert min(delays) >= 20
    assert sum(delays) == pytest.approx(1000 * 100 / fps, rel=0.03)


@pytest.mark.parametrize(("declared", "fps"), [(0.5, 1), (0.01, 1), (29.97, 30), (1, 1), (0, 30), (None, 30)])
def test_frames_are_shown_at_a_whole_rate_from_one_on(declared, fps):
    found = frames_per_second(SimpleNamespace(metadata={"render_fps": declared}))
    assert (found, type(found)) == (fps, int)


def test_a_gif_that_cannot_be_written_takes_no_step(tmp_path, monkeypatch):
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "draft.gif").mkdir()
    monkeypatch.setattr(videos, "draft_of", lambda video: nullcontext(tmp_path / "draft.gif"))
    monkeypatch.setattr(videos, "play_episode", lambda *_: pytest.fail("an episode was begun"))
    policy: Any = SimpleNamespace(config=Config.model_validate({"env": "CartPole-v1"}))
    with pytest.raises(IsADirectoryError):
        videos.play(policy, tmp_path / "out.gif")


def test_a_gif_without_pictures_leaves_no_file(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    video_writer(tmp_path / "out.gif", 30).close()
    assert not any(tmp_path.iterdir())


def test_a_gif_of_a_single_picture_is_written(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    writer = video_writer(tmp_path / "out.gif", 125)
    writer.append_data(np.zeros((8, 8, 3), np.uint8))
    writer.close()
    assert (tmp_path / "out.gif").read_bytes().startswith(b"GIF8")


class Broken(gymnasium.Wrapper):
    """Raises in one of its functions."""

    def __init__(self, where, error):
        super().__init__(gymnasium.make("CartPole-v1"))
        self._where, self._error = where, error

    def _raise_in(self, where):
        if where == self._where:
            raise self._error

    def reset(self, **kwargs):
        self._raise_in("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self._raise_in("step")
        return super().step(action)


@pytest.mark.parametrize("error", [OSError("no motor"), ValueError("no motor"), SystemExit("no motor")])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_an_environment_raises_is_its_own(where, error):
    policy: Any = Left()
    with pytest.raises(EnvironmentFailureError, match=rf"^environment \w+ raised in {where}: {type(error).__name__}: "):
        play_episode(Broken(where, error), policy, None, 3, True)


@pytest.mark.parametrize("code", [None, 0])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_leaves_as_its_window_is_closed_ends_the_play(where, code, monkeypatch, tmp_path):
    monkeypatch.setattr(videos, "video_writer", lambda *_: SimpleNamespace(append_data=print, close=print))
    monkeypatch.setattr(videos, "_frame", lambda _: None)
    monkeypatch.setattr(videos, "drawn_environment", lambda *_: Broken(where, SystemExit(code)))
    config = Config.model_validate({"env": "CartPole-v1"})
    policy: Any = type("Playing", (Left,), {"config": config})()
    assert videos.play(policy, None) == []
    with pytest.raises(EnvironmentFailureError, match=f"raised in {where}: SystemExit"):
        videos.play(policy, tmp_path / "out.gif")


@pytest.mark.parametrize(
    ("seconds", "limit", "told"),
    [
        (0.01, None, []),
        (2.0, None, ["out.mp4: 3 frames so far", "out.mp4: 6 frames so far"]),
        (6.0, 1_000, [f"out.mp4: {n} of at most 1,000 frames" for n in range(1, 8)]),
    ],
)
def test_a_video_that_takes_long_says_how_far_it_is(capsys, monkeypatch, seconds, limit, told):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(videos, "time", SimpleNamespace(monotonic=lambda: clock.now))
    kept: list[int] = []
    frames = videos.ToldFrames(SimpleNamespace(append_data=kept.append, close=kept.clear), Path("out.mp4"), limit)
    for n in range(7):
        clock.now += seconds
        frames.append_data(n)
    assert kept == list(range(7))
    frames.close()
    assert kept == []
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()) == ("", told)


def test_what_the_file_raises_is_not():
    policy: Any = Left()
    full: Any = SimpleNamespace(append_data=lambda _: Broken("file", OSError("full"))._raise_in("file"))
    with pytest.raises(OSError, match=r"^full$"):
        play_episode(gymnasium.make("CartPole-v1", render_mode="rgb_array"), policy, full, 3, True)

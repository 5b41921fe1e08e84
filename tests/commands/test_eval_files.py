"""``lockstep eval``: many episodes batch by batch, their files and histogram, and policies that nobody trained."""

import csv
import json

import gymnasium
import numpy as np
import pytest
from command_line import CARTPOLE

from lockstep.cli import main
from lockstep.config.run import Config
from lockstep.envs.arrays.players.snake import greedy_actions
from lockstep.policies.baselines import Baseline
from lockstep.policies.evaluation import evaluate
from lockstep.policies.results import draw_histogram, edges_of, read_json

SMALL_SNAKE = Config.model_validate({"env": {"id": "Snake-v0", "kwargs": {"size": 5}}})


def printed(capsys, *words):
    assert main(["eval", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_files_hold_every_episode_and_the_summary_is_theirs(trained, capsys, tmp_path):
    run, files = trained(*CARTPOLE).path, {name: tmp_path / "new" / f"out.{name}" for name in ("json", "csv", "png")}
    words = ("--episodes", 7, "--json", files["json"], "--csv", files["csv"])
    assert "7 episodes: return" in printed(capsys, run, *words)
    facts = json.loads(files["json"].read_text())
    assert json.loads(printed(capsys, run, "--episodes", 7, "--json")) == {
        name: value for name, value in facts.items() if name not in ("per_episode", "policy", "seed", "params_sha256")
    }
    assert (facts["policy"], facts["seed"], facts["stochastic"]) == (str(run), 0, False)
    assert facts["params_sha256"] == json.loads((run / "summary.json").read_text())["params_sha256"]
    assert facts["per_episode"].keys() == {"return", "length"}  # CartPole says nothing of success and scores
    assert np.mean(facts["per_episode"]["return"]) == pytest.approx(facts["return_mean"])
    rows = list(csv.DictReader(files["csv"].open()))
    assert [row["episode"] for row in rows] == [str(n) for n in range(7)]
    assert [float(row["return"]) for row in rows] == facts["per_episode"]["return"]
    assert [int(row["length"]) for row in rows] == facts["per_episode"]["length"]
    read, table = read_json(files["json"])
    assert read["return_mean"] == facts["return_mean"]
    assert table[:, 0].tolist() == facts["per_episode"]["return"]
    assert np.isnan(table[:, 3]).all()


def test_json_may_stand_before_the_run(trained, capsys):
    run = trained(*CARTPOLE).path
    assert printed(capsys, "--json", run) == printed(capsys, run, "--json")


def test_episodes_in_batches_are_the_same_ones(trained, capsys, tmp_path):
    run, found = trained(*CARTPOLE).path, []
    for batch in (3, 256):
        printed(capsys, run, "--episodes", 8, "--batch", batch, "--csv", tmp_path / "a.csv")
        found.append((tmp_path / "a.csv").read_text())
    assert found[0] == found[1]
    printed(capsys, run, "--episodes", 8, "--seed", 1, "--csv", tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() != found[0]


def test_a_histogram_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert "score" in printed(capsys, "Snake-v0", "--policy", "random", "--episodes", 30, "--histogram", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("returns", "width"), [([500.0] * 3, 12.0), ([100.0, 130.0, 130.0], None)])
def test_a_histogram_counts_whole_episodes_and_has_room_beside_one_bar(returns, width):
    pytest.importorskip("matplotlib")
    table = np.array([[each, 7.0, 0.0, np.nan] for each in returns])
    axis = draw_histogram("a", table).axes[0]
    low, high = axis.get_xlim()
    assert high - low == width if width else high - low > 30
    assert all(tick == round(tick) for tick in axis.get_yticks())
    (text,) = axis.get_legend().get_texts()
    assert text.get_text() == f"mean {np.mean(returns):,.2f}"


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([1, 3, 4], [0.5, 1.5, 2.5, 3.5, 4.5]),
        ([0.5, 4.5], np.linspace(0.5, 4.5, 41)),
        ([2.5], np.linspace(2.5, 3.5, 41)),
    ],
)
def test_bins_are_whole_numbers_where_those_are_few(values, edges):
    np.testing.assert_allclose(edges_of(np.array(values, float)), edges)


def test_baselines_are_told_apart_and_repeat_themselves():
    tables = {name: evaluate(Baseline(name, SMALL_SNAKE), 60, seed=3, batch=25) for name in ("random", "greedy")}
    assert tables["random"][:, 3].mean() < 1 < 5 < tables["greedy"][:, 3].mean()
    for name, table in tables.items():
        np.testing.assert_array_equal(evaluate(Baseline(name, SMALL_SNAKE), 60, seed=3, batch=25), table)
        assert not np.array_equal(evaluate(Baseline(name, SMALL_SNAKE), 60, seed=4, batch=25), table)


def test_random_actions_lie_within_their_bounds_and_in_the_mask():
    bounded = Baseline("random", Config.model_validate({"env": "Pendulum-v1"}))
    actions = bounded.native(np.zeros((500, 3), np.float32))
    assert (actions.shape, actions.dtype) == ((500, 1), np.float32)
    assert 1.9 < abs(actions).max() <= 2
    taxi = next(env_id for env_id in ("Taxi-v4", "Taxi-v3") if env_id in gymnasium.registry)
    masked = Baseline("random", Config.model_validate({"env": {"id": taxi, "action_mask": "info"}}))
    rows = masked.observation.zeros(200)
    masked.observation.floats(rows)[:, -6:] = [0, 1, 0, 0, 1, 0]
    assert set(masked.native(rows).tolist()) == {1, 4}
    rows = masked.observation.zeros(4000)
    masked.reset(0)
    plain = masked.native(rows)
    masked.observation.floats(rows)[:, -6:] = [0, 1, 0, 1, 1, 0]
    masked.reset(0)
    taken = masked.native(rows)
    shares = np.bincount(taken, minlength=6) / 4000
    assert abs(shares[[1, 3, 4]] - 1 / 3).max() < 4 * np.sqrt(2 / 9 / 4000)
    kept = np.isin(plain, [1, 3, 4])
    assert np.array_equal(taken[kept], plain[kept])


def test_the_greedy_one_goes_to_the_food_but_into_nothing():
    image = np.zeros((3, 4, 4, 3), np.uint8)
    image[:, 1, 1, 0] = 255
    image[:, 3, 1, 2] = 255  # two below
    image[1, 2, 1, 1] = 90  # a body in between
    image[2, [0, 1, 1], [1, 0, 2], 1] = image[2, 2, 1, 1] = 90  # bodies all around
    found = [greedy_actions(image, np.random.default_rng(seed)).tolist() for seed in range(30)]
    assert {row[0] for row in found} == {1}
    assert {row[1] for row in found} == {0, 2, 3}  # each leads as near
    assert {row[2] for row in found} == {1}


def test_the_greedy_one_looks_at_the_newest_of_stacked_frames():
    stacked = Config.model_validate({"env": {**SMALL_SNAKE.env.model_dump(), "frame_stack": 3}})
    assert evaluate(Baseline("greedy", stacked), 20)[:, 3].mean() > 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("CartPole-v1", "--policy", "greedy"), "policy: greedy is for lockstep/Snake-v0 alone, not CartPole-v1"),
        (("CartPole-v1", "--policy", "random", "--json", "a.txt"), "json: a.txt must end in .json"),
        (("CartPole-v1", "--policy", "random", "--csv", "a.json"), "csv: a.json must end in .csv"),
        (("CartPole-v1", "--policy", "random", "--histogram", "a.gif"), "histogram: a.gif must end in .png or"),
        (("CartPole-v1",), "neither CartPole-v1 nor runs/CartPole-v1 is a run directory"),
        ((), "which run?"),
    ],
)
def test_what_cannot_be_is_refused(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert says in capsys.readouterr().err
    assert not any(tmp_path.iterdir())

"""Hosts that come and leave under torchrun's elastic agents: the agent and rows of a run that nobody touched."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import NEEDS_PROC, Ended, Run, assert_no_orphans
from elastic_agents import Agents
from network_hosts import joined_hosts

pytestmark = [NEEDS_PROC, pytest.mark.long]
ITERATIONS = 300
"""More than are done, slowly, while hosts come and leave."""
SMALL = (
    *("--num-envs", 8, "--num-shards", 4, "--num-steps", 16, "--total-steps", ITERATIONS * 128),
    *("--checkpoint.interval", 3),
    *("--ppo.num-epochs", 1, "--ppo.num-minibatches", 2, "--network.hidden-sizes", 16, 16, "--eval.interval", 0),
    "--log.no-tensorboard",
)  # fmt: skip
PACED = ("train", "paced:PacedCartPole-v0", *SMALL)
ENGINES = {"torch": ("--engine", "torch"), "jax": ("--engine", "jax", "--devices", 1)}
LIMIT = 20
"""Seconds until ranks notice a peer that is silent, whose cable is cut."""


@pytest.fixture
def pace(tmp_path: Path) -> Path:
    file = tmp_path / "pace"
    file.touch()
    return file


@pytest.fixture
def agents(tmp_path: Path, pace: Path) -> Iterator[Callable[..., Agents]]:
    made = []

    def make(most: int, **more) -> Agents:
        made.append(Agents(tmp_path / "runs" / "run", uuid.uuid4().hex, most, PACE=str(pace), **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_undisturbed(trained: Callable[..., Run], run: Path, agents: Agents, *engine: str | int) -> None:
    """Everything has ended well, and the run is the one of a single rank that nobody touched."""
    codes = agents.end()
    assert codes[0] == 0, agents.said()  # the last to leave may miss the store
    alone, ours = trained("paced:PacedCartPole-v0", *SMALL, *engine), Run(run, Ended(0, "", "", agents.mark))
    assert ours.summary["status"] == "finished"
    assert ours.agent == alone.agent
    assert len(ours.metrics) == ITERATIONS
    assert ours.metrics == alone.metrics
    assert_no_orphans(ours.ended)


@pytest.mark.parametrize("engine", ["torch"])  # JAX compiles at each change; it is below, where a host is lost
def test_agents_come_and_leave(trained, tmp_path, pace, agents, engine):
    words, run = (*PACED, *ENGINES[engine], "--name", "run", "--resume", "auto", "--quiet"), tmp_path / "runs" / "run"
    four = agents(4)
    for number in range(4):
        four.start(number, *words)
    four.reach(4)
    four.kill(3)
    four.reach(3)
    four.kill(1, only_agent=True)  # its rank ends with it
    assert four.terminate(2) != 0
    four.reach(1)
    for number in (1, 2, 3):
        four.start(number, *words)
    four.reach(4)
    pace.unlink()
    assert_undisturbed(trained, run, four, *ENGINES[engine])


def test_two_ranks_of_each_agent_and_the_first_agent_leaves(trained, tmp_path, pace, agents):
    words, run = (*PACED, *ENGINES["torch"], "--name", "run", "--resume", "auto", "--quiet"), tmp_path / "runs" / "run"
    two = agents(2, ranks=2, own_store=True)
    two.start(0, *words)
    two.reach(2)
    two.start(1, *words)
    two.reach(4)
    two.kill(0)
    two.reach(2)
    pace.unlink()
    assert_undisturbed(trained, run, two, *ENGINES["torch"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_is_lost_and_comes_back(trained, tmp_path, pace, agents, engine):
    words = (*PACED, *ENGINES[engine], "--name", "run", "--resume", "auto", "--quiet", "--collective-timeout", LIMIT)
    with joined_hosts(3) as hosts:
        for host in hosts:
            host.slow_down("100mbit")
        three = agents(3, hosts=hosts)
        for number in range(3):
            three.start(number, *words)
        three.reach(3)
        hosts[2].cut()
        three.kill(2)
        three.reach(2)
        hosts[2].mend()
        three.start(2, *words)
        three.reach(3)
        pace.unlink()
        assert_undisturbed(trained, tmp_path / "runs" / "run", three, *ENGINES[engine], "--collective-timeout", LIMIT)

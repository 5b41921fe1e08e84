"""What the PyTorch engine says of shards that run one after the other."""

from types import SimpleNamespace

import pytest
from small_runs import alone, described, described_picture, plan_of, small_config, small_state

from lockstep.config.run import Config
from lockstep.envs.description import EnvDescription
from lockstep.torch_engine.setup import choose_mode
from lockstep.torch_engine.start import announcement
from lockstep.torch_engine.start.announcement import loop_notes


@pytest.mark.parametrize(
    ("convolutional", "custom", "why"),
    [
        (False, None, "self-check: batched, a shard's bits would change on this machine"),
        (True, None, "the bits of convolutions may depend on the size of a batch"),
        (True, "sees images", "the custom network sees images"),
    ],
)
def test_it_says_why_how_much_and_what_to_do(convolutional, custom, why):
    (line,) = loop_notes(4, convolutional, custom)
    assert line.startswith(f"{why}, so shards run one after the other: 4 calls of the networks instead of 1")
    assert "1 to 5 times as long" in line
    assert all(way in line for way in ("more ranks", "--num-shards", "--reduction fast"))


def test_one_shard_on_a_rank_costs_nothing():
    assert loop_notes(1, False) == loop_notes(1, True, "sees images") == []


def notes_of(config: Config, description: EnvDescription, mode: str, together: int) -> list[str]:
    """What a run of one rank says of itself."""
    session = SimpleNamespace(
        config=config,
        communicator=alone(config),
        plan=plan_of(config),
        state=small_state(config, description),
        mode=mode,
        together=together,
        topology=SimpleNamespace(on_one_host=True),
    )
    return announcement._own_notes(session)  # pyright: ignore[reportArgumentType]


def notes_of_images(together: int) -> list[str]:
    """What a run on small images says whose gradients are of so many shards at a time."""
    return notes_of(small_config(), described_picture(), "loop", together)


def test_images_one_shard_at_a_time_are_told_of_where_several_would_fit(monkeypatch):
    (note,) = notes_of_images(together=1)
    assert note.startswith("the bits of convolutions may depend on the size of a batch")
    assert notes_of_images(together=2) == []
    monkeypatch.setattr(choose_mode, "IMAGES_TOGETHER", 1)  # a call of one shard is large enough
    assert notes_of_images(together=1) == []


@pytest.mark.parametrize(("threads", "network", "told"), [(1, {}, False), (4, {}, True), (4, {"shared": True}, False)])
def test_threads_that_plain_networks_do_not_have_are_told_of(threads, network, told):
    notes = notes_of(small_config(threads=threads, network=network), described(), "batched", 1)
    said = (
        "threads: 4, but these networks are computed in NumPy, on one; with --threads 1 as many cores hold more ranks"
    )
    assert notes == ([said] if told else [])

"""Engine jax: every kind of environment, network and algorithm gives the same agent on 1, 2, 3 and 4 devices."""

import json
import sys

import pytest
from command_line import Run, lockstep, run_words
from device_runs import JAX, devices, same_agent
from variants import variants

SHORT = (
    *JAX,
    *("--num-envs", 8, "--num-steps", 16, "--total-steps", 384, "--ppo.num-epochs", 2, "--ppo.num-minibatches", 2),
    *("--ppo.learning-rate", 5e-3, "--network.hidden-sizes", 8, "--checkpoint.interval", 0, "--log.no-tensorboard"),
)
"""Three iterations of 128 steps."""
CUSTOM = ("lockstep/CartPole-v1", *SHORT, "--network.custom", "equinox_nets:Tiny", "--network.custom-kwargs")
IMAGES = ("--network.image.kind", "simple", "--network.image.width", 0.25, "--network.image.depth", 1)
CHUNKS = ("--num-envs", 16, "--num-steps", 64, "--total-steps", 3072)
"""With images: 130 of a shard are evaluated in five chunks, and 64 of a minibatch have gradients in two."""
KINDS = {
    "images": ("lockstep/GridWorldPixels-v0", *SHORT, *IMAGES),
    "images on the host, in chunks": ("small_worlds:Lantern-v0", *SHORT, *IMAGES, *CHUNKS),
    "images, in chunks, recurrent": (
        *("small_worlds:Lantern-v0", *SHORT, *IMAGES, *CHUNKS, "--network.shared"),
        *("--network.recurrent", "gru", "--network.recurrent-size", 8, "--network.sequence-length", 32),
    ),
    "custom with dropout": (*CUSTOM, '{"dropout": 0.3}'),
    "GRPO": (
        *("lockstep/PushCube-v0", *SHORT, "--algorithm", "grpo", "--grpo.group-size", 2, "--grpo.kl-coef", 0.1),
        *("--num-envs", 16, "--total-steps", 768, "--env.max-episode-steps", 12),
    ),
    "decisions": (
        *("lockstep/CartPole-v1", *SHORT, "--ppo.num-epochs", 4, "--ppo.learning-rate", 1e-2),
        *("--ppo.schedule", "adaptive", "--ppo.desired-kl", 0.0007, "--ppo.target-kl", 0.0015),
        *("--total-steps", 3072),  # 24 iterations: about two of three are stopped, whatever the processor rounds
    ),
    "both normalised": (
        *("lockstep/Pendulum-v1", *SHORT, "--normalize.observations", "--normalize.returns"),
        *("--env.max-episode-steps", 10),
    ),
    "bfloat16": (
        *("lockstep/CartPole-v1", *SHORT, "--precision", "bf16", "--network.activation", "silu"),
        *("--network.hidden-sizes", 32, 32),
    ),
    "on the host": (
        *("HalfCheetah-v5", *SHORT, "--normalize.observations", "--normalize.returns"),
        *("--env.max-episode-steps", 10),
    ),
}
DEAR = ("custom with dropout", "images", "images, in chunks, recurrent")  # to compile
QUICK = ("on the host", "images on the host, in chunks", "bfloat16")
"""Those of ``make test``; what the others are about is in ``tests/jax_engine`` and in the golden runs there."""
CHEAP = tuple(kind for kind in KINDS if kind not in (*DEAR, *QUICK))
ONE_AFTER_ANOTHER = "import json, sys, lockstep.cli as c; sys.exit(max(c.main(w) for w in json.loads(sys.argv[1])))"


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Runs by device count and kind; those on the same number of devices share a process, for JAX takes long to load.

    A custom network comes first: the threads that bits of what users bring may depend on are then those that such a run
    has by itself. What takes long to compile has a process of its own.
    """
    runs: dict[tuple[int, str], Run] = {}

    def train_all(number, kinds):
        cwd = tmp_path_factory.mktemp(f"devices_{number}")
        names = {kind: kind.replace(" ", "_").replace(",", "") for kind in kinds}
        lines = [["train", *KINDS[kind], *devices(number), "--name", names[kind]] for kind in kinds]
        texts = [[str(word) for word in line] for line in lines]
        together = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(texts)]
        ended = run_words(together, cwd) if len(texts) > 1 else lockstep(*texts[0], cwd=cwd)
        assert ended.code == 0, ended.stderr
        return {(number, kind): Run(cwd / "runs" / name, ended) for kind, name in names.items()}

    def find(number, kind):
        if (number, kind) not in runs:
            (together,) = [kinds for kinds in (QUICK, CHEAP, DEAR) if kind in kinds]
            runs.update(train_all(number, together))
        return runs[number, kind]

    return find


@pytest.mark.parametrize("number", variants([2, 3, 4], [2]))  # each kind is compiled again for it
@pytest.mark.parametrize("kind", variants(KINDS, QUICK))
def test_each_kind_is_the_same_on_one_device_and_on_more(run_of, kind, number):
    one, many = run_of(1, kind), run_of(number, kind)
    assert many.summary["world_size"] == number
    assert many.summary["num_shards"] == 8
    assert len(one.metrics) == (24 if kind == "decisions" else 3)
    same_agent(one, many)


@pytest.mark.parametrize("number", variants([1, 2], [2]))
def test_worker_processes_of_host_environments_change_nothing(trained, run_of, number):
    same_agent(run_of(1, "on the host"), trained(*KINDS["on the host"], "--env.workers", 2, *devices(number)))


@pytest.mark.long
def test_decisions_were_taken_one_way_and_the_other(run_of):
    metrics = run_of(1, "decisions").metrics
    assert {record["train/stopped_by_kl"] for record in metrics} == {0, 1}
    assert len({record["train/learning_rate"] for record in metrics}) > 1
    assert len({record["train/optimizer_steps"] for record in metrics}) > 1


@pytest.mark.parametrize("kind", variants(["on the host", "GRPO", "images"], ["on the host"]))
def test_what_is_compared_shows_another_seed(trained, run_of, kind):
    """The negative of the comparisons above."""
    other = trained(*KINDS[kind], "--seed", 1, *devices(1))
    assert other.agent != run_of(1, kind).agent
    assert all(a != b for a, b in zip(other.metrics, run_of(1, kind).metrics, strict=True))


@pytest.mark.long
def test_dropout_is_another_network(trained, run_of):
    assert trained(*CUSTOM, "{}", *devices(1)).agent != run_of(1, "custom with dropout").agent


@pytest.mark.parametrize("kinds", variants([[*QUICK], [*CHEAP], [*DEAR]], [[*QUICK]]), ids=["quick", "cheap", "dear"])
def test_episodes_ended_where_they_are_to_be_compared(run_of, kinds):
    for kind in kinds:
        assert run_of(1, kind).metrics[-1]["rollout/episode_return_mean"] is not None, kind

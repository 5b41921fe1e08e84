"""The config files of examples/snake, and what the command line of the large one asks for."""

from pathlib import Path

import pytest

from lockstep.config.checks import resolve
from lockstep.envs.describe import describe
from lockstep.launch.request import request_of
from lockstep.launch.sizing import GB, Resources, size
from lockstep.launch.world import World

FOLDER = Path(__file__).parents[2] / "examples" / "snake"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
ABLATIONS = {"framestack": "env.frame_stack", "entropy": "ppo.entropy_coef", "shaping": "env.kwargs"}


def differences(one: dict, other: dict, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key in one.keys() | other.keys():
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict) and key != "kwargs":
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.add(prefix + key)
    return found


def test_there_are_three_sizes_and_three_ablations():
    base = {"snake-base.yaml", *(f"snake-base-{ablation}.yaml" for ablation in ABLATIONS)}
    assert set(FILES) == base | {"snake-small.yaml", "snake-large.yaml"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_file_is_a_run_for_1_2_and_4_ranks(name, world_size):
    config = request_of([str(FOLDER / name)]).config
    described = describe(config.env)
    config, _ = size(config, World(world_size, world_size), Resources(2, None), lambda: described)
    assert resolve(config, world_size).envs % world_size == 0
    edge = config.env.kwargs["size"]
    assert described.observation.leaves[0].image_shape == (3 * config.env.frame_stack, edge, edge)


def test_the_base_file_is_the_preset_spelled_out():
    file, preset = (resolve(request_of([word]).config) for word in (str(FOLDER / "snake-base.yaml"), "Snake-v0"))
    assert differences(file.model_dump(), preset.model_dump()) == {"env.kwargs"}
    assert file.env.kwargs == {"size": 10}  # which is the environment's own default


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_an_ablation_differs_in_one_setting(ablation):
    names = ("snake-base.yaml", f"snake-base-{ablation}.yaml")
    base, other = (request_of([str(FOLDER / name)]).config for name in names)
    assert differences(base.model_dump(), other.model_dump()) == {ABLATIONS[ablation]}
    if ablation == "shaping":
        assert other.env.kwargs["gamma"] == other.ppo.gamma


def test_the_short_name_is_ours():
    request = request_of(["Snake-v0"])
    assert request.config.env.id == "lockstep/Snake-v0"
    assert request.note is None
    assert request.config == request_of(["lockstep/Snake-v0"]).config
    assert request_of(["--env.id", "Snake-v0"]).config.env.id == "lockstep/Snake-v0"
    with pytest.raises(ValueError, match="two environments"):
        request_of(["CartPole-v1", "--env.id", "Snake-v0"])
    with pytest.raises(ValueError, match="Snake-v1"):
        describe(request_of(["Snake-v1"]).config.env)


LARGE = ("--total-steps", "100000000", "--seed", "42", "--nproc", "4", "--amp")


def test_the_command_line_of_the_large_one():
    request = request_of([str(FOLDER / "snake-large.yaml"), *LARGE])
    assert (request.config.total_steps, request.config.seed, request.options.nproc) == (100_000_000, 42, 4)
    assert request.config.precision == "bf16"
    for kind, count in (("auto", 48), ("max", 64)):
        config = request_of([str(FOLDER / "snake-large.yaml"), *LARGE, "--num-envs-per-rank", kind]).config
        resources = Resources(16, None, 85 * GB)
        config, line = size(config, World(4, 4), resources, lambda: describe(request.config.env))
        assert resolve(config, 4).envs == 4 * count
        assert str(line).startswith(f"num_envs_per_rank {kind}: {count} on a GPU of 85 GB")


def test_amp_is_bf16():
    assert request_of(["Snake-v0", "--amp", "--seed", "3"]).config.precision == "bf16"
    assert request_of(["Snake-v0", "--no-amp"]).config.precision == "fp32"
    with pytest.raises(ValueError, match="--no-amp given together with precision bf16"):
        request_of(["Snake-v0", "--amp", "--no-amp"])
    assert request_of(["Snake-v0"]).config.precision == "fp32"
    for words in (["--amp", "true"], ["--amp=true"]):
        assert request_of(["Snake-v0", *words]).config.precision == "bf16"
    with pytest.raises(ValueError, match=r"--amp: '16' is neither true nor false"):
        request_of(["Snake-v0", "--amp=16"])

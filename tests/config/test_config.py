import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.presets import PRESETS, preset_for
from lockstep.config.run import Config, EnvConfig, NetworkConfig, PPOConfig, RunOptions
from lockstep.core.shards import default_num_shards


def config_of(*words):
    return read_request(words).config


def complaint(action, *arguments):
    """The text of the ValueError that an action raises: always one line, never pydantic's own."""
    with pytest.raises(ValueError) as caught:
        action(*arguments)
    assert not isinstance(caught.value, ValidationError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- presets


@pytest.mark.parametrize("env_id", sorted(PRESETS))
def test_every_preset_resolves_without_any_other_setting(env_id):
    config = resolve(config_of(env_id))
    assert config.env.id == env_id
    assert config.ppo.learning_rate == PRESETS[env_id]["ppo"]["learning_rate"]
    assert config.num_steps == PRESETS[env_id]["num_steps"]
    assert config.envs == PRESETS[env_id]["num_envs"]


def test_a_preset_departs_from_the_defaults_and_an_unknown_environment_does_not():
    assert config_of("CartPole-v1").ppo.num_epochs == 20
    assert config_of("Somebodys/Env-v3") == Config(env=EnvConfig(id="Somebodys/Env-v3"))


def test_module_prefix_takes_the_preset_of_the_id_behind_it_and_keeps_the_prefix():
    prefixed, plain = config_of("my.module:Hopper-v5"), config_of("Hopper-v5")
    assert prefixed.env.id == "my.module:Hopper-v5"
    assert prefixed.model_copy(update={"env": plain.env}) == plain
    assert prefixed.normalize.observations


def test_a_preset_handed_out_is_a_copy():
    preset_for("CartPole-v1")["ppo"]["gamma"] = 0.5
    assert preset_for("CartPole-v1")["ppo"]["gamma"] == 0.98


# ---- immutability


def test_config_and_its_sections_are_immutable():
    config = Config()
    for section, name in (
        (config, "seed"),
        (config.ppo, "gamma"),
        (config.network, "hidden_sizes"),
        (config.env, "id"),
    ):
        before = getattr(section, name)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, before)
    with pytest.raises(ValidationError, match="frozen"):
        RunOptions().nproc = 2


def test_configs_share_no_mutable_default():
    Config().env.kwargs["g"] = 1.6
    assert Config().env.kwargs == {}


def test_no_config_takes_a_key_it_does_not_know():
    with pytest.raises(ValidationError, match="extra"):
        Config.model_validate({"sede": 1})
    assert Config.model_validate({"seed": 1}).seed == 1


# ---- resolve


def test_resolve_fills_in_environments_and_shards():
    config = resolve(Config())
    assert (config.num_envs, config.num_envs_per_rank, config.num_shards) == (8, None, 8)
    assert config.steps_per_iteration == 8 * 128
    assert resolve(config) == config


@pytest.mark.parametrize(("total_steps", "iterations"), [(1, 1), (1024, 1), (1025, 2), (100_000, 98)])
def test_the_last_iteration_is_whole(total_steps, iterations):
    assert resolve(Config(total_steps=total_steps)).num_iterations == iterations


def normalising(over, num_envs=8, num_shards=8, num_steps=4, world_size=1, **ppo):
    """Resolves a config that normalises advantages over this."""
    values = {"num_envs": num_envs, "num_shards": num_shards, "num_steps": num_steps, "reduction": "fast"}
    values |= {"algorithm": ppo.pop("algorithm", "ppo"), "network": ppo.pop("network", {})}
    ppo = {"num_minibatches": 4, "advantage_normalization": over, **ppo}
    return resolve(Config.model_validate(values | {"ppo": ppo}), world_size)


@pytest.mark.parametrize(
    ("over", "changes", "said"),
    [
        ("local", {}, "a shard's part of a minibatch is 1 sample, .*: use ppo.num_minibatches 2, global or off"),
        ("local", {"num_steps": 1, "num_minibatches": 1}, "use more num_steps, global or off"),
        ("local", {"num_envs": 1, "num_shards": 1}, "use ppo.num_minibatches 2 or off"),
        ("local", {"num_minibatches": 1, "batch_size": 8}, "use ppo.batch_size 16, global or off"),
        ("rank", {"world_size": 8}, "a rank's part of a minibatch is 1 sample, .*: use .*, global or off"),
        ("rank", {"world_size": 5}, "a rank's part of a minibatch is 1 sample"),
        ("global", {"num_envs": 1, "num_shards": 1}, "but a minibatch is 1 sample, .*: use ppo.num_minibatches 2 or"),
    ],
)
def test_advantages_are_not_normalised_over_one_sample(over, changes, said):
    text = complaint(lambda: normalising(over, **changes))
    assert text.startswith(f"ppo.advantage_normalization: {over}, but ")
    assert re.search(said, text), text


@pytest.mark.parametrize(
    ("over", "changes"),
    [
        ("local", {"num_minibatches": 2}),
        ("local", {"num_steps": 8, "network": {"recurrent": "lstm", "sequence_length": 2}}),
        ("rank", {"world_size": 4}),
        ("global", {}),
        ("off", {"num_envs": 1, "num_shards": 1}),
    ],
)
def test_advantages_are_normalised_over_two_samples(over, changes):
    assert normalising(over, **changes).ppo.advantage_normalization == over


def test_grpo_which_normalises_by_group_may_have_minibatches_of_one_sample():
    resolve(Config.model_validate({"algorithm": "grpo", "num_envs": 2, "num_steps": 2, "grpo": {"group_size": 2}}))


def test_an_unresolved_config_gives_no_sizes():
    with pytest.raises(AssertionError, match="not resolved"):
        _ = Config().steps_per_iteration


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_num_envs_and_shards_do_not_follow_the_world_size(world_size):
    assert resolve(Config(num_envs=16), world_size) == resolve(Config(num_envs=16), 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_num_envs_per_rank_grows_with_the_ranks(world_size):
    config = resolve(Config(num_envs_per_rank=3), world_size)
    assert (config.num_envs, config.num_envs_per_rank, config.num_shards) == (3 * world_size, None, world_size)


def test_num_envs_per_rank_keeps_shards_that_are_given():
    assert resolve(Config(num_envs_per_rank=4, num_shards=8), 2).num_shards == 8


def test_graphs_are_asked_for_on_one_rank():
    config = Config(device="cuda", cuda_graphs=True)
    assert resolve(config, 1).cuda_graphs is True
    with pytest.raises(
        ValueError, match=r"^cuda_graphs: true, but optimiser steps of 2 ranks can't be captured; leave it"
    ):
        resolve(config, 2)
    assert resolve(config.model_copy(update={"cuda_graphs": None}), 2).cuda_graphs is None


@given(st.integers(1, 10_000))
def test_default_num_shards_is_the_largest_power_of_two_up_to_eight_that_divides(num_envs):
    shards = default_num_shards(num_envs)
    assert shards in (1, 2, 4, 8)
    assert num_envs % shards == 0
    assert shards == 8 or num_envs % (2 * shards)
    assert resolve(Config(num_envs=num_envs)).num_shards == shards


def test_environments_that_do_not_fit_the_shards():
    text = complaint(resolve, Config(num_envs=10, num_shards=4))
    assert text.startswith("num_shards: 10 environments can't be cut into 4 equal shards")
    assert text.endswith("nearest that work: num_shards 2 or 5, or num_envs 8 or 12")
    assert [resolve(Config(num_envs=n, num_shards=4)).num_envs for n in (8, 12)] == [8, 12]
    assert [resolve(Config(num_envs=10, num_shards=n)).num_shards for n in (2, 5)] == [2, 5]


def test_more_ranks_than_the_shards_that_were_chosen():
    text = complaint(resolve, Config(num_envs=18, num_shards=6), 9)
    assert text.startswith("nproc: 9 ranks can't share 6 shards, at least one each; use at most 6, ")
    assert "or for a new run --num-shards 9 or more" in text
    assert resolve(Config(num_envs=18, num_shards=6), 6).num_shards == 6
    assert resolve(Config(num_envs=18, num_shards=9), 9).num_shards == 9


@pytest.mark.parametrize(
    ("num_envs", "world_size", "what"),
    [
        (
            8,
            9,
            "num_envs: 8 environments make 8 shards by default and 9 ranks need one each; for a new run use num_envs 9 "
            "with --num-shards 9, or at most 8 of them",
        ),
        (12, 5, "num_envs: 12 environments make 4 shards by default and 5 ranks need one each; for a new run use "
                "--num-shards 6, or at most 4 of them"),
        (9, 2, "num_envs: 9 environments make 1 shard by default and 2 ranks need one each; for a new run use "
               "--num-shards 3, or at most 1 of them"),
    ],
)  # fmt: skip
def test_more_ranks_than_the_shards_that_nobody_has_chosen(num_envs, world_size, what):
    assert complaint(resolve, Config(num_envs=num_envs), world_size) == what
    offered = {key: int(n) for key, n in re.findall(r"(num.envs|num.shards) (\d+)", what.partition("use ")[2])}
    settings = {"num_envs": num_envs} | {key.replace("-", "_"): n for key, n in offered.items()}
    assert resolve(Config.model_validate(settings), world_size).shards >= world_size
    assert resolve(Config(num_envs=num_envs), int(what.split()[-3])).num_envs == num_envs


def test_minibatches_that_do_not_divide_a_shards_samples():
    config = Config(num_envs=16, num_shards=8, num_steps=10, ppo=PPOConfig(num_minibatches=3))
    text = complaint(resolve, config)
    assert text.startswith("ppo.num_minibatches: 3 ")
    assert "2 environments x 10 steps = 20 samples" in text
    assert "2 or 4" in text
    fitting = config.model_copy(update={"ppo": PPOConfig(num_minibatches=4)})
    assert resolve(fitting).ppo.num_minibatches == 4


@given(st.integers(1, 40), st.integers(1, 64))
def test_the_numbers_of_minibatches_that_an_error_offers_work(num_steps, minibatches):
    config = Config(num_envs=8, num_steps=num_steps, ppo=PPOConfig(num_minibatches=minibatches))
    if num_steps % minibatches == 0:
        assert resolve(config).ppo.num_minibatches == minibatches
        return
    offered = complaint(resolve, config).rpartition("nearest that work: ")[2].split(" or ")
    for number in offered:
        fitting = config.model_copy(update={"ppo": PPOConfig(num_minibatches=int(number))})
        assert resolve(fitting).ppo.num_minibatches == int(number)


def test_a_batch_size_that_does_not_divide_among_shards_is_told_in_sizes():
    config = Config(num_envs=8, num_steps=32, ppo=PPOConfig(batch_size=4))
    text = complaint(resolve, config)
    assert text == (
        "ppo.batch_size: 4 makes 64 minibatches, and 64 doesn't divide a shard's 1 environments x 32 steps = 32 "
        "samples; nearest that work: 8 or 16"
    )
    assert complaint(resolve, Config(num_envs=8, num_steps=32, ppo=PPOConfig(batch_size=3))) == (
        "ppo.batch_size: 3 doesn't divide num_envs 8 x num_steps 32 = 256 samples; nearest that work: 8 or 16"
    )


@given(st.integers(1, 40), st.integers(1, 700), st.integers(1, 2), st.sampled_from([None, 2]))
def test_the_batch_sizes_that_an_error_offers_work(num_steps, size, envs, length):
    values = {"num_envs": 8 * envs, "num_shards": 8, "num_steps": num_steps * (length or 1)}
    if length:
        values["network"] = {"recurrent": "gru", "sequence_length": length}
    config = Config.model_validate({**values, "ppo": {"batch_size": size, "advantage_normalization": "off"}})
    samples, every = 8 * envs * num_steps * (length or 1), 8 * (length or 1)
    if samples % size == 0 and size % every == 0:
        assert resolve(config).ppo.num_minibatches * size == samples
        return
    text = complaint(resolve, config)
    assert text.startswith(f"ppo.batch_size: {size} ")
    for number in text.rpartition("nearest that work: ")[2].split(" or "):
        ppo = config.ppo.model_copy(update={"batch_size": int(number)})
        fitting = resolve(config.model_copy(update={"ppo": ppo}))
        assert fitting.ppo.num_minibatches * int(number) == samples


def test_num_envs_and_num_envs_per_rank_together():
    text = complaint(resolve, Config(num_envs=8, num_envs_per_rank=4))
    assert text.startswith("num_envs_per_rank: 4 ")
    assert "num_envs 8" in text


def test_nccl_on_a_cpu():
    text = complaint(resolve, Config(backend="nccl"))
    assert text.startswith("backend: nccl")
    assert "gloo" in text
    assert resolve(Config(backend="nccl", device="cuda")).backend == "nccl"
    assert resolve(Config(backend="gloo")).backend == "gloo"


def test_shared_memory_and_tensors_that_stay_on_the_gpu():
    text = complaint(resolve, Config(collectives="shared", device="cuda"))
    assert text.startswith("collectives: shared, but backend auto")
    assert "gloo" in text
    assert resolve(Config(collectives="shared", device="cuda", backend="gloo")).collectives == "shared"
    assert resolve(Config(collectives="shared")).collectives == "shared"


def test_empty_layers_and_decay_rates_out_of_range():
    text = complaint(resolve, Config(network=NetworkConfig(hidden_sizes=(64, 0))))
    assert text.startswith("network.hidden_sizes: [64, 0]")
    text = complaint(resolve, Config(ppo=PPOConfig(adam_betas=(0.9, 1.0))))
    assert text.startswith("ppo.adam_betas: [0.9, 1.0]")
    assert resolve(Config(network=NetworkConfig(hidden_sizes=()))).network.hidden_sizes == ()


def test_a_schedule_of_no_entropy_bonus():
    text = complaint(resolve, Config(ppo=PPOConfig(entropy_schedule="linear")))
    assert text.startswith("ppo.entropy_schedule: linear, but ppo.entropy_coef is 0")
    assert resolve(Config(ppo=PPOConfig(entropy_schedule="linear", entropy_coef=0.01))).ppo.entropy_coef == 0.01


# ---- config.json

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    learning_rate=st.floats(1e-12, 10),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    sizes=st.lists(st.integers(1, 512), max_size=3),
    kwargs=st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3),
    target_kl=st.none() | st.floats(1e-6, 1),
    num_envs=st.integers(1, 64),
    env_id=st.sampled_from(["CartPole-v1", "Acrobot-v1", "Nobodys-v0"]),
)
def test_a_resolved_config_survives_its_own_config_json(
    learning_rate, betas, sizes, kwargs, target_kl, num_envs, env_id
):
    config = resolve(
        Config(
            env=EnvConfig(id=env_id, kwargs=kwargs),
            num_envs=num_envs,
            ppo=PPOConfig(learning_rate=learning_rate, adam_betas=betas, target_kl=target_kl),
            network=NetworkConfig(hidden_sizes=tuple(sizes)),
        )
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config.model_dump(mode="json")))
        assert config_of(str(path)) == config
        assert config_of(directory) == config
        assert config_of(str(path), "--seed", "7") == config.model_copy(update={"seed": 7})


def test_environment_arguments_named_like_settings_stay_as_they_are(tmp_path):
    kwargs = {"lr": 1, "gamma": {"n_envs": 2, "a.b": 3, "max-steps": 4}, "env": "x", "a.b": {"lr": 5}, "num-envs": 6}
    config = resolve(Config(env=EnvConfig(kwargs=kwargs)))
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    assert config_of(str(tmp_path)).env.kwargs == kwargs
    assert config_of(str(tmp_path)) == config


def test_a_custom_network_stands_in_place_of_a_recurrent_one():
    network = {"custom": "mine:Net", "recurrent": "lstm"}
    with pytest.raises(ValueError, match=r"network\.recurrent: lstm, but network\.custom mine:Net stands in place"):
        resolve(Config.model_validate({"network": network}))
    assert resolve(Config.model_validate({"network": {"custom": "mine:Net"}})).network.recurrent is None

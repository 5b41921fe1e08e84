"""Command lines and files as users of other libraries write them."""

import json
import re
from pathlib import Path

import pytest

from lockstep.config.checks import resolve
from lockstep.config.command_line import parse_arguments, read_request
from lockstep.config.files import nested
from lockstep.config.help import COMMON
from lockstep.config.keys import ALIASES, LEAVES, SCHEDULED
from lockstep.config.run import Config
from lockstep.config.words import ADVICE, ALREADY, CONFIG_FILE, SWITCHES, VALUES

DOCS = Path(__file__).parents[2] / "docs"


def config_of(*words):
    return read_request(["CartPole-v1", *words]).config


def refused(*words):
    with pytest.raises(ValueError) as caught:
        resolve(read_request(["CartPole-v1", *words]).config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- whole command lines


def test_as_for_cleanrl():
    words = "--env-id CartPole-v1 --total-timesteps 500000 --learning-rate 2.5e-4 --num-envs 4 --num-steps 128"
    words += " --no-anneal-lr --gamma 0.99 --gae-lambda 0.95 --num-minibatches 4 --update-epochs 4 --norm-adv"
    words += " --clip-coef 0.2 --ent-coef 0.01 --max-grad-norm 0.5 --seed 1 --no-cuda --track --wandb-project-name p"
    config = resolve(read_request(words.split()).config)
    ppo = config.ppo
    assert (config.total_steps, config.envs, config.num_steps, config.seed) == (500_000, 4, 128, 1)
    assert (ppo.schedule, ppo.num_epochs, ppo.clip_range, ppo.entropy_coef) == ("constant", 4, 0.2, 0.01)
    assert (ppo.advantage_normalization, config.device) == ("global", "cpu")
    assert (config.log.wandb, config.log.project) == (True, "p")


def test_as_for_sb3():
    words = "--algo ppo --env CartPole-v1 --n-timesteps 1e5 --n-envs 8 --n-steps 32 --batch-size 64 --n-epochs 20"
    config = resolve(read_request(words.split()).config)
    assert (config.envs, config.num_steps, config.total_steps) == (8, 32, 100_000)
    assert (config.ppo.num_minibatches, config.ppo.num_epochs) == (4, 20)


def test_as_for_a_trainer_of_robots():
    words = "--task CartPole-v1 --num_envs 16 --num-steps-per-env 24 --max_iterations 10 --num-mini-batches 4"
    words += " --num-learning-epochs 5 --clip-param 0.2 --lam 0.95 --desired-kl 0.01 --run-name first"
    request = read_request(words.split())
    config = resolve(request.config)
    assert (config.total_steps, config.num_iterations) == (16 * 24 * 10, 10)
    assert (config.ppo.num_minibatches, config.ppo.num_epochs) == (4, 5)
    assert request.options.name == "first"


@pytest.mark.parametrize("on", [True, False])
def test_statistics_as_for_a_trainer_of_robots(on, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"env": "Pendulum-v1", "empirical_normalization": on}))
    for words in ([str(tmp_path / "c.json")], ["Pendulum-v1", f"--{'' if on else 'no-'}empirical-normalization"]):
        assert resolve(read_request(words).config).normalize.observations is on


def test_as_for_purejaxrl(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"ENV_NAME": "CartPole-v1", "LR": 0.001, "CLIP_EPS": 0.3, "ppo": {"UPDATE_EPOCHS": 2}}')
    config = read_request([str(file), "GAE_LAMBDA=0.8"]).config
    assert (config.ppo.learning_rate, config.ppo.clip_range, config.ppo.num_epochs) == (0.001, 0.3, 2)
    assert config.ppo.gae_lambda == 0.8


# ---- words that mean the same


@pytest.mark.parametrize(("switch", "found"), SWITCHES.items())
def test_a_switch_is_on_off_or_says_so(switch, found):
    path, on, off = found
    section, _, _ = path.rpartition(".")
    flag, beside = "--" + switch.replace("_", "-"), ("--eval.interval", "10")
    said = {on: [[flag], [flag, "True"]], off: [[f"{flag}=false"], [flag, "False"], [f"--no-{flag[2:]}"]]}
    if section and f"{section}.{switch}" not in LEAVES:
        said[on].append([f"--{section}.{flag[2:]}"])
        said[off].append([f"--{section}.no-{flag[2:]}"])
    for value, ways in said.items():
        for words in ways:
            if value is None:
                assert str(ADVICE[switch]) in refused(*words)
            else:
                assert config_of(*words, *beside) == config_of(f"--{path}={value}", *beside)
    with pytest.raises(ValueError, match="takes no value"):
        parse_arguments([f"--no-{flag[2:]}=true"])
    with pytest.raises(ValueError, match="neither true nor false" if switch not in ADVICE else f"{flag} maybe: "):
        parse_arguments([f"{flag}=maybe"])


@pytest.mark.parametrize(("switch", "found"), SWITCHES.items())
def test_a_switch_in_a_file(switch, found):
    path = found[0]
    section = path.rpartition(".")[0]
    for on, said in ((True, "true"), (False, "false")):
        if found[1 if on else 2] is None:
            assert nested({switch: on}) == {switch: on}
            continue
        _, expected = parse_arguments([f"--{switch}={said}"])
        expected = Config.model_validate(expected | {"env": {"id": "CartPole-v1"}})
        for given in ({switch: on}, {switch.upper(): on}, {section: {switch: on}} if section else {}):
            if given:
                values = nested(given | {"env": {"id": "CartPole-v1"}})
                assert Config.model_validate(values) == expected
    assert nested({"log": {"norm_adv": True}}) == {"log": {"norm_adv": True}}
    assert nested({"env.kwargs": {switch: True}}) == {"env": {"kwargs": {switch: True}}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cuda": False, "device": "cuda"}, "cuda: False given together with device cuda; give one"),
        ({"log": {"wandb": True}, "track": False}, "track: False given together with log.wandb True; give one"),
        ({"ppo": {"anneal_lr": True, "schedule": "constant"}}, "ppo.anneal_lr: True given together with ppo.schedule"),
    ],
)
def test_a_switch_against_its_setting_is_refused(given, said):
    with pytest.raises(ValueError) as refusal:
        nested(given)
    assert str(refusal.value).startswith(said)
    assert nested({"cuda": True, "device": "cuda"}) == {"device": "cuda"}


def value_clip(env_id, *words):
    return read_request([env_id, *words]).config.ppo.value_clip_range


@pytest.mark.parametrize("word", ["clip-vloss", "use-clipped-value-loss"])
def test_clipping_the_value_loss(word, tmp_path):
    flag, key = f"--{word}", word.replace("-", "_")
    assert (value_clip("HalfCheetah-v5"), value_clip("CartPole-v1")) == (0.2, None)
    for words in ([f"--no-{word}"], [flag, "False"], [f"{key}=false"], [f"--ppo.{word}=False"]):
        assert value_clip("HalfCheetah-v5", *words) is None
    assert value_clip("ALE/Pong-v5", flag, "--clip-coef", "0.3") == 0.1  # the preset's
    assert value_clip("CartPole-v1", flag, "--clip-coef", "0.3") == 0.3  # whichever is said first
    assert value_clip("CartPole-v1", "--clip-coef", "0.3", flag, "True") == 0.3
    assert value_clip("CartPole-v1", flag) == Config().ppo.clip_range
    assert value_clip("CartPole-v1", flag, "--clip-range-vf", "0.4") == 0.4
    assert value_clip("CartPole-v1", "--ppo.value-clip-range", "0.4", flag) == 0.4
    for words in ([flag, "--clip-range-vf", "none"], [f"--no-{word}", "--clip-range-vf", "0.4"]):
        said = words[0] + " given together with ppo.value_clip_range " + words[2] + "; give one"
        with pytest.raises(ValueError, match=re.escape(said)):
            value_clip("HalfCheetah-v5", *words)
    file = tmp_path / "c.json"
    for on, above in ((True, 0.25), (False, None)):
        for ppo in ({key: on, "clip_range": 0.25}, {"value_clip_range": above, key: on}):
            file.write_text(json.dumps({"env": "CartPole-v1", "ppo": ppo}))
            assert read_request([str(file)]).config.ppo.value_clip_range == above
        file.write_text(json.dumps({"env": "CartPole-v1", key: on}))
        assert read_request([str(file), "--clip-coef", "0.25"]).config.ppo.value_clip_range == above
        assert read_request([str(file), "--clip-range-vf", "0.5"]).config.ppo.value_clip_range == 0.5
        file.write_text(json.dumps({"env": "CartPole-v1", key: on, "ppo": {"value_clip_range": [0.5, None][on]}}))
        with pytest.raises(ValueError, match=f"{key}: {on} given together with ppo.value_clip_range"):
            read_request([str(file)])


def test_what_grpo_has_not_is_refused_of_it():
    grpo = ("--algorithm", "grpo")
    assert config_of(*grpo, "--no-clip-vloss", "--norm-adv").algorithm == "grpo"
    assert "GRPO has no critic" in refused(*grpo, "--clip-vloss")
    assert "--grpo.normalize-std false" in refused(*grpo, "--no-norm-adv")


def test_a_file_that_films_is_told_not_to(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"env": "CartPole-v1", "eval": {"interval": 5, "record_video": true}}')
    assert read_request([str(file)]).config.eval.record_video
    assert not read_request([str(file), "--capture-video", "False"]).config.eval.record_video


def test_a_switch_in_a_file_that_says_what_is_so_is_left_out():
    assert nested({"torch_deterministic": True, "render": False}) == {}
    assert nested({"render": True}) == {"render": True}


@pytest.mark.parametrize(
    ("name", "said"),
    [("a2c", "Stable-Baselines3's A2C"), ("DQN", "off-policy"), ("RecurrentPPO", "recurrent: lstm"), ("x", "ppo and")],
)
def test_other_algorithms_are_told_what_there_is(name, said):
    assert said in refused("--algo", name)


@pytest.mark.parametrize(("path", "word"), [(path, word) for path, words in VALUES.items() for word in words])
def test_a_value_goes_by_other_words(tmp_path, path, word):
    file = tmp_path / "c.json"
    file.write_text(f'{{"env": "CartPole-v1", "{path}": "{word}"}}')
    assert config_of(f"--{path}", word) == config_of(f"--{path}", VALUES[path][word])
    assert getattr(read_request([str(file)]).config, path) == VALUES[path][word]
    assert VALUES[path][word] in str(LEAVES[path].annotation)


def test_other_values_are_refused_as_before():
    assert "precision: 'fp16'" in refused("--precision", "fp16")


@pytest.mark.parametrize("word", ["lr=0.5", "ppo.learning_rate=0.5", "+ppo.lr=0.5", "++LR=0.5", "learning-rate=0.5"])
def test_a_key_and_its_value_after_the_environment(word):
    assert config_of(word) == config_of("--lr", "0.5")


def test_a_settings_own_name_in_capitals():
    assert config_of("NUM_ENVS=4", "NUM_STEPS=16") == config_of("--num-envs", "4", "--num-steps", "16")
    assert "NUM_ENV: unknown option" in refused("NUM_ENV=4")


def test_purejaxrls_keys_in_a_file_are_those_of_the_command_line(tmp_path):
    given = {"LR": 2.5e-4, "NUM_ENVS": 4, "NUM_STEPS": 16, "TOTAL_TIMESTEPS": 640, "UPDATE_EPOCHS": 2, "SEED": 3}
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"ENV_NAME": "CartPole-v1", **given}))
    assert read_request([str(file)]).config == config_of(*(f"{key}={value}" for key, value in given.items()))
    file.write_text(json.dumps({"ENV_NAME": "CartPole-v1", "ppo": {"GAMMA": 0.5}}))
    assert read_request([str(file)]).config.ppo.gamma == 0.5
    file.write_text(json.dumps({"ENV_NAME": "CartPole-v1", "num_envs": 8, "NUM_ENVS": 4}))
    with pytest.raises(ValueError, match=r"NUM_ENVS 4 given together with num_envs 8; give one$"):
        read_request([str(file)])
    file.write_text(json.dumps({"ENV_NAME": "CartPole-v1", "NUM_ENV": 8}))
    with pytest.raises(ValueError, match="NUM_ENV: unknown key"):
        read_request([str(file)])


def test_two_environments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'CartPole-v1' and --env-id 'Acrobot-v1' are two environments; give one"):
        config_of("--gym-id", "Acrobot-v1")
    assert config_of("--env-id", "CartPole").env.id == "CartPole-v1"
    file = tmp_path / "c.yaml"
    file.write_text("env: CartPole-v1\n")
    assert read_request([str(file), "--env-id", "Acrobot-v1"]).config.env.id == "Acrobot-v1"


@pytest.mark.parametrize("flag", ["--buffer-size", "--learning-starts", "--tau"])
def test_options_of_off_policy_algorithms_are_told_so(flag):
    assert "no off-policy algorithms" in refused(flag, "1")


def test_lists_in_brackets():
    assert config_of("network.hidden_sizes=[32,16]").network.hidden_sizes == (32, 16)
    assert config_of("--network.hidden-sizes", "[32,", "16]", "seed=3").network.hidden_sizes == (32, 16)


def test_an_unknown_key_before_an_equals_sign_is_refused():
    assert "did you mean --num-envs" in refused("num_env=4")


@pytest.mark.parametrize("flag", CONFIG_FILE)
def test_a_config_file_after_an_option(tmp_path, flag):
    file = tmp_path / "c.yaml"
    file.write_text("env: Acrobot-v1\nseed: 3\n")
    flag = "--" + flag.replace("_", "-")
    assert read_request([flag, str(file)]) == read_request([str(file)])
    assert read_request([f"{flag}={file}"]) == read_request([str(file)])
    other = read_request(["CartPole-v1", flag, str(file)])
    assert other == read_request([str(file), "--env.id", "CartPole-v1"])
    assert (other.config.env.id, other.config.seed) == ("CartPole-v1", 3)
    with pytest.raises(ValueError, match="needs a value"):
        read_request([flag])
    with pytest.raises(ValueError, match="one config file or environment id is enough"):
        read_request([str(file), flag, str(file)])


def test_an_alias_in_its_section_and_no_other(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"env": "CartPole-v1", "ppo": {"lr": 0.5, "n_epochs": 3}, "eval": {"n_eval_episodes": 7}}')
    config = read_request([str(file)]).config
    assert (config.ppo.learning_rate, config.ppo.num_epochs, config.eval.episodes) == (0.5, 3, 7)
    assert config_of("--ppo.lr", "0.5").ppo.learning_rate == 0.5
    file.write_text('{"env": "CartPole-v1", "network": {"lr": 0.5}}')
    with pytest.raises(ValueError, match=r"network\.lr: unknown key; did you mean ppo\.learning_rate\?"):
        read_request([str(file)])


def test_an_id_without_a_version_is_the_newest():
    assert read_request(["CartPole"]) == read_request(["CartPole-v1"])
    assert read_request(["--env.id", "Snake"]) == read_request(["--env.id", "Snake-v0"])
    assert read_request(["NoSuchThing"]).config.env.id == "NoSuchThing"
    assert read_request(["CartPole-v0"]).config.env.id == "CartPole-v0"


# ---- numbers that follow from others


def test_a_batch_size_is_a_number_of_minibatches():
    config = resolve(config_of("--num-envs", "8", "--num-steps", "64", "--batch-size", "128"))
    assert (config.ppo.num_minibatches, config.ppo.batch_size) == (4, None)
    assert config == resolve(config_of("--num-envs", "8", "--num-steps", "64", "--ppo.num-minibatches", "4"))
    text = refused("--num-envs", "8", "--num-steps", "64", "--batch-size", "100")
    assert text == (
        "ppo.batch_size: 100 doesn't divide num_envs 8 x num_steps 64 = 512 samples; nearest that work: 64 or 128"
    )


def test_iterations_are_a_number_of_steps():
    words = ("--num-envs", "8", "--num-steps", "64")
    config = resolve(config_of(*words, "--total-iters", "3"))
    assert config == resolve(config_of(*words, "--total-steps", str(3 * 8 * 64)))
    assert config.total_iterations is None


def test_of_two_that_say_the_same_the_nearer_layer_counts(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"env": "CartPole-v1", "total_iterations": 3, "ppo": {"batch_size": 64}}')
    config = read_request([str(file), "--total-steps", "9", "--minibatches", "2"]).config
    assert (config.total_iterations, config.total_steps) == (None, 9)
    assert (config.ppo.batch_size, config.ppo.num_minibatches) == (None, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--total-iters", "3", "--total-steps", "9"), "total_iterations: 3 given together with total_steps 9"),
        (("--batch-size", "8", "--minibatches", "2"), "ppo.batch_size: 8 given together with ppo.num_minibatches 2"),
    ],
)
def test_both_at_once_are_refused(words, said):
    assert refused(*words).startswith(said)


# ---- words that mean something else


@pytest.mark.parametrize("word", sorted(ADVICE))
def test_what_to_write_instead_is_said_and_can_be_written(word, tmp_path):
    flag = "--" + word.replace("_", "-")
    text = refused(f"{flag}=0.5")
    assert text.startswith(f"{flag} 0.5: ")
    if not ALREADY.get(word) and not (word in SWITCHES and SWITCHES[word].on):
        assert refused(flag).startswith(f"{flag}: ")
    said = re.findall(r"(--[a-z][\w.-]*)(?: ([\w.]+))?", text.partition(": ")[2])
    for option, value in said:
        leaf = LEAVES.get(option[2:].replace("-", "_"))
        assert leaf is not None, option
        taken = [] if leaf.kind == "flag" else [value if re.fullmatch(r"[\d.]+|none|cuda|max", value) else "1"]
        parse_arguments([option, *taken])
    file = tmp_path / "c.json"
    file.write_text(f'{{"env": "CartPole-v1", "ppo": {{"{word}": 1}}}}')
    with pytest.raises(ValueError, match=f"{word} 1: "):
        read_request([str(file)])


def test_the_factor_of_value_losses():
    assert "CleanRL's and PureJaxRL's is --ppo.value-coef 0.5, SB3's --ppo.value-coef 1" in refused("--vf-coef", "0.5")
    assert "--ppo.value-coef 2" in refused("--value-loss-coef=1.0")


def test_no_word_stands_for_two_things():
    one_sided = {word for word, stands_for in SWITCHES.items() if None in stands_for}
    assert one_sided | set(ALREADY) <= set(ADVICE)
    words = [*ALIASES, *SWITCHES, *CONFIG_FILE, *ALREADY, *(set(ADVICE) - one_sided - set(ALREADY))]
    assert len(words) == len(set(words))
    assert not set(words) & set(LEAVES)


def test_common_options_are_options():
    assert set(COMMON) <= set(LEAVES)
    assert len(COMMON) == 21


def test_words_of_a_file_that_hold_tables(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(
        '{"env": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": true}, "normalize": {"clip_obs": 5.0}}'
    )
    config = read_request([str(file), "--frame-stack", "2"]).config
    assert (config.env.kwargs, config.env.frame_stack) == ({"sutton_barto_reward": True}, 2)
    assert config.normalize.clip_observations == 5.0


# ---- switches that say what is so, and words of one dash


@pytest.mark.parametrize(
    "words",
    [
        ["--torch-deterministic"],
        ["--torch-deterministic", "True"],
        ["--capture-video=False"],
        ["--no-capture-video"],
        ["clip_vloss=false"],
        ["--save-model"],
        ["--gae"],
    ],
)
def test_a_switch_that_says_what_is_so_is_taken(words):
    assert read_request(["CartPole-v1", *words]).config == read_request(["CartPole-v1"]).config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--torch-deterministic", "False"], "always deterministic"),
        (["--num-gpus", "2"], "--num-gpus 2: --nproc 2 --device cuda takes a GPU a rank"),
        (["--multi-gpu", "False"], "--nproc 1 is the default"),
        (["--no-distributed"], "--nproc 1 is the default"),
        (["--gae", "--algorithm", "grpo"], "--gae given together with algorithm grpo; give one"),
        (["--capture-video"], "evaluations are filmed"),
        (["-f", "logs"], "-f: unknown option; write --runs-dir"),
        (["-x"], "-x: unknown option; options have two dashes"),
        (["num_envs", "=", "32"], "are one word, without spaces: key=value"),
        (["--eval-freq", "50000"], "write --eval.interval, in iterations: 50000 / (num_envs x num_steps)"),
        (["ppo.learning_rate=lin_0.001"], "write 0.001; ppo.schedule: linear lowers the learning rate to 0"),
        (["ppo.clip_range=lin_0.2"], "write 0.2; ppo.clip_schedule: linear lowers the clip ranges to 0"),
        (["--clip-range-vf", "lin_0.1"], "write 0.1; ppo.clip_schedule: linear lowers the clip ranges to 0"),
        (["ent_coef=lin_0.01"], "write 0.01; ppo.entropy_schedule: linear lowers the entropy coefficient to 0"),
        (["ppo.max_grad_norm=lin_0.5"], "write 0.5; it stays as it is; there is no schedule for it"),
        (["--net-arch", "[64, 32]"], "write --network.hidden-sizes 64 32"),
        (["--actor-hidden-dims", "[64, 32]"], "--network.hidden-sizes 64 32; actor and critic have the same sizes"),
        (["critic_hidden_dims=64,32"], "--network.hidden-sizes 64 32; actor and critic have the same sizes"),
        (["--init-noise-std", "0.5"], "write --network.log-std-init -0.693147, the logarithm of 0.5"),
        (["policy.init_noise_std=1.0"], "write --network.log-std-init 0, the logarithm of 1.0"),
        (["--init-noise-std", "0"], "write --network.log-std-init X, the logarithm of the standard deviation: 0 for 1"),
        (["--init-noise-std"], "write --network.log-std-init X, the logarithm of the standard deviation: 0 for 1"),
        (["policy={init_noise_std: 1.0}"], "--network.recurrent, --network.log-std-init and others shape them"),
        (["--rnn-type", "GRU"], "write --network.recurrent gru"),
        (["rnn_type=lstm"], "write --network.recurrent lstm"),
        (["rnn_hidden_dim=64"], "write --network.recurrent-size 64 beside --network.recurrent"),
        (["activation_fn=nn.ReLU"], "write --network.activation relu"),
        (["--gym-packages", "robots"], "'my_module:MyEnv-v0' in the id's place imports my_module first"),
        (["--reset-num-timesteps"], "a run that is resumed counts on"),
        (["normalize=true"], "write --normalize.observations, --normalize.returns or both"),
    ],
)
def test_what_is_meant_otherwise_is_said_in_a_line(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_request(["CartPole-v1", *words])


@pytest.mark.parametrize("path", SCHEDULED)
def test_what_makes_a_number_fall_is_a_setting(path):
    """What is said of a falling number can be written."""
    setting, value = SCHEDULED[path].split(" lowers ")[0].split(": ")
    assert refused(f"{path}=lin_0.1").endswith(SCHEDULED[path])
    read_request(["CartPole-v1", f"{path}=0.1", f"{setting}={value}"])


def test_an_environments_name_as_a_key_of_a_file_is_said(tmp_path):
    (tmp_path / "zoo.yml").write_text("CartPole-v1:\n  n_envs: 8\n")
    with pytest.raises(ValueError, match=r"CartPole-v1: the environment stands in a key of its own, env: CartPole-v1"):
        read_request([str(tmp_path / "zoo.yml")])


@pytest.mark.parametrize("env", ["CartPole-v1", "HalfCheetah-v5"])
def test_a_file_of_the_zoo_over_the_file_of_the_page_has_what_sb3_would_use(env, tmp_path):
    """A preset doesn't change what the Zoo's file leaves out; the page says so of numbers that don't fall."""
    page = (DOCS / "coming-from" / "sb3.md").read_text()
    block = re.search(r"```yaml\n# sb3\.yaml\n(.+?)```", page, re.DOTALL)
    assert block is not None
    file = block[1].replace("CartPole-v1", env).replace("3.0e-4", "0.001").replace("n_steps: 2048", "n_steps: 32")
    (tmp_path / "zoo.yaml").write_text(file)
    ppo = resolve(read_request([str(tmp_path / "zoo.yaml")]).config).ppo
    assert (ppo.learning_rate, ppo.schedule, ppo.clip_schedule) == (0.001, "constant", "constant")
    assert (ppo.value_clip_range, ppo.value_coef) == (None, 1.0)
    told = page[page.index("A file of the RL Zoo") : page.index("## What is different")]
    assert "`schedule: constant`, because a number without `lin_` doesn't fall" in told


def test_the_size_of_a_memory_gives_none_by_itself(tmp_path):
    """What has memory there says so by its algorithm's name."""
    said = "write --network.recurrent lstm --network.recurrent-size 64"
    with pytest.raises(ValueError, match=f"^--lstm-hidden-size 64: {said}$"):
        read_request(["CartPole-v1", "--lstm-hidden-size", "64"])
    (tmp_path / "a.json").write_text(json.dumps({"env": "CartPole-v1", "lstm_hidden_size": 64}))
    with pytest.raises(ValueError, match=f"lstm_hidden_size 64: {said}$"):
        read_request([str(tmp_path / "a.json")])


@pytest.mark.parametrize(
    "words",
    [
        ["--network.recurrent", "lstm", "--lstm-hidden-size", "64"],
        ["lstm_hidden_size=64", "network.recurrent=lstm"],
        ["--lstm_hidden_size=64", "--network.recurrent=lstm"],
    ],
)
def test_the_size_of_a_memory_is_taken_beside_the_memory(words):
    network = read_request(["CartPole-v1", *words]).config.network
    assert (network.recurrent, network.recurrent_size) == ("lstm", 64)


@pytest.mark.parametrize(
    "settings",
    [
        {"network": {"recurrent": "gru"}, "lstm_hidden_size": 64},
        {"network": {"lstm_hidden_size": 64, "recurrent": "gru"}},
        {"network.recurrent": "gru", "lstm_hidden_size": 64},
    ],
)
def test_the_size_of_a_memory_is_taken_beside_the_memory_of_a_file(settings, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"env": "CartPole-v1", **settings}))
    network = read_request([str(file)]).config.network
    assert (network.recurrent, network.recurrent_size) == ("gru", 64)
    file.write_text(json.dumps({"env": "CartPole-v1", **settings, "network.recurrent_size": 32}))
    with pytest.raises(ValueError, match=r"given together with .*; give one$"):
        read_request([str(file)])

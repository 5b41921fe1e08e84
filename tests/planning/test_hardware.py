"""The table of chips and the devices that ``--on`` names: what is read, and what is refused in one line."""

import json

import pytest

from lockstep.planning.hardware import CASES, TABLE, assumptions, chips, parse_rate, parse_target


@pytest.mark.parametrize(
    ("text", "devices", "per_host", "shape", "platform"),
    [
        ("h100:8", 8, 8, None, "cuda"),
        ("H100:64", 64, 8, None, "cuda"),
        ("l40:3", 3, 3, None, "cuda"),
        ("tpu:v5e:16x16", 256, 8, "v5e:16x16", "tpu"),
        ("tpu:v5p:2x2x2", 8, 4, "v5p:2x2x2", "tpu"),
        ("cpu:3", 3, 3, None, "cpu"),
        ("cpu:2x4", 8, 4, None, "cpu"),
    ],
)
def test_targets_are_read(text, devices, per_host, shape, platform):
    target = parse_target(text)
    assert (target.devices, target.per_host, target.shape, target.platform) == (devices, per_host, shape, platform)


def test_capitals_do_not_matter():
    assert parse_target(" H100:8") == parse_target("h100:8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1000:8", "on: 'h1000' is no chip of the table; did you mean h100? there are h100, h200, a100, l40, tpu:v5e"),
        ("h100", "on: h100: give a number of devices too, such as h100:8"),
        ("h100:0", "on: h100:0: '0' is no number of devices from 1 to 16384, such as h100:8"),
        ("h100:eight", "'eight' is no number of devices"),
        ("h100:12", "on: h100:12: hosts have 8 NVIDIA H100 SXM each; use h100:8 or h100:16"),
        ("tpu:v5e", "on: tpu:v5e: give the slice's topology too, such as tpu:v5e:16x16"),
        ("tpu:v5e:3x5", "on: tpu:v5e:3x5: TPU v5e has no slice 3x5; there are 2x2, 2x4, 4x4"),
        ("tpu:v5p:16x16", "TPU v5p has no slice 16x16; there are 2x2x1"),
        ("cpu:2x0", "on: cpu:2x0: '2x0' is no number of devices"),
        ("gpu:8", "on: 'gpu' is no chip of the table"),
        ("8", "on: '8' is no chip of the table"),
    ],
)
def test_what_is_no_target_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=r"^on: ") as caught:
        parse_target(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_chip_has_sources_and_plausible_numbers():
    for key, chip in chips().items():
        assert chip.sources, key
        assert all(source.startswith("https://") for source in chip.sources), key
        assert 1e10 <= chip.memory <= 1e12, key
        assert chip.memory < chip.memory_rate < 100 * chip.memory, key
        assert chip.peaks["fp32"] < chip.peaks["bf16"], key
        assert chip.network_rate < chip.memory_rate, key
        assert bool(chip.shapes) == (chip.platform == "tpu"), key


def test_what_is_assumed_is_a_range():
    best, likely, worst = (assumptions(case) for case in CASES)
    assert best.compute > likely.compute > worst.compute
    assert best.kernel["torch:cuda"] < likely.kernel["torch:cuda"] < worst.kernel["torch:cuda"]
    assert best.latency["tpu"] < likely.latency["tpu"] < worst.latency["tpu"]


def test_a_peak_of_a_tpu_in_float32_is_a_sixth_of_bfloat16():
    for chip in chips().values():
        if chip.platform == "tpu":
            assert chip.peaks["fp32"] == pytest.approx(chip.peaks["bf16"] / 6, rel=0.01)


def test_the_table_says_what_its_numbers_are():
    table = json.loads(TABLE.read_text())
    assert {"tflops", "link_gbs", "network_gbs", "assumptions"} <= set(table["notes"])


@pytest.mark.parametrize(
    ("target", "devices", "shape"),
    [
        ("tpu:v5e:16x16", 256, "v5e:16x16"),
        ("tpu:v5e:16x16", 8, "v5e:2x4"),
        ("tpu:v5e:16x16", 3, None),
        ("tpu:v5e:16x16", 1, "v5e:2x2"),
        ("h100:8", 8, "1x8x1"),
        ("h100:16", 16, "2x8x1"),
        ("a100:8", 8, None),
        ("cpu:2", 2, None),
    ],
)
def test_the_topology_that_a_compiler_is_asked_for(target, devices, shape):
    assert parse_target(target).shape_of(devices) == shape


def test_rates_are_bytes_a_second():
    assert parse_rate("100Mbit") == 12.5e6
    assert parse_rate("25 Gbit/s") == 3.125e9
    for text in ("fast", "0Mbit", "100MB", "-1Gbit"):
        with pytest.raises(ValueError, match=f"link: '{text}' is no rate"):
            parse_rate(text)

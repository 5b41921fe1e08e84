"""The eight scripts of ``examples/doctor``, each on two ranks: verdict, cause and exit status."""

from pathlib import Path

import pytest
from doctored import doctor
from variants import variants

EXAMPLES = Path(__file__).parents[2] / "examples" / "doctor"
EXPECTED = {
    "correct_ddp": ("IN SYNC", 0, [], ""),
    "fsdp2": ("IN SYNC", 0, ["sharded"], ""),
    "ddp_bypassed": ("NOT IN SYNC", 1, ["gradients"], "methods of the wrapped module"),
    "local_kl_stop": ("NOT IN SYNC", 1, ["steps", "waiting"], "a rank ends its epochs by a value of its own"),
    "same_seed": ("UNDETERMINED", 2, ["identical_data"], "the same seed"),
    "local_normalizer": ("NOT IN SYNC", 1, ["normalizers"], "statistics of its own environments"),
    "adaptive_lr_per_rank": ("NOT IN SYNC", 1, ["learning_rate"], "adapts its learning rate by a value of its own"),
    "sb3_wrapped_in_ddp": ("NOT IN SYNC", 1, ["gradients"], "policy.evaluate_actions"),
}


KEPT = ["correct_ddp", "ddp_bypassed"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The doctor's report on an example, each run once."""
    known = {}

    def find(name):
        if name not in known:
            known[name] = doctor("--nproc", 2, "--", EXAMPLES / f"{name}.py", cwd=tmp_path_factory.mktemp(name))
        return known[name]

    return find


def test_every_example_is_expected():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", variants(EXPECTED, KEPT))
def test_verdict_cause_and_exit_status(report, name):
    verdict, status, kinds, cause = EXPECTED[name]
    found = report(name)
    assert (found.json["verdict"], found.ended.code, found.kinds) == (verdict, status, kinds), found.ended.stdout
    assert cause in found.causes
    assert all(finding["fix"] for finding in found.json["findings"] if finding["level"] == "fault")
    assert found.json["coverage"]["process_group"] == 2


def test_what_a_correct_script_costs_is_told_and_the_report_is_one_screen(report):
    found = report("correct_ddp")
    own, seconds, share = (found.json["overhead"][name] for name in ("own_seconds", "seconds", "share"))
    assert 0 < own < seconds
    assert share == pytest.approx(own / (seconds - own))
    assert "overhead" in found.ended.stdout
    assert all(len(report(name).ended.stdout.splitlines()) < 45 for name in KEPT)
    assert found.json["coverage"]["tensors"] == {
        "parameters": 8, "gradients": 8, "moments": 24, "frozen": 0, "buffers": 0, "normalizers": 0,
    }  # fmt: skip


def test_the_headline_says_step_tensors_and_size(report):
    assert (
        "ranks 0 and 1 differ from optimiser step 1 in 8 of 8 tensors, first body.0.weight, largest relative"
        in (report("ddp_bypassed").json["reason"])
    )


@pytest.mark.long
def test_a_local_stop_is_seen_by_counts_while_parameters_stay_equal(report):
    found = report("local_kl_stop").json
    counts = found["findings"][0]["details"]["steps"]
    assert counts["0"] != counts["1"]
    assert "while their parameters stay equal" in found["reason"]


@pytest.mark.long
def test_the_rank_that_waits_shows_its_stack(report):
    (stack,) = report("local_kl_stop").json["findings"][1]["details"]["stacks"].values()
    assert any("local_kl_stop.py" in line for line in stack)
    assert "backward" in " ".join(stack)


@pytest.mark.long
def test_learning_rates_differ_before_the_parameters_do(report):
    found = report("adaptive_lr_per_rank").json["findings"][0]
    rates = found["details"]["rates"]
    assert rates["0"] != rates["1"]
    assert found["details"]["step"] > 1


@pytest.mark.long
def test_sharded_parameters_are_compared_as_they_were_gathered(report):
    found = report("fsdp2").json
    assert "gathered" in found["reason"]
    assert "not checked" in found["findings"][0]["text"]


@pytest.mark.long
def test_statistics_are_named_by_the_wrapper_that_keeps_them(report):
    assert report("local_normalizer").json["findings"][0]["details"]["tensors"][0].startswith("NormalizeObservation.")

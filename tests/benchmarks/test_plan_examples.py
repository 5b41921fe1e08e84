"""The three plans that are kept, and the page that shows them."""

import json

from benchmarks.plan_examples import EXAMPLES, KEPT, MARK, PAGE, TARGETS, table, text
from lockstep.commands.plan import _read_request


def test_the_page_shows_what_is_kept():
    kept = json.loads(KEPT.read_text())
    page = PAGE.read_text()
    shown = page.partition(f"<!-- {MARK}: begin -->\n")[2].partition(f"<!-- {MARK}: end -->")[0]
    assert shown == text(kept)
    assert list(kept["plans"]) == list(EXAMPLES)


def test_a_row_for_each_number_of_devices_that_is_shown():
    kept = json.loads(KEPT.read_text())
    for found in kept["plans"].values():
        assert [target["target"] for target in found["targets"]] == ["h100:8", "tpu:v5e:16x16"]
        rows = table(found)[2:]
        assert len(rows) == 8
        assert all(row.count("|") == 9 for row in rows)


def test_what_does_not_fit_is_said():
    one = {"devices": 1, "steps_per_second": {"best": 3.0, "likely": 2.0, "worst": 1.0}, "share_of_memory": 2.5}
    one |= {"seconds": {"likely": 1.0}, "efficiency": 1.0, "limited_by": "links"}
    rows = table({"targets": [{"target": "h100:8", "engine": "torch", "predictions": [one]}]})
    assert rows[2] == "| h100:8, engine torch | 1 | doesn't fit, by 2.5 × | 2 | 1 – 3 | 1 s | 100% | links |"


def test_every_example_is_a_request():
    for words in EXAMPLES.values():
        request, _ = _read_request([*words.split(), *TARGETS])
        assert [target.text for target in request.targets] == ["h100:8", "tpu:v5e:16x16"]

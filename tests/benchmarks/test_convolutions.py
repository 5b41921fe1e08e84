"""The report of convolutions counts operations whose bits differ between pools, and hashes what it says it does."""

from benchmarks import convolutions


def test_operations_that_differ_between_pools_are_counted(monkeypatch):
    def child(what, pool, flags):
        assert what == "bits"
        eigens = flags == convolutions.ALL_EIGENS
        return [
            ("a", "same"),
            ("b", f"of {pool}" if eigens else "same"),
            ("c", "cut" if eigens and pool > 2 else "whole"),
        ]

    monkeypatch.setattr(convolutions, "child", child)
    first, second = list(convolutions.bits())[-2:]
    assert first == "| as XLA decides | 3 | 0 |"
    assert second.endswith("| 3 | 2 |")


def test_values_and_gradients_are_told_apart(monkeypatch):
    monkeypatch.setattr(convolutions, "LAYERS", ((5, 4, 3, 2, 1, 0), (5, 3, 4, 2, 1, 0)))
    monkeypatch.setattr(convolutions, "IMAGES", (2,))
    found = dict(convolutions.hashes())
    assert [name.split(", ")[-1] for name in found] == ["value", "by weight", "by image", "value", "by weight"]
    assert len(set(found.values())) == len(found)
    assert dict(convolutions.hashes()) == found

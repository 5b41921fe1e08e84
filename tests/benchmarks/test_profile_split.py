import importlib

import pytest

from benchmarks.profile_split import ENVIRONMENT, GRADIENT, OTHER, PARTS, TIMED, UPDATE, Stopwatch, replace_function

REST = [part for part in PARTS if part not in (GRADIENT, UPDATE, OTHER)]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def run(iterations: int, *others: str) -> Stopwatch:
    """Iterations of 1 s outside everything, 2 s in the update itself, 4 s in the gradient it calls, 0.5 s elsewhere."""
    clock = FakeClock()
    watch = Stopwatch(clock)
    gradient = watch.timed(GRADIENT, lambda: clock.pass_time(4.0))

    def update() -> None:
        clock.pass_time(2.0)
        gradient()

    timed_update = watch.timed(UPDATE, update)
    elsewhere = [watch.timed(part, lambda: clock.pass_time(0.5)) for part in others]
    for _ in range(iterations):
        watch.mark()
        clock.pass_time(1.0)
        timed_update()
        for other in elsewhere:
            other()
    return watch


def test_a_part_counts_for_itself_alone_and_the_rest_is_other():
    split = run(8, *REST).split()
    assert (split[GRADIENT], split[UPDATE], split[OTHER]) == (4.0, 2.0, 1.0)
    assert sum(split.values()) == 7.0 + 0.5 * len(REST)


def test_a_part_that_was_never_entered_is_an_error_not_a_nought():
    with pytest.raises(ValueError, match="no time was counted for environment: "):
        run(8, *(part for part in REST if part != ENVIRONMENT)).split()


def test_too_few_iterations_are_no_split():
    with pytest.raises(ValueError, match="2 iterations are too few"):
        run(2).split()


def test_time_counts_though_a_function_raises():
    clock = FakeClock()
    watch = Stopwatch(clock)

    def fails() -> None:
        clock.pass_time(3.0)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        watch.timed(UPDATE, fails)()
    assert watch.seconds[UPDATE] == 3.0


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, name, _ in TIMED])
def test_every_timed_function_is_there(module, name, monkeypatch):
    if "torch_engine" in module:
        pytest.importorskip("torch")
    owner = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, attribute, owner.__dict__[attribute])  # put back afterwards
    replace_function(module, name, lambda function: "replaced")  # pyright: ignore[reportArgumentType]
    assert owner.__dict__[attribute] == "replaced"


def test_a_function_that_is_gone_is_an_error():
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"lockstep.torch_engine.train has no collect_faster of its own"):
        replace_function("lockstep.torch_engine.train", "collect_faster", lambda function: function)
    with pytest.raises(ValueError, match=r"has no Trainer.no_such of its own"):
        replace_function("lockstep.torch_engine.train", "Trainer.no_such", lambda function: function)

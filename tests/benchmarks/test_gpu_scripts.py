"""What the scripts of the checks on GPUs do beside training."""

import torch

from benchmarks import gpu_checks
from benchmarks.gpu_scripts import bits_by_shards, branches, ranks_of_one_gpu, replayed_steps
from lockstep.torch_engine.setup import accelerator, invariance
from lockstep.torch_engine.setup.accelerator import capture


def test_numbers_of_shards_with_other_bits_are_found():
    def odd_alone(x):
        return (x + 1e-6, x) if len(x) == 1 else (x, x)

    x = torch.ones(3, 2)
    assert list(bits_by_shards.differences(odd_alone, 3, x)) == [(1, [4, 0]), (2, [0, 0]), (3, [0, 0])]
    assert list(bits_by_shards.differences(torch.tanh, 2, x[:2])) == [(1, [0]), (2, [0])]


def test_what_the_self_check_of_a_run_calls_is_looked_at(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(invariance, "shard_invariant", invariance.shard_invariant)  # put back afterwards
    words = ("CartPole-v1", "--nproc", "1", "--num-shards", "2", "--num-envs", "2", "--total-steps", "64", "--quiet")
    assert bits_by_shards.run(list(words)) == 0
    assert not list(tmp_path.glob("runs/*/summary.json"))
    said = [line for line in capsys.readouterr().out.splitlines() if "elements differ" in line]
    assert [line.partition(":")[0] for line in said] == ["output"] * 4 + ["evaluate"] * 2 + ["gradients"] * 2
    assert said[0] == "output: 1 of 2 shards: 0 elements differ"


def test_all_ranks_take_the_first_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr(ranks_of_one_gpu, "take_device", lambda *asked: taken.append(asked))
    for rank in (0, 3):
        ranks_of_one_gpu.take_first("cuda", rank)
    assert taken == [("cuda", 0)] * 2


def test_graphs_and_their_replays_are_counted(monkeypatch):
    done = []
    monkeypatch.setattr(replayed_steps, "original", lambda device, work: work)
    monkeypatch.setattr(replayed_steps, "graphs", 0)
    monkeypatch.setattr(replayed_steps, "replays", 0)
    replay = replayed_steps.counted("cuda", lambda: done.append(1))
    assert (replayed_steps.graphs, replayed_steps.replays) == (1, 0)
    replay()
    replay()
    assert (replayed_steps.graphs, replayed_steps.replays, len(done)) == (1, 2, 2)
    assert replayed_steps.original is not replayed_steps.counted
    assert replayed_steps.captures.capture is capture


def test_forks_are_where_several_branches_begin(monkeypatch):
    monkeypatch.setattr(branches, "original", lambda device, calls: [call() for call in calls])
    monkeypatch.setattr(branches, "forks", 0)
    for count, forks in ((1, 0), (3, 1), (1, 1), (2, 2)):
        assert branches.counted(torch.device("cuda"), [lambda: 1] * count) == [1] * count
        assert branches.forks == forks
    assert gpu_checks.BRANCHES == accelerator.BRANCHES
    assert branches.accelerator._in_branches is not branches.counted

"""Rules of the source that no linter knows, each shown on a counterexample."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "lockstep"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 350
MAX_MODULES = 16
CROWDED = {
    "commands": "one file a command, and what several of them share",
    "torch_engine": "one file for each step of the loop, a twin for each of the other engine; and cloning",
}
MAX_AT_THE_TOP = 6

COLLECTIVES = ("torch.distributed", "torch._C._distributed_c10d", "torch.nn.parallel")
COLLECTIVE_FILES = (
    "torch_engine/distributed/",
    "doctor/watch/torch/process_group.py",  # looks at a script's
)
JAX_COLLECTIVES = (
    *("jax.distributed", "jax.experimental.multihost_utils", "jax.sharding"),
    *("jax.NamedSharding", "jax.make_mesh", "jax.set_mesh"),
)
JAX_COLLECTIVE_FILES = (
    "jax_engine/distributed/active_mesh.py",
    "jax_engine/distributed/mesh.py",
    "jax_engine/distributed/placement.py",
    "jax_engine/distributed/processes.py",
)
EXCHANGES = ("psum", "pmean", "pmax", "pmin", "ppermute", "pshuffle", "all_gather", "all_to_all", "psum_scatter")
EXCHANGE_FILES = (
    "jax_engine/distributed/placement.py",
    "jax_engine/distributed/reductions.py",
    "jax/task.py",  # what a task's hook does unless it is overridden
    "jax/wrappers/batch.py",  # over an axis of the user's own program
)
DEVICE_CALLS = (
    *("torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator", "torch.mtia"),
    *("torch.backends.cuda", "torch.backends.cudnn", "torch.backends.mps"),
    *("torch.Stream", "torch.Event", "torch.get_device_module", "torch.use_deterministic_algorithms"),
)
DEVICE_FILES = (
    "torch_engine/setup/accelerator.py",
    "doctor/watch/torch/hooks.py",  # looks at a script's
    "doctor/watch/torch/values.py",
)
RANKS = ("rank", "local_rank", "global_rank", "node_rank")
# what lockstep.train was given, from this user's own process
HANDED_OVER = ("core/user_code/handed.py", "python/pickled.py")
DOORS = ("engine", "train")  # which the server of ranks loads for itself
# the engines, and what stands on the JAX engine
INSIDE = ("torch_engine/", "jax_engine/", "jax/")
WRITERS = ("runs/", "launch/", "cli.py", "core/topology.py", "integrations/attach/process_group.py")
WRITERS += ("jax_engine/distributed/programs.py",)  # of the cache of compiled programs
UNSAFE_MODULES = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
UNSAFE_BUILTINS = ("eval", "exec", "compile", "__import__")
UNSAFE_CALLS = ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "torch.save", "np.load", "numpy.load")


def imports(node: ast.AST) -> list[str]:
    """What an import statement names, members included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` as it is written; what isn't names and dots alone is the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if isinstance(node, ast.Attribute) and before else ""


def touches_collectives(node: ast.AST) -> bool:
    """Imports ``torch.distributed`` or what builds on it, or reaches for it through ``torch``."""
    return below(dotted(node), COLLECTIVES) or any(below(name, COLLECTIVES) for name in imports(node))


def touches_jax_collectives(node: ast.AST) -> bool:
    """Imports what makes meshes, shardings or groups of JAX processes, or reaches for it through ``jax``."""
    return below(dotted(node), JAX_COLLECTIVES) or any(below(name, JAX_COLLECTIVES) for name in imports(node))


def exchanges_in_a_program(node: ast.AST) -> bool:
    """Calls or imports what exchanges data between devices inside a compiled program: ``lax.psum``."""
    name = dotted(node)
    return any(
        f".{each}".endswith(f".lax.{exchange}") for each in (name, *imports(node)) for exchange in EXCHANGES if each
    )


def calls_a_device(node: ast.AST) -> bool:
    """Calls what is of one kind of device, or of accelerators, or reaches for a kind by its name: ``x.is_cuda``."""
    if isinstance(node, ast.Attribute):
        return below(dotted(node), DEVICE_CALLS) or node.attr in ("is_cuda", "is_xpu", "is_mps")
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        kinds = [side for side in sides if isinstance(side, ast.Constant) and side.value in ("cuda", "xpu", "mps")]
        return bool(kinds) and any(ast.unparse(side).endswith("device.type") for side in sides)
    return any(below(name, DEVICE_CALLS) for name in imports(node))


def asks_for_the_first_rank(node: ast.AST) -> bool:
    """Compares a rank with a constant, or takes its truth: ``rank == 0``, ``0 < rank``, ``not topology.rank``.

    ``0 <= rank < world_size`` asks for no rank in particular.
    """

    def is_rank(part: ast.expr) -> bool:
        name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        return name in RANKS

    def is_constant(part: ast.expr) -> bool:
        return isinstance(part, ast.Constant) or (isinstance(part, (ast.Tuple, ast.List, ast.Set)) and bool(part.elts))

    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(is_rank, sides)) and all(is_rank(side) or is_constant(side) for side in sides)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return is_rank(node.operand)
    tests = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else []
    tests += node.values if isinstance(node, ast.BoolOp) else []
    return any(map(is_rank, tests))


def loads_code(node: ast.AST) -> bool:
    """Uses what executes what it reads: pickle and its kin, ``eval``, an unsafe YAML loader."""
    if any(below(name, UNSAFE_MODULES) for name in imports(node)):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = dotted(node.func)
    allows_pickle = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
    return called in UNSAFE_BUILTINS or called in UNSAFE_CALLS or allows_pickle


def names_a_room_of_an_engine(node: ast.AST) -> bool:
    """Has a string, f-strings included, that names a module of an engine, which then can't be moved, but for a door."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    named = re.fullmatch(r"(?:lockstep\.(?:torch|jax))?_engine\.([\w.]*)", node.value)
    return named is not None and named[1] not in DOORS


def found(rule: Callable[[ast.AST], bool], source: str) -> Iterator[int]:
    """Lines on which a rule finds something."""
    for node in ast.walk(ast.parse(source)):
        if rule(node):
            yield getattr(node, "lineno", 0)


RULES = (
    *(touches_collectives, touches_jax_collectives, exchanges_in_a_program, calls_a_device),
    *(asks_for_the_first_rank, loads_code, names_a_room_of_an_engine),
)


@cache
def findings() -> dict[Callable[[ast.AST], bool], list[tuple[str, int]]]:
    """File and line of everything in the source that a rule finds, of each rule."""
    out: dict[Callable[[ast.AST], bool], list[tuple[str, int]]] = {rule: [] for rule in RULES}
    for file in FILES:
        name = file.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            for rule in RULES:
                if rule(node):
                    out[rule].append((name, getattr(node, "lineno", 0)))
    return out


def offenders(rule: Callable[[ast.AST], bool], allowed: tuple[str, ...] = ()) -> list[str]:
    """``file:line`` of everything in the source that a rule finds outside the files and folders it is allowed in."""
    return [f"{name}:{line}" for name, line in findings()[rule] if not name.startswith(allowed or ("\0",))]


def test_the_source_is_found():
    assert {"cli.py", "train.py", "communicator.py"} <= {file.name for file in FILES}


def test_only_one_room_of_the_engine_touches_torch_distributed():
    assert offenders(touches_collectives, COLLECTIVE_FILES) == []
    assert {line.rpartition("/")[0] for line in offenders(touches_collectives)} == {
        "torch_engine/distributed",
        "doctor/watch/torch",
    }


def test_only_four_modules_touch_jax_distributed_and_shardings():
    assert offenders(touches_jax_collectives, JAX_COLLECTIVE_FILES) == []
    assert len({line.partition(":")[0] for line in offenders(touches_jax_collectives)}) == 4


def test_only_one_room_of_the_jax_engine_exchanges_data_in_a_program():
    assert offenders(exchanges_in_a_program, EXCHANGE_FILES) == []
    assert {line.partition(":")[0] for line in offenders(exchanges_in_a_program)} == set(EXCHANGE_FILES)


def test_one_file_makes_the_calls_of_a_kind_of_device():
    assert offenders(calls_a_device, DEVICE_FILES) == []
    assert {line.partition(":")[0] for line in offenders(calls_a_device)} == set(DEVICE_FILES)


def test_only_the_writing_side_asks_for_the_first_rank():
    assert offenders(asks_for_the_first_rank, WRITERS) == []
    assert offenders(asks_for_the_first_rank) != []


def test_nothing_that_is_loaded_can_execute():
    assert offenders(loads_code, HANDED_OVER) == []
    assert {line.rpartition(":")[0] for line in offenders(loads_code)} == set(HANDED_OVER)


def test_below_the_engines_they_are_loaded_through_their_doors():
    assert offenders(names_a_room_of_an_engine, INSIDE) == []
    assert offenders(names_a_room_of_an_engine) != []


def too_long(source: Path) -> set[str]:
    """Files with more lines than a file about one thing has."""
    files = {file.relative_to(source).as_posix(): file for file in source.rglob("*.py")}
    return {name for name, file in files.items() if len(file.read_text().splitlines()) > MAX_LINES}


def too_full(source: Path) -> set[str]:
    """Folders with more modules than one looks through; the topmost one is ``.``."""
    counts = Counter(file.parent.relative_to(source).as_posix() for file in source.rglob("*.py") if file.stem[0] != "_")
    top = len(list(source.glob("*.py")))
    return {name for name, count in counts.items() if count > MAX_MODULES} | ({"."} if top > MAX_AT_THE_TOP else set())


def test_files_are_short_and_folders_are_small():
    assert too_long(SOURCE) == set()
    assert too_full(SOURCE) <= set(CROWDED)


def test_long_files_and_full_folders_are_found(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    (tmp_path / "room" / "long.py").write_text("x = 1\n" * MAX_LINES)
    for number in range(1, MAX_MODULES):
        (tmp_path / "room" / f"module_{number}.py").touch()
    for number in range(MAX_AT_THE_TOP):
        (tmp_path / f"module_{number}.py").touch()
    assert (too_long(tmp_path), too_full(tmp_path)) == (set(), set())
    (tmp_path / "room" / "long.py").write_text("x = 1\n" * (MAX_LINES + 1))
    (tmp_path / "room" / "one_more.py").touch()
    assert (too_long(tmp_path), too_full(tmp_path)) == ({"room/long.py"}, {"room"})
    (tmp_path / "__main__.py").touch()
    assert too_full(tmp_path) == {"room", "."}


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        *[(touches_collectives, f"import torch\n{line}") for line in (
            "import torch.distributed as dist",
            "from torch import distributed",
            "from torch.distributed import all_reduce",
            "from torch.nn.parallel import DistributedDataParallel",
            "torch.distributed.barrier()",
        )],
        *[(touches_jax_collectives, f"import jax\n{line}") for line in (
            "from jax import distributed",
            "from jax.sharding import NamedSharding",
            "from jax.experimental import multihost_utils",
            "jax.distributed.initialize()",
            "mesh = jax.make_mesh((2,), ('batch',))",
        )],
        *[(exchanges_in_a_program, f"import jax\n{line}") for line in (
            "total = jax.lax.psum(x, 'batch')",
            "from jax.lax import all_gather",
            "from jax import lax\nlax.psum_scatter(x, axes())",
            "shared = map(lax.pmean, parts)",
        )],
        *[(calls_a_device, f"import torch\n{line}") for line in (
            "torch.cuda.synchronize()",
            "from torch import cuda",
            "import torch.xpu",
            "torch.accelerator.current_stream()",
            "torch.backends.cudnn.benchmark = False",
            "if x.is_cuda: pass",
            "if x.device.type == 'cuda': pass",
        )],
        *[(asks_for_the_first_rank, line) for line in (
            "if rank == 0: save()",
            "writer = topology.rank == 0",
            "if 0 != self.local_rank: pass",
            "if rank in (0, 1): pass",
            "if rank > 0: pass",
            "if not topology.rank: pass",
            "if rank and ready: pass",
            "x = 1 if rank else 2",
        )],
        *[(loads_code, line) for line in (
            "import pickle",
            "from joblib import load",
            "eval(text)",
            "yaml.load(text)",
            "torch.load(path)",
            "reader(path, allow_pickle=True)",
        )],
        *[(names_a_room_of_an_engine, line) for line in (
            "load('lockstep.torch_engine.cloning')",
            "load('lockstep.jax_engine.distributed.mesh')",
            "load(f'lockstep.{name}_engine.state')",
            "load(f'lockstep.torch_engine.{name}')",
        )],
    ],
)  # fmt: skip
def test_the_rules_find_what_they_look_for(rule, source):
    assert list(found(rule, source))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (touches_collectives, "import torch\ntorch.nn.functional.relu(x)"),
        (
            touches_jax_collectives,
            "import jax\njax.lax.psum(x, 'batch')\njax.shard_map(f)\njax.devices()\njax.numpy.sum(x)",
        ),
        (
            exchanges_in_a_program,
            "from jax import lax\nlax.scan(step, x, None, 3)\nlax.axis_size(axes())\nall_gather(x)",
        ),
        (
            calls_a_device,
            "import torch\nif config.device == 'cuda': torch.zeros(1, device=x.device)\nx.device.type == 'cpu'",
        ),
        (asks_for_the_first_rank, "for rank in range(world_size): use(rank)\nif theirs[rank] != ours: fail()"),
        (asks_for_the_first_rank, "if not 0 <= rank < world_size or rank < other: fail()"),
        (asks_for_the_first_rank, "envs = config.num_envs_per_rank or 8\nassert config.num_envs_per_rank != 0"),
        (loads_code, "model.eval()\nre.compile(x)\nyaml.safe_load(text)\nreader(path, allow_pickle=False)"),
        (names_a_room_of_an_engine, "load('lockstep.torch_engine.engine')\nload(f'lockstep.{name}_engine.train')"),
        (names_a_room_of_an_engine, 'def f():\n    """As :func:`lockstep.torch_engine.cloning.train_clone`."""'),
    ],
)
def test_the_rules_leave_the_rest_alone(rule, source):
    assert list(found(rule, source)) == []

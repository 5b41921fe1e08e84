"""Finds or starts the Ray cluster for a run's ranks, and compares what it has with what the run needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import one_line
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import LOOPBACK_ADDRESS, Topology, available_cores, bound_cores
from lockstep.core.user_code.handed import is_handed
from lockstep.launch.world import World, world_of

RAY = "ray"
"""The value of ``RunOptions.launcher`` for Ray."""
ADDRESS = "RAY_ADDRESS"
LOCAL = "local"
NOBODY = "Could not find any running Ray instance"
"""Part of Ray's message if this machine belongs to no cluster."""
STORE_BYTES = 80 << 20
"""Size of the object store of a cluster of our own: Ray's minimum, because only small messages go through it."""
ANSWER_SECONDS = 1.0
FREED_SECONDS = 2.0
"""How long the cluster may take to count the resources of ended ranks as free again."""
_LONGEST_PATH = 40
"""Longest path of the folder of Ray's sockets, whose full names may have 107 characters."""


@dataclass(frozen=True)
class Node:
    """One node of the cluster.

    Attributes:
        name: its id at Ray.
        address: at which others reach it.
        port: at which its raylet listens.
        total: its resources (``CPU``, ``GPU``).
        free: its resources that are free.
    """

    name: str
    address: str
    port: int
    total: Mapping[str, float]
    free: Mapping[str, float]

    def answers(self) -> bool:
        """Tells whether its raylet listens; the cluster itself takes many seconds to notice that one doesn't."""
        return self._error() is None

    def refuses(self) -> bool:
        """Tells whether nothing listens there any more: the host is up, and its raylet is gone.

        A node that doesn't answer may be cut off for a moment, or be a virtual machine that is being moved.
        """
        return isinstance(self._error(), ConnectionRefusedError)

    def _error(self) -> OSError | None:
        try:
            socket.create_connection((self.address, self.port), ANSWER_SECONDS).close()
        except OSError as error:
            return error
        return None


def places(resources: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Returns how many ranks with the same needs fit on nodes with the given resources."""
    return sum(int(min(has.get(name, 0.0) // each for name, each in needs.items())) for has in resources)


def needs_of(config: Config, options: RunOptions) -> dict[str, float]:
    """Returns what a process needs of Ray: a CPU for each of its threads or CPU devices, or its GPUs and one CPU."""
    devices = options.devices or 1
    if config.device != "cpu":
        return {"GPU": float(devices), "CPU": 1.0}
    return {"CPU": float(config.threads if config.engine == "torch" else devices)}


def with_devices(options: RunOptions, config: Config) -> RunOptions:
    """Gives each process of engine jax one device, unless the user asked for a number."""
    if config.engine == "torch" or options.devices is not None or options.simulate_devices is not None:
        return options
    return options.model_copy(update={"devices": 1})


class Cluster:
    """The cluster to which this process is connected, from one of its nodes.

    Args:
        note: a line for the user on how it was found; None if there is nothing to say.
        own: whether it is the run's own, on this machine alone.
    """

    def __init__(self, note: str | None = None, own: bool = False) -> None:
        import ray

        self.note, self.own = note, own
        self.here: str = ray.get_runtime_context().get_node_id()
        self.working_dir: str | None = ray.get_runtime_context().runtime_env.get("working_dir")

    def nodes(self) -> list[Node]:
        """Lists the nodes that the cluster believes alive, this one first."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        found = [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["NodeManagerPort"],
                node["Resources"],
                free.get(node["NodeID"], {}),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(found, key=lambda node: node.name != self.here)

    def silent(self) -> list[str]:
        """Lists the ids of nodes that the cluster believes alive but that don't answer."""
        return [node.name for node in self.nodes() if node.name != self.here and not node.answers()]

    def free_places(self, needs: Mapping[str, float]) -> int:
        """Returns how many ranks fit now on nodes that answer; waits a little for what ended ranks still hold."""
        deadline = time.monotonic() + FREED_SECONDS
        while True:
            nodes = [node for node in self.nodes() if node.name == self.here or node.answers()]
            free = places([node.free for node in nodes], needs)
            if free >= places([node.total for node in nodes], needs) or time.monotonic() > deadline:
                return free
            time.sleep(ANSWER_SECONDS / 10)

    def unasked(self, found: int, needs: Mapping[str, float]) -> int:
        """Limits ``found`` places if no number of ranks was asked for: on an own cluster to as many as without Ray."""
        if not self.own or "GPU" in needs:
            return found
        return min(found, max(1, places([{"CPU": available_cores()}], needs)))

    def world(self, options: RunOptions, config: Config, topology: Topology) -> World:
        """Returns the ranks that a request asks for.

        Raises:
            ValueError: the cluster has too few CPUs or GPUs, or this node has none; or ranks on other nodes would need
                an object that only this one has; one line.
        """
        needs, nodes = needs_of(config, options), self.nodes()
        most, what = places([node.total for node in nodes], needs), "GPU" if "GPU" in needs else "CPU"
        here = places([nodes[0].total], needs)
        if here == 0:
            raise ValueError(
                f"launcher: ray: rank 0 writes the run, so it starts on the node of this command ({nodes[0].address}), "
                f"which has {nodes[0].total.get(what, 0):g} of Ray's {what}s, and a rank needs {needs[what]:g}; start "
                "it on another node"
            )
        world = world_of(options, config, topology, self.unasked(most, needs))
        if world.processes > most:
            has = sum(node.total.get(what, 0) for node in nodes)
            raise ValueError(
                f"nproc: {world.processes} ranks need {world.processes * needs[what]:g} {what}s, and the Ray cluster "
                f"has {has:g}; use --nproc {most}{'' if self.own else ', or add nodes'}"
            )
        if world.processes > 1 and most > here:
            _check_importable(config)
        return replace(world, processes_here=min(here, world.processes))


def _check_importable(config: Config) -> None:
    """Refuses what was handed to ``lockstep.train`` as an object: only processes on this node can load it."""
    names = {"env.id": config.env.id, "network.custom": config.network.custom, "ppo.loss": config.ppo.loss}
    for key, name in names.items():
        if is_handed(name):
            raise ValueError(
                f"{key}: {name} was handed over as an object, which ranks on other nodes of the Ray cluster can't "
                "load; put it into a module that every node can import, or use --nproc 1"
            )


def check_ray(config: Config, topology: Topology) -> None:
    """Raises a one-line ``ValueError`` if ranks can't be started on Ray, no matter what the cluster has."""
    if topology.launched:
        raise ValueError("launcher: ray, but another launcher started this process as one of its ranks; leave one out")
    if importlib.util.find_spec("ray") is None:
        raise ValueError("launcher: ray needs ray; pip install 'lockstep-rl[ray]'")
    if config.device == "tpu":
        raise ValueError("launcher: ray starts ranks on CPUs and GPUs, and device is tpu; use --launcher local")
    address = os.environ.get(ADDRESS, "")
    if "://" in address:
        raise ValueError(
            f"launcher: ray: {ADDRESS} is {address}, and this command must run on a node of the cluster: "
            "submit it with `ray job submit`, or unset it there"
        )


@contextlib.contextmanager
def connected() -> Iterator[Cluster]:
    """Connects to the cluster at ``RAY_ADDRESS``, or to this machine's, or to one that it starts and ends itself.

    Raises:
        ValueError: there is no cluster at that address, or this machine's can't be joined; one line.
    """
    import ray
    import ray._private.worker as worker

    worker.print_to_stdstream = lambda *_, **__: None  # silences notes of raylets; what matters is said here
    before = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        address, note = os.environ.get(ADDRESS) or None, None
        own = address == LOCAL
        try:
            if own:
                _start_own(stack, quiet)
            else:
                ray.init(address="auto", **quiet)
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            if address is not None or NOBODY not in str(error):
                raise ValueError(_not_joined(address, error)) from None
            _start_own(stack, quiet)
            own = True
            note = (
                f"launcher ray: this machine belongs to no cluster; one of its own has its {bound_cores()} cores "
                "alone, and ends with the run"
            )
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray's handler would exit with another code
        yield Cluster(note, own)


def _not_joined(address: str | None, error: Exception) -> str:
    """Says why the cluster can't be joined; ``address`` is what the user gave."""
    why = one_line(f"{error}{'' if error.__cause__ is None else f': {error.__cause__}'}")
    if address == LOCAL:
        return f"launcher: ray: no cluster can be started here: {why[:200]}"
    if address is not None:
        return f"launcher: ray: there is no cluster at {ADDRESS} {address}: {why[:200]}"
    return (
        f"launcher: ray: the cluster of this machine can't be joined: {why[:200]}; {ADDRESS}={LOCAL} starts one of the "
        "run's own, and `ray stop` lets Ray forget one that is gone"
    )


def _start_own(stack: contextlib.ExitStack, quiet: Mapping[str, Any]) -> None:
    """Starts a cluster of this machine alone, which listens on loopback and ends with this process."""
    import ray
    from ray._private import ray_constants

    ray.shutdown()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray_constants.ENABLE_RAY_CLUSTER = False  # as on macOS: loopback instead of this machine's address
    directory: Path = stack.enter_context(temporary_directory())
    stack.callback(ray.shutdown)
    ray.init(
        address=LOCAL,
        num_cpus=bound_cores(),  # a container's limit makes ranks slow, not wrong
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        _node_ip_address=LOOPBACK_ADDRESS,
        _temp_dir=str(directory) if len(str(directory)) <= _LONGEST_PATH else None,
        **quiet,
    )

"""Starts and watches ranks on a Ray cluster, as :class:`~lockstep.launch.spawn.RankServer` does on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.core.done import DoneFile
from lockstep.core.errors import RunError
from lockstep.core.process import ERROR_PREFIX, failure_in, say
from lockstep.core.topology import LAUNCHER_VARIABLE, LOOPBACK_ADDRESS
from lockstep.launch.native_errors import NativeErrors
from lockstep.launch.rank import Assignment
from lockstep.launch.ray.actor import Place, RankActor, Told
from lockstep.launch.ray.cluster import Cluster, Node, needs_of, places
from lockstep.launch.world import available_processes

PLACES_SECONDS = 60.0
"""How long ranks wait for places that others occupy."""
START_SECONDS = 120.0
POLL_SECONDS = 0.1
SILENT_SECONDS = 1.0
"""Seconds without an answer after which an actor's node is checked."""
END_SECONDS = 5.0
KILLED = -signal.SIGKILL


def order_of(found: Sequence[Place], here: str) -> list[int]:
    """Returns the actors' indices in the order of their ranks: those on this node first, then node by node."""
    nodes = [here, *dict.fromkeys(place.node for place in found if place.node != here)]
    return sorted(range(len(found)), key=lambda actor: (nodes.index(found[actor].node), actor))


def gpus_of(ranks: Sequence[Place], node: str) -> str | None:
    """Returns ``CUDA_VISIBLE_DEVICES`` for every rank on a node; None without GPUs.

    It names all GPUs that Ray gave to the run there, and the i-th rank uses the i-th share: NCCL and
    ``cuda:{local_rank}`` need to see the other ranks' GPUs too.
    """
    gpus = {gpu for place in ranks if place.node == node for gpu in place.gpus}
    by_number = sorted(gpus, key=lambda gpu: (not gpu.isdecimal(), int(gpu) if gpu.isdecimal() else 0, gpu))
    return ",".join(by_number) or None


def variables_of(ranks: Sequence[Place], master: tuple[str, int]) -> list[dict[str, str]]:
    """Returns each rank's variables, given the ranks' places in order and the address and port where they meet."""
    found = []
    for rank, place in enumerate(ranks):
        local = [other for other, theirs in enumerate(ranks) if theirs.node == place.node]
        own = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": local.index(rank), "LOCAL_WORLD_SIZE": len(local)}
        own |= {"MASTER_ADDR": master[0], "MASTER_PORT": master[1], LAUNCHER_VARIABLE: 1}
        gpus = gpus_of(ranks, place.node)
        seen = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        found.append({name: str(value) for name, value in own.items()} | seen)
    return found


class RayServer:
    """Starts ranks as actors in a placement group.

    Args:
        cluster: to start them on.
        config: of the run; with ``options``, it decides what each rank needs of Ray.
        options: of the run.
    """

    def __init__(self, cluster: Cluster, config: Config, options: RunOptions) -> None:
        self._cluster, self._config, self._options = cluster, config, options
        self._needs = needs_of(config, options)
        self._began_with = dict(os.environ)
        self._group: Any = None
        self._actors: list[Any] = []
        self.closed = False

    def another(self) -> RayServer:
        """Makes a server to replace this one."""
        return RayServer(self._cluster, self._config, self._options)

    def places(self) -> int:
        """Returns how many ranks there are places for now, up to the number of shards."""
        free = self._cluster.free_places(self._needs)
        return available_processes(self._config, self._cluster.unasked(free, self._needs))

    def check(self, module: str, function: str, **arguments: Any) -> bool:
        """Returns False: there is no other process in which the environment could be checked."""
        return False

    def start(
        self, nproc: int, log_dir: Path, *, assignment: str | None = None, environment: Mapping[str, str] | None = None
    ) -> RayRanks:
        """Starts ranks, which meet at rank 0's node; failing ones leave their messages in ``log_dir``.

        Raises:
            RunError: there are no places, or an actor can't be started; one line.
        """
        from ray.exceptions import RayError

        assert assignment is not None
        try:
            self._make_group(nproc)
            found = self._ask([actor.place.remote() for actor in self._actors])
            order = order_of(found, self._cluster.here)
            actors, ranks = [self._actors[n] for n in order], [found[n] for n in order]
            address = LOOPBACK_ADDRESS if len({place.node for place in ranks}) == 1 else ranks[0].address
            (port,) = self._ask([actors[0].free_port.remote(address)])
            elsewhere = replace(Assignment.from_json(assignment), resume_from=None, states=None).to_json()
            changed = {name: value for name, value in os.environ.items() if self._began_with.get(name) != value}
            asked = []
            for actor, place, own in zip(actors, ranks, variables_of(ranks, (address, port)), strict=True):
                here = place.node == self._cluster.here
                directory = os.getcwd() if here or self._cluster.working_dir is None else None
                variables = {**changed, **(environment or {}), **own}
                words = assignment if here else elsewhere  # other nodes get the state from rank 0, not from this disk
                asked.append(actor.start.remote(words, variables, dict(os.environ) if here else None, directory))
            self._ask(asked)
        except (RayError, TimeoutError) as error:
            self.end_ranks()
            why = " ".join(str(error).strip().splitlines()[-1:]) or type(error).__name__
            raise RunError(f"ranks can't be started on the Ray cluster: {why}") from None
        nodes = {node.name: node for node in self._cluster.nodes()}
        return RayRanks(self, actors, [nodes.get(place.node) for place in ranks], ranks, log_dir)

    def _ask(self, references: list[Any]) -> list[Any]:
        import ray

        return ray.get(references, timeout=START_SECONDS)

    def _make_group(self, nproc: int) -> None:
        """Reserves a place for every rank, the first on this node, and starts the ranks' actors there."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        silent = self._cluster.silent()
        others = {"ray.io/node-id": f"!in({','.join(silent)})"} if silent else {}
        selector = [{"ray.io/node-id": self._cluster.here}, *[others] * (nproc - 1)]
        self._group = placement_group([self._needs] * nproc, strategy="PACK", bundle_label_selector=selector)
        if not self._group.wait(PLACES_SECONDS):
            self.end_ranks()
            nodes = self._cluster.nodes()
            free, here = places([node.free for node in nodes], self._needs), places([nodes[0].free], self._needs)
            where = "" if here else f"; rank 0 needs one on this command's node ({nodes[0].address})"
            raise RunError(
                f"{nproc} ranks found no places on the Ray cluster in {PLACES_SECONDS:g} s: it has {free} free{where}"
            )
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0), "max_restarts": 0}
        for bundle in range(nproc):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            self._actors.append(ray.remote(RankActor).options(scheduling_strategy=strategy, **options).remote())

    def end_ranks(self) -> bool:
        """Ends every rank and its actor, and removes the placement group; returns whether others can be started."""
        import ray
        from ray.exceptions import RayError
        from ray.util.placement_group import remove_placement_group

        if self.closed:
            return False
        with contextlib.suppress(RayError):
            ending = [actor.end.remote() for actor in self._actors]
            if ending:
                ray.wait(ending, num_returns=len(ending), timeout=END_SECONDS if not self._cluster.silent() else 1.0)
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
            self._group = None
        return True

    def close(self) -> None:
        """Ends every rank; the cluster stays."""
        self.end_ranks()
        self.closed = True

    def __enter__(self) -> RayServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayRanks:
    """The ranks of a run on a cluster.

    :meth:`send` and :meth:`kill`, which signal handlers call, take effect at the next :meth:`exit_codes`.
    """

    def __init__(
        self, server: RayServer, actors: list[Any], nodes: list[Node | None], ranks: list[Place], log_dir: Path
    ) -> None:
        self._server, self._actors, self._nodes, self._ranks, self._log_dir = server, actors, nodes, ranks, log_dir
        self._codes: dict[int, int] = {}
        self._asked: dict[int, tuple[Any, float]] = {}
        self._last = dict.fromkeys(range(len(actors)), 0.0)
        self._signals: list[int] = []
        self._kill = False
        self._errors = NativeErrors()
        self._native = [self._errors.pipe(rank) for rank in range(len(actors))]
        self._done = [DoneFile(self.message_file(rank)) for rank in range(len(actors))]

    def exit_codes(self) -> dict[int, int | None]:
        """Returns ranks' exit codes in the order of their ends: None while a rank runs, ``-n`` for signal ``n``."""
        self._obey()
        now, running = time.monotonic(), [rank for rank in range(len(self._actors)) if rank not in self._codes]
        for rank in running:
            if rank not in self._asked and now - self._last[rank] >= POLL_SECONDS:
                self._asked[rank] = self._actors[rank].poll.remote(), now
                self._last[rank] = now
        for rank, told in self._answers():
            if told is None:
                self._lost(rank)
            else:
                self._take(rank, told)
        for rank, (_, since) in list(self._asked.items()):
            node = self._nodes[rank]
            if now - since > SILENT_SECONDS and node is not None and node.refuses():
                self._lost(rank)
        self._errors.read(self._errors.descriptors)
        self._errors.pass_on()
        return {**self._codes, **{rank: None for rank in running if rank not in self._codes}}

    def _answers(self) -> list[tuple[int, Told | None]]:
        """Returns the ranks whose actors have answered a poll, with their answers; None if an actor is gone."""
        import ray
        from ray.exceptions import RayError

        if not self._asked:
            return []
        ranks = {reference: rank for rank, (reference, _) in self._asked.items()}
        ready, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
        found: list[tuple[int, Told | None]] = []
        for reference in ready:
            del self._asked[ranks[reference]]
            try:
                found.append((ranks[reference], ray.get(reference)))
            except RayError:
                found.append((ranks[reference], None))
        return found

    def _take(self, rank: int, told: Told) -> None:
        """Passes on what a rank has written, and notes how it ended."""
        for stream, text in ((sys.stdout, told.stdout), (sys.stderr, told.stderr)):
            if text:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
                    os.write(stream.fileno(), text)
        self._take_native(rank, told.native)
        if told.code is None:
            return
        self._codes[rank] = told.code
        self._errors.read(self._errors.descriptors)
        self._errors.ended(rank, told.code)
        if told.message is not None:
            self._leave(rank, told.message)
        if told.done:
            self._done[rank].tell(told.done)

    def _leave(self, rank: int, content: str) -> None:
        """Writes a rank's message where the launcher reads it; prints it if that directory was removed."""
        try:
            Path(self.message_file(rank)).write_text(content)
        except OSError:
            if (failure := failure_in(content)) is not None:
                say(f"{ERROR_PREFIX}{failure[0]}")

    def _take_native(self, rank: int, text: bytes) -> None:
        """Feeds what a rank's libraries have written through its pipe, even if it is more than a pipe holds."""
        os.set_blocking(self._native[rank], False)
        while text:
            with contextlib.suppress(BlockingIOError):
                text = text[os.write(self._native[rank], text) :]
            self._errors.read(self._errors.descriptors)

    def _lost(self, rank: int) -> None:
        """Notes a rank whose actor is gone as killed."""
        node, address = self._nodes[rank], self._ranks[rank].address
        gone = node is None or not node.answers()
        how = f"was lost with its Ray node {address}" if gone else f"was lost with its Ray actor on {address}"
        text = {"message": f"rank {rank} {how}", "extraInfo": {"secondary": False}}
        self._leave(rank, json.dumps({"message": text}))
        self._asked.pop(rank, None)
        self._codes[rank] = KILLED
        self._errors.ended(rank, KILLED)

    def _obey(self) -> None:
        """Sends the signals and kills that were asked for since the last call."""
        while self._signals:
            number = self._signals.pop(0)
            for rank, actor in enumerate(self._actors):
                if rank not in self._codes:
                    actor.send.remote(number)
        if self._kill:
            self._server.end_ranks()
            for rank in range(len(self._actors)):
                self._codes.setdefault(rank, KILLED)
            self._asked.clear()

    def message_file(self, rank: int) -> str:
        """Returns the file in which a failing rank's message is left."""
        return str(self._log_dir / f"rank_{rank}.json")

    def send(self, number: int) -> None:
        """Sends a signal to every running rank at the next :meth:`exit_codes`."""
        self._signals.append(number)

    def kill(self) -> None:
        """Ends every rank at the next :meth:`exit_codes`, or with the server."""
        self._kill = True

    def end(self) -> None:
        """Ends every rank, and everything that it has started; the server can start others."""
        for descriptor in self._native:
            os.close(descriptor)
        self._native.clear()
        self._errors.close()
        for file in self._done:
            file.close()
        self._server.end_ranks()

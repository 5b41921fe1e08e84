"""The few collectives that a run needs, through shared memory or PyTorch's process group."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import __version__
from lockstep.config.run import Config
from lockstep.core.errors import NoSharedMemoryError, PeerFailureError, one_line
from lockstep.core.life import life
from lockstep.core.machine import check_facts_alike
from lockstep.core.shards import ShardPlan
from lockstep.core.silence import Watch, sign_name, watch
from lockstep.core.topology import Topology
from lockstep.core.tree import Tree, tree_of
from lockstep.torch_engine.distributed import ordered
from lockstep.torch_engine.distributed.ordered import Traffic
from lockstep.torch_engine.distributed.process_group import (
    WITHOUT_LIMIT,
    join_process_group,
    leave,
    meet,
    needs_backend,
)
from lockstep.torch_engine.distributed.shared_memory import SharedSlots, inherited_slots, open_shared_slots
from lockstep.torch_engine.setup import accelerator
from lockstep.torch_engine.setup.devices import machine_facts
from lockstep.training.reference_policy import config_facts

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.sharded import ShardedAdam, ShardedParameters
    from lockstep.torch_engine.nets.parameters import FlatParameters


class Communicator:
    """Makes the collectives of one rank; every float that meets another shard's passes through here.

    A user's script has no plan. Tensors on an accelerator travel by ``own_backend``, or else through the host.
    ``group`` is a group of all ranks; None: the process group's default.

    Attributes:
        durations: seconds of each collective since the last :meth:`take_durations`.
        traffic: bytes that this rank has sent and received in collectives; ``calls`` is their number.
        waits: whether a collective waits for the accelerator before and after, so that it can be measured.
        sums: how the largest sum travelled: by ``gather``, ``slices`` or the backend's ``all-reduce``; None: none did.
        slots: shared memory for tensors on the CPU; ``no_slots`` says why there is none, once looked for.
    """

    def __init__(
        self,
        topology: Topology,
        plan: ShardPlan | None,
        device: torch.device,
        own_backend: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.topology, self.plan, self.device, self.group = topology, plan, device, group
        self.own_backend, self.waits = own_backend, True
        self.durations: list[float] = []
        self.traffic = Traffic(0, 0)
        self.calls = 0
        self.sums: str | None = None
        self.slots: SharedSlots | None = None
        self.no_slots: str | None = None
        self._watch: Watch | None = None
        self._store: Any = None

    def join(self, config: Config) -> None:
        """Joins the other ranks: through memory from the launcher if that is enough, else through a backend.

        From here on no rank waits longer than the config allows while no rank makes progress.

        Raises:
            RankMismatchError: if the others don't come; the message is one line.
        """
        if self.alone:
            return
        memory = self.topology.memory
        if memory is not None and config.collectives != "backend":
            self._take(inherited_slots(self.topology.rank, self.topology.world_size, memory, config.silence))
        if self.slots is None or needs_backend(config):
            self._open_backend(config)

    def _open_backend(self, config: Config) -> None:
        """Joins the ranks in PyTorch's process group, without its time limit, because the ranks watch one another."""
        store: Any = meet(self.topology, datetime.timedelta(seconds=config.silence))
        self._store = store

        names = [sign_name(rank) for rank in range(self.topology.world_size)]

        def get() -> dict[int, str]:  # all are set once the ranks have met
            return {rank: text.decode() for rank, text in enumerate(store.multi_get(names))}

        marked = self.own_backend is None  # the host waits for a backend's launches wherever it looks next
        self._watch = watch(self.topology, config.silence, store.set, get, marked)
        with life.waiting():
            own = store.clone()
            own.set_timeout(WITHOUT_LIMIT)  # a backend waits this long for rank 0 in its first collective
            join_process_group(self.topology, self.own_backend, WITHOUT_LIMIT, own)

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.topology.world_size == 1

    def share_memory(self, config: Config) -> None:
        """Exchanges CPU tensors through memory from here on, if all ranks run on this host and the config allows it.

        Raises:
            ValueError: on every rank, if the config demands it and there is none.
        """
        if self.alone or config.collectives == "backend":
            return
        if self.slots is None:
            self.open_slots(datetime.timedelta(seconds=config.silence))
            if self.slots is not None and self._watch is not None:  # ranks see one another without the store
                self._watch.close()
                self._watch = watch(self.topology, config.silence, lambda *_: None, dict, self.own_backend is None)
        if config.collectives == "shared" and self.slots is None:
            raise NoSharedMemoryError(f"collectives: shared can't be had: {self.no_slots}; use collectives auto")

    def open_slots(self, timeout: datetime.timedelta) -> None:
        """Opens memory that all ranks share, or says in ``no_slots`` why there is none."""
        rank, world_size = self.topology.rank, self.topology.world_size
        self._take(open_shared_slots(rank, world_size, self.gather_json, timeout.total_seconds()))

    def _take(self, found: SharedSlots | str) -> None:
        if isinstance(found, SharedSlots):
            self.slots = found
        else:
            self.no_slots = found

    @property
    def transport(self) -> str:
        """The name of how tensors travel between ranks: ``none``, ``shared memory``, ``gloo``, ``nccl`` or ``xccl``."""
        if self.alone:
            return "none"
        if self.own_backend is not None:
            return self.own_backend
        return "gloo" if self.slots is None else "shared memory"

    def close(self) -> None:
        """Leaves the memory that the ranks share, and leaves the store once no rank needs this one's."""
        if self.slots is not None:
            self.slots.close()
        if self._watch is not None:
            self._watch.close()
            if not self._watch.hangs:  # what it waits for holds the store
                leave(self._store, self.topology)

    def _timed(self, moved: Traffic, device: torch.device, operation: Callable[..., Any], *args: Any) -> Any:
        """Runs a collective on tensors of a device, and adds its time and the bytes that it ``moved`` to the totals."""
        life.wait()  # before synchronising, because DDP's and FSDP's collectives may be under way
        if self.waits:
            accelerator.synchronize(device)
        started = time.perf_counter()
        try:
            result = operation(*args)
            if self.waits:
                accelerator.synchronize(device)
        except (PeerFailureError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # a device's own error doesn't mean that peers are gone
        except RuntimeError as error:
            said = one_line(error) if isinstance(error, dist.DistError) else str(error).splitlines()[0]
            raise PeerFailureError(f"rank {self.topology.rank} lost its peers: {said}") from error
        life.go_on()
        self.durations.append(time.perf_counter() - started)
        self.traffic = Traffic(self.traffic.sent + moved.sent, self.traffic.received + moved.received)
        self.calls += 1
        return result

    def _moved(self, x: Tensor) -> Traffic:
        """Returns what a rank sends and receives if every rank gets every rank's tensor."""
        size = x.numel() * x.element_size()
        return Traffic(size, size * (self.topology.world_size - 1))

    def gather_ranks(self, x: Tensor) -> Tensor:
        """Gathers ``[…]`` of every rank, in rank order: ``[world_size, …]``; all shapes must be equal."""
        x = x.contiguous()
        if self.alone:
            return x.unsqueeze(0)
        if not x.is_cpu and self.own_backend is None:
            return self.gather_ranks(x.cpu()).to(x.device)
        if self.slots is not None and x.is_cpu:
            return self._timed(self._moved(x), x.device, self.slots.gather, x)
        return self._timed(self._moved(x), x.device, self._all_gather, x)

    def _all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.topology.world_size, *x.shape))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out.view(-1), x.view(-1), self.group)
        return out

    def gather_shards(self, x: Tensor) -> Tensor:
        """Gathers ``[local shards, …]`` of every rank, in shard order: ``[num_shards, …]``."""
        tree = self._shards
        if tree.even:
            return self.gather_ranks(x).flatten(0, 1)
        short = tree.most_shards - len(x)
        everyone = self.gather_ranks(torch.cat([x, x.new_zeros((short, *x.shape[1:]))]) if short else x)
        return torch.cat([rows[: len(own)] for rows, own in zip(everyone, tree.owned, strict=True)])

    @property
    def _shards(self) -> Tree:
        assert self.plan is not None, "a script has no shards"
        return self.plan.tree

    def sum_shards(self, x: Tensor) -> Tensor:
        """Sums ``[local shards, …]`` over all shards; the same bits for every world size.

        The shards meet in one fixed binary tree in shard order: a rank adds the nodes inside its own range, and the
        ranks finish the tree together; see :mod:`.ordered`. A large sum may be written into the memory of ``x``, whose
        values are lost.
        """
        return self._sum(ordered.own_nodes(x, self._shards, self.topology.rank), self._shards, reused=True)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Sums over ranks by the tree, element by element."""
        return self._sum(x.unsqueeze(0), tree_of(self.topology.world_size, self.topology.world_size))

    def _sum(self, nodes: Tensor, tree: Tree, reused: bool = False) -> Tensor:
        """Sums the nodes ``[k, …]`` of all ranks; if ``reused``, maybe into their memory.

        New memory costs as much as the sum, because the system fills it with zeros, page by page.
        """
        if self.alone:
            return nodes[0]
        if not nodes.is_cpu and self.own_backend is None:
            return self._sum(nodes.cpu(), tree).to(nodes.device)
        flat = nodes if nodes.dim() == 2 else nodes.reshape(len(nodes), nodes[0].numel())
        size = flat.shape[1] * flat.element_size()
        by_slices, moved = tree.sliced(size), ordered.traffic(tree, self.topology.rank, size)
        if self.sums != "slices":
            self.sums = "slices" if by_slices else "gather"
        if self.slots is not None and nodes.is_cpu:
            out = flat[0] if reused else None
            total = self._timed(moved, flat.device, ordered.sum_in_memory, flat, tree, self.slots, out)
        elif by_slices:
            out = flat[0] if reused else flat.new_empty(flat.shape[1])
            total = self._timed(moved, flat.device, ordered.sliced_sum, flat, tree, self.group, out)
        else:
            total = self._timed(moved, flat.device, ordered.gathered_sum, flat, tree, self._all_gather)
        return total if nodes.dim() == 2 else total.view(nodes.shape[1:])

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums over ranks in an order that depends on their number (``fast`` only), maybe into the memory of ``x``.

        Tensors on the CPU of one host are gathered through shared memory and added; others use the backend's
        all-reduce.
        """
        if self.alone:
            return x
        if self.slots is not None and x.is_cpu:
            return self.sum_ranks(x)
        if not x.is_cpu and self.own_backend is None:
            return self.all_reduce(x.cpu()).to(x.device)
        size, ranks, self.sums = x.numel() * x.element_size(), self.topology.world_size, "all-reduce"
        ring = 2 * (ranks - 1) * size // ranks
        self._timed(Traffic(ring, ring), x.device, dist.all_reduce, x, dist.ReduceOp.SUM, self.group)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns the first rank's tensor, in new memory."""
        x = x.contiguous()
        if self.alone:
            return x.clone()
        if self.slots is not None and x.is_cpu:
            return self._timed(self._moved(x), x.device, self.slots.first, x)
        if not x.is_cpu and self.own_backend is None:
            return self.broadcast(x.cpu()).to(x.device)
        out = x.clone()
        self._timed(self._moved(x), x.device, dist.broadcast, out, 0, self.group)
        return out

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gathers a byte string of every rank, in rank order."""
        sizes = self.gather_ranks(torch.tensor([len(payload)], dtype=torch.int64))[:, 0].tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(payload)] = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        rows = self.gather_ranks(padded)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Gathers a JSON value of every rank, in rank order."""
        return [json.loads(raw) for raw in self.gather_bytes(json.dumps(value).encode())]

    def broadcast_bytes(self, payload: bytes) -> bytes:
        """Returns the byte string of the first rank, whatever the others give."""
        words = np.zeros(self.gather_json(len(payload))[0], np.uint8)
        if len(payload) == len(words):
            words[:] = np.frombuffer(payload, np.uint8)
        return self.broadcast(torch.from_numpy(words)).numpy().tobytes()

    def take_durations(self) -> list[float]:
        """Returns the seconds of each collective since the last call; every rank has made the same number."""
        taken, self.durations = self.durations, []
        return taken

    def data_parallel(self, module: nn.Module, find_unused_parameters: bool = False) -> nn.Module:
        """Wraps a module in DDP; returns it as it is for a single rank.

        DDP's all-reduce goes through :meth:`all_reduce`, so that it is measured and, on one host, goes through memory.
        NCCL's own is kept, because it overlaps with the backward pass.
        """
        if self.alone:
            return module
        ids = None if self.device.type == "cpu" else [self.device.index]
        with life.waiting():
            wrapped = DistributedDataParallel(module, device_ids=ids, find_unused_parameters=find_unused_parameters)
        if self.own_backend is None:
            wrapped.register_comm_hook(
                self, lambda communicator, bucket: mean_over_ranks(communicator, bucket.buffer())
            )
        return wrapped

    def shard(
        self, module: nn.Module, parameters: FlatParameters, options: dict[str, Any]
    ) -> tuple[ShardedParameters, ShardedAdam]:
        """Shards a module in place by FSDP2; its collectives go through this object, unless they are NCCL's own.

        The memory of ``parameters``, a whole copy of the module's, is freed. ``options`` are Adam's, by PyTorch's
        names.
        """
        from lockstep.torch_engine.distributed.sharded import ShardedAdam, ShardedParameters  # slow to import

        sharded = ShardedParameters(module, self)
        return sharded, ShardedAdam(sharded, parameters, options)


def mean_over_ranks(communicator: Communicator, gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Averages a bucket of gradients over ranks, as DDP expects of a communication hook."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(communicator.all_reduce(gradients).div_(communicator.topology.world_size))
    return done


def check_ranks_alike(communicator: Communicator, config: Config) -> None:
    """Raises ``RankMismatchError`` on every rank if machines, versions or configs differ."""
    facts = {"lockstep": __version__, **machine_facts(communicator.device), **config_facts(config)}
    check_facts_alike(communicator.gather_json(facts))

"""GroupProbe: what a strategy that measures needs of a group: calls that are timed, and figures that all ranks have."""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zipccl_core.codec.frame import Frame
from zipccl_core.codec.reduction import Reduction
from zipccl_core.collective.all_gather import AllGather
from zipccl_core.collective.all_reduce import AllReduce
from zipccl_core.collective.all_to_all import AllToAll
from zipccl_core.collective.base import Collective
from zipccl_core.collective.broadcast import TreeBroadcast
from zipccl_core.collective.hierarchical import HierarchicalAllGather, place_of
from zipccl_core.collective.memory import SCRATCH, empty
from zipccl_core.collective.reduce_scatter import AllToAllReduceScatter
from zipccl_core.collective.wire import Wire, chunk_tag
from zipccl_core.observe.statistics import Statistics
from zipccl_core.strategy.operation import Operation
from zipccl_core.strategy.switcher import Sampled

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.transport import Transport
    from zipccl_core.strategy.base import Plan

SAMPLE_NUMEL = 64 << 10
_FEWEST_ON_NODES = 4  # two nodes of two
_SAMPLE_ROUNDS = 5


class GroupProbe:
    """A group of CPU ranks, measured. All ranks call `gather`, `broadcast` and `timed` in the same order.

    Args:
        group: a torch group, or a backend; its native operations are called.
        transport: of the same ranks.
        calls: numbers for tags, which the group's calls share.
        name: of the group, for messages.
        ranks_per_node: 0 finds out by itself which ranks share a node.
    """

    def __init__(
        self, group: Any, transport: Transport, calls: Iterator[int], name: str, ranks_per_node: int = 0
    ) -> None:
        self._group, self._transport, self._calls = getattr(group, "plain", group), transport, calls
        self.rank, self.world_size, self.name = transport.rank, transport.world_size, name
        self._ranks_per_node = ranks_per_node
        self._nodes: list[int] | None = None

    def nodes(self) -> list[int]:
        """The node of each rank, numbered; asked of all ranks at the first call."""
        if self._nodes is None:
            names = [values[0] for values in self.gather([self._node()])()]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            self._nodes = [numbers[name] for name in names]
        return self._nodes

    def all_gather(self) -> AllGather:
        """The all-gather for this group's nodes. All ranks must ask for the first one between the same two calls."""
        if self.world_size < _FEWEST_ON_NODES or self._ranks_per_node == 1:
            return AllGather()
        nodes = self.nodes()
        return AllGather() if place_of(self.rank, nodes) is None else HierarchicalAllGather(nodes)

    def _node(self) -> float:
        """Something that names this rank's node: its host, its boot and its network namespace, where there are such."""
        if self._ranks_per_node:
            return float(dist.get_rank() // self._ranks_per_node)
        namespace, boot = Path("/proc/self/ns/net"), Path("/proc/sys/kernel/random/boot_id")
        there = [namespace.readlink() if namespace.exists() else "", boot.read_text() if boot.exists() else ""]
        return float(zlib.crc32(f"{socket.gethostname()} {there}".encode()))

    def gather(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Puts them on their way; the call that comes back waits for all."""
        message = empty(8 * len(values), dtype=torch.uint8, device="cpu")
        message.numpy()[:] = bytearray(struct.pack(f"<{len(values)}d", *values))
        every = empty(self.world_size, 8 * len(values), dtype=torch.uint8, device="cpu")
        every[self.rank].copy_(message)
        tag = chunk_tag(next(self._calls), 0)
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        handles = [self._transport.recv(every[peer], peer, tag) for peer in peers]
        handles += [self._transport.send(message, peer, tag) for peer in peers]

        def finish() -> list[list[float]]:
            for handle in handles:
                handle.wait()
            return [list(struct.unpack(f"<{len(values)}d", row.numpy().tobytes())) for row in every]

        return finish

    def broadcast(self, text: str) -> str:
        """Rank 0's text."""
        data = text.encode() if self.rank == 0 else b""
        nbytes = int(self.gather([float(len(data))])()[0][0])
        if nbytes == 0:
            return ""
        tag = chunk_tag(next(self._calls), 0)
        if self.rank == 0:
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for handle in [self._transport.send(message, peer, tag) for peer in range(1, self.world_size)]:
                handle.wait()
            return text
        into = empty(nbytes, dtype=torch.uint8, device="cpu")
        self._transport.recv(into, 0, tag).wait()
        return into.numpy().tobytes().decode()

    def timed(self, operation: Operation, plans: Sequence[Plan], nbytes: int) -> Callable[[int], list[float]]:
        """Makes normally distributed bfloat16 values; see `Peers`."""
        numel = max(nbytes // 2 // self.world_size, 1) * self.world_size
        values = _normal(numel, self.rank)
        n_outputs = self.world_size if operation == Operation.ALL_GATHER else 1
        output = empty(numel * n_outputs, dtype=values.dtype, device="cpu")

        def seconds(plan: Plan) -> float:
            if operation == Operation.ALL_REDUCE:
                output.copy_(values)  # natively it is in place, and a sum of sums of sums would overflow
            call = (self._native if plan.codec is None else partial(self._ours, plan))(operation, output, values)
            self.gather([])()
            begin = perf_counter()
            call()
            return perf_counter() - begin

        return lambda rounds: [seconds(plan) for plan in list(plans) * rounds]

    def _native(self, operation: Operation, output: Tensor, values: Tensor) -> Callable[[], object]:
        group, part = self._group, output[: values.numel() // self.world_size]
        starts: dict[Operation, Callable[[], Any]] = {
            Operation.ALL_GATHER: lambda: group._allgather_base(output, values, c10d.AllgatherOptions()),
            Operation.REDUCE_SCATTER: lambda: group._reduce_scatter_base(part, values, c10d.ReduceScatterOptions()),
            Operation.ALL_TO_ALL: lambda: group.alltoall_base(output, values, [], [], c10d.AllToAllOptions()),
            Operation.ALL_REDUCE: lambda: group.allreduce([output], c10d.AllreduceOptions()),
            Operation.BROADCAST: lambda: group.broadcast([values], c10d.BroadcastOptions()),
        }
        return lambda: starts[operation]().wait()

    def _ours(self, plan: Plan, operation: Operation, output: Tensor, values: Tensor) -> Callable[[], object]:
        parts, outputs = values.chunk(self.world_size), output.chunk(self.world_size)
        own = outputs[self.rank]
        collective: Collective
        if operation == Operation.ALL_GATHER:
            collective, outs, ins = self.all_gather(), list(outputs), [values]
        elif operation == Operation.REDUCE_SCATTER:
            reduction = Reduction(plan.reduction, False, values.numel(), self.rank * own.numel(), plan.threads)
            collective, outs, ins = AllToAllReduceScatter(reduction), [own], list(parts)
        elif operation == Operation.ALL_TO_ALL:
            collective, outs, ins = AllToAll(), list(outputs), list(parts)
        elif operation == Operation.ALL_REDUCE:
            collective = AllReduce(plan.reduction, False, plan.threads, self.all_gather())
            outs, ins = [output], [values]
        else:
            collective, outs, ins = TreeBroadcast(0), *(([], [values]) if self.rank == 0 else ([values], []))
        assert plan.codec is not None
        wire = Wire(self._transport, Statistics(), operation, plan.codec, next(self._calls))
        return lambda: collective.run(outs, ins, wire, plan)

    def sample(self, plan: Plan, values: Tensor | None) -> Sampled:
        """Encodes and decodes the first values of a tensor, some times; the times are the shortest ones."""
        codec = plan.codec
        assert codec is not None
        # a copy: an asynchronous call before this one may still write there
        part = _normal(SAMPLE_NUMEL, 0) if values is None else values.detach().reshape(-1)[:SAMPLE_NUMEL].clone()
        layout = codec.layout(part.numel(), part.dtype)
        buffer, out = SCRATCH.take(layout.frame_nbytes), part.clone()
        times: list[tuple[float, float]] = []
        for _ in range(_SAMPLE_ROUNDS):
            begin = perf_counter()
            frame: Frame = codec.write(part, buffer)
            middle = perf_counter()
            codec.read(frame, out)
            times.append((middle - begin, perf_counter() - middle))
        nbytes = frame.header.frame_nbytes
        SCRATCH.give(buffer)
        encode_s, decode_s = map(min, zip(*times, strict=True))
        if part.numel() < SAMPLE_NUMEL:
            encode_s = decode_s = 0.0
        return Sampled(float(part.numel() * part.element_size()), float(nbytes), encode_s, decode_s)


def _normal(numel: int, seed: int) -> Tensor:
    """Normally distributed bfloat16 values; `deepspeed.zero.Init` replaces torch.randn and its like."""
    values = empty(numel, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed)).bfloat16()

"""All-gather over nodes of several ranks: compressed between nodes, once for each node, and passed on inside."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from zipccl_core.codec.raw import RawCodec
from zipccl_core.collective.all_gather import AllGather
from zipccl_core.collective.base import DEPTH
from zipccl_core.collective.lanes import run_lanes
from zipccl_core.collective.wire import Arriving, Wire, chunk_tag
from zipccl_core.strategy.base import Plan

if TYPE_CHECKING:
    from torch import Tensor


_RAW = RawCodec()


class Place(NamedTuple):
    """Where a rank is among nodes.

    Attributes:
        near: the other ranks of its node.
        mates: on every other node, the rank that is there what this one is here: first, second, ...
    """

    near: list[int]
    mates: list[int]


def place_of(rank: int, nodes: Sequence[int]) -> Place | None:
    """The place of a rank; None where there is nothing to gain: one node, or nodes that are not of several ranks each,
    and all of as many.

    Args:
        rank: in the group.
        nodes: of each rank, as numbers.
    """
    members: dict[int, list[int]] = {}
    for each, node in enumerate(nodes):
        members.setdefault(node, []).append(each)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    here = members[nodes[rank]]
    at = here.index(rank)
    return Place(
        [other for other in here if other != rank],
        [ranks[at] for node, ranks in members.items() if node != nodes[rank]],
    )


class HierarchicalAllGather(AllGather):
    """A rank sends its frames to its mates only. Whoever receives one from another node passes it on, as it is, to the
    ranks of its own; these also get each other's values, raw. So what a node sends to another passes their link once,
    and not once for every rank there.

    Args:
        nodes: of each rank; `place_of` must find a place among them.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = nodes
        self._numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """One input; one output a rank, of as many values as that rank's input, which ranks may have differently."""
        (values,), rank = inputs, wire.rank
        place = place_of(rank, self.nodes)
        assert place is not None
        if outputs[rank].data_ptr() != values.data_ptr():
            outputs[rank].copy_(values)
        wire.count(self_nbytes=values.numel() * values.element_size())
        jobs = [
            partial(self._send, values, place.mates, plan, wire.lane()),
            partial(self._send, values, place.near, plan, wire.lane(_RAW)),
            *(partial(self._receive, outputs[mate], mate, mate, place.near, plan, wire.lane()) for mate in place.mates),
        ]
        for other in place.near:
            theirs = place_of(other, self.nodes)
            assert theirs is not None
            jobs.append(partial(self._receive, outputs[other], other, other, [], plan, wire.lane(_RAW)))
            for mate in theirs.mates:
                jobs.append(partial(self._receive, outputs[mate], other, mate, [], plan, wire.lane()))
        run_lanes(jobs)

    def _tag(self, wire: Wire, chunk: int, source: int) -> int:
        return chunk_tag(wire.call, chunk * len(self._numbers) + self._numbers[self.nodes[source]])

    def _send(self, values: Tensor, peers: list[int], plan: Plan, lane: Wire) -> None:
        with closing(lane) as wire:
            for chunk, part in enumerate(_parts(values, plan)):
                wire.settle(before_chunk=chunk - DEPTH + 1)
                wire.send(*wire.encode(part), peers, self._tag(wire, chunk, wire.rank), chunk)
            wire.settle()

    def _receive(self, output: Tensor, peer: int, source: int, onward: list[int], plan: Plan, lane: Wire) -> None:
        """Receives a source's frames from a peer, passes them on, and decodes them."""
        parts, posted = _parts(output, plan), deque[Arriving]()
        with closing(lane) as wire:
            for chunk in range(len(parts) + DEPTH):
                if chunk < len(parts):
                    tag = self._tag(wire, chunk, source)
                    posted.append(wire.expect(parts[chunk].numel(), output.dtype, peer, tag))
                done = chunk - DEPTH
                if 0 <= done < len(parts):
                    frame, _ = posted.popleft().wait()
                    if onward:
                        wire.settle(before_chunk=done - DEPTH + 1)
                        wire.send(frame, frame.header, onward, self._tag(wire, done, source), done)
                    wire.decode(frame, parts[done], source)
                    if not onward:
                        wire.release(frame)
            wire.settle()


def _parts(values: Tensor, plan: Plan) -> list[Tensor]:
    return [values[first : first + plan.chunk_numel] for first in range(0, values.numel(), plan.chunk_numel)]

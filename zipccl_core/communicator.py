"""Communicator: strategy, collective, codec and statistics for one group. Every adapter calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zipccl_core.calls import AVG, SUM, Calls, Native
from zipccl_core.codec.reduction import Reduction, premultiplied
from zipccl_core.collective.all_gather import AllGather
from zipccl_core.collective.all_reduce import AllReduce
from zipccl_core.collective.all_to_all import AllToAll
from zipccl_core.collective.base import Collective
from zipccl_core.collective.broadcast import TreeBroadcast
from zipccl_core.collective.memory import cut, empty_flat, require_equal, split_numels, unversioned
from zipccl_core.collective.point_to_point import Recv, Send
from zipccl_core.collective.reduce_scatter import AllToAllReduceScatter
from zipccl_core.collective.transport import COLLECTIVE_TAG
from zipccl_core.collective.wire import Wire
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Work

    from zipccl_core.collective.device.exchange import Exchange, Link


class Communicator(Calls):
    """Collectives of one group, by torch.distributed's names, carried compressed where the configuration says so.

    Ranks (`src`, `dst`) are ranks in the group. Every call returns a `Work` with `async_op=True`, else None once its
    output is there (on a GPU: in the order of the current stream). What has no compressed path (another dtype, a
    reduction other than SUM, AVG and PREMUL_SUM, a group of one, a message between two GPUs) or is not chosen goes to
    `native`.

    Args:
        group: the torch group whose native operations and point-to-point messages are used.
        config: a configuration or a mapping of its keys; by default what the environment says.
        transport: moves the bytes; by default over the group's point-to-point operations.
        name: for messages.
        store: of the group, for a NCCL communicator of ZipCCL's own; by default the one that torch knows.
        devices: devices other than GPUs, by where their tensors lie; for tests.

    A reduction by PREMUL_SUM multiplies, and adds the products. A `native` that is given gets nothing multiplied.
    """

    # ------------------------------------------------------------------ gathers

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, async_op: bool = False, native: Native | None = None
    ) -> Work | None:
        """Gathers `input`, shape (n, ...), of all ranks into `output`, of world_size times its values. The input may be
        this rank's part of the output."""
        native = native or partial(dist.all_gather_single, output, input, group=self.group, async_op=async_op)
        plan = self._plan(Operation.ALL_GATHER, input, input.numel())
        if plan is None:
            return self._native(Operation.ALL_GATHER, native, input)
        require_equal(
            "all_gather_into_tensor: output", output.numel(), "world size times input", self.world_size * input.numel()
        )
        return self._run(
            self._all_gather(input),
            plan,
            [output],
            [input],
            async_op,
            out_sizes=[input.numel()] * self.world_size,
            in_place=[(self.rank, 0)],
        )

    def all_gather(
        self, output_list: Sequence[Tensor], input: Tensor, async_op: bool = False, native: Native | None = None
    ) -> Work | None:
        """Gathers the input of rank `r` into `output_list[r]`. Ranks may contribute different sizes."""
        native = native or partial(dist.all_gather, output_list, input, group=self.group, async_op=async_op)
        plan = self._plan(Operation.ALL_GATHER, input, max((output.numel() for output in output_list), default=0))
        if plan is None:
            return self._native(Operation.ALL_GATHER, native, input)
        require_equal("all_gather: output list", len(output_list), "world size", self.world_size)
        require_equal("all_gather: own output", output_list[self.rank].numel(), "input", input.numel())
        return self._run(self._all_gather(input), plan, output_list, [input], async_op, in_place=[(self.rank, 0)])

    def _all_gather(self, tensor: Tensor) -> AllGather:
        return self._probe.all_gather() if tensor.device.type == "cpu" else AllGather()

    # ------------------------------------------------------------------ all-to-all

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        native: Native | None = None,
    ) -> Work | None:
        """Sends the r-th part of `input` (along its first dimension) to rank r. Splits may be uneven and zero."""
        native = native or partial(
            dist.all_to_all_single, output, input, output_split_sizes, input_split_sizes, self.group, async_op
        )
        # by dtype alone: some ranks may pass split sizes where others pass none, so that no rank knows what all know
        plan = self._plan(Operation.ALL_TO_ALL, input, None)
        if plan is None:
            return self._native(Operation.ALL_TO_ALL, native, input)
        out_sizes, in_sizes = (
            split_numels(output, output_split_sizes, self.world_size, "output"),
            split_numels(input, input_split_sizes, self.world_size, "input"),
        )
        return self._run(AllToAll(), plan, [output], [input], async_op, out_sizes=out_sizes, in_sizes=in_sizes)

    def all_to_all(
        self,
        output_list: Sequence[Tensor],
        input_list: Sequence[Tensor],
        async_op: bool = False,
        native: Native | None = None,
    ) -> Work | None:
        """Sends `input_list[r]` to rank r, which receives it in its `output_list[rank]`."""
        native = native or partial(dist.all_to_all, output_list, input_list, group=self.group, async_op=async_op)
        largest, numel = max(input_list, key=torch.numel), sum(map(torch.numel, input_list))
        plan = self._plan(Operation.ALL_TO_ALL, largest, None, own_numel=numel)
        if plan is None:
            return self._native(Operation.ALL_TO_ALL, native, *input_list)
        require_equal("all_to_all: input list", len(input_list), "world size", self.world_size)
        require_equal("all_to_all: output list", len(output_list), "world size", self.world_size)
        return self._run(AllToAll(), plan, output_list, input_list, async_op)

    # ------------------------------------------------------------------ reductions

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = SUM, async_op: bool = False, native: Native | None = None
    ) -> Work | None:
        """Reduces `input`, of world_size times the values of `output`, and leaves rank r with its r-th part. The output
        may be that part of the input."""
        if native is None:
            (input,), op = premultiplied([input], op)
            native = partial(dist.reduce_scatter_single, output, input, op=op, group=self.group, async_op=async_op)
        plan = self._plan(Operation.REDUCE_SCATTER, input, input.numel(), op)
        if plan is None:
            return self._native(Operation.REDUCE_SCATTER, native, input)
        (input,), op = premultiplied([input], op)
        require_equal(
            "reduce_scatter_tensor: input", input.numel(), "world size times output", self.world_size * output.numel()
        )
        reduction = Reduction(plan.reduction, op == AVG, input.numel(), self.rank * output.numel(), plan.threads)
        in_sizes = [output.numel()] * self.world_size
        return self._run(
            AllToAllReduceScatter(reduction),
            plan,
            [output],
            [input],
            async_op,
            in_sizes=in_sizes,
            in_place=[(0, self.rank)],
        )

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = SUM,
        async_op: bool = False,
        native: Native | None = None,
    ) -> Work | None:
        """Reduces `input_list[r]` of all ranks into rank r's `output`."""
        if native is None:
            input_list, op = premultiplied(input_list, op)
            native = partial(dist.reduce_scatter, output, input_list, op=op, group=self.group, async_op=async_op)
        plan = self._plan(Operation.REDUCE_SCATTER, input_list[0], sum(part.numel() for part in input_list), op)
        if plan is None:
            return self._native(Operation.REDUCE_SCATTER, native, *input_list)
        input_list, op = premultiplied(input_list, op)
        require_equal("reduce_scatter: input list", len(input_list), "world size", self.world_size)
        require_equal("reduce_scatter: own input", input_list[self.rank].numel(), "output", output.numel())
        # gloo reduces each member of the list by a ring of its own
        reduction = Reduction(plan.reduction, op == AVG, output.numel(), 0, plan.threads)
        return self._run(
            AllToAllReduceScatter(reduction), plan, [output], input_list, async_op, in_place=[(0, self.rank)]
        )

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, async_op: bool = False, native: Native | None = None
    ) -> Work | None:
        """Reduces `tensor` in place; all ranks end with equal bits."""
        if native is None:
            _, op = premultiplied([tensor], op, in_place=True)
            native = partial(dist.all_reduce, tensor, op=op, group=self.group, async_op=async_op)
        plan = self._plan(Operation.ALL_REDUCE, tensor, tensor.numel(), op)
        if plan is None:
            return self._native(Operation.ALL_REDUCE, native, tensor)
        _, op = premultiplied([tensor], op, in_place=True)
        collective = AllReduce(plan.reduction, op == AVG, plan.threads, self._all_gather(tensor))
        return self._run(collective, plan, [tensor], [tensor], async_op, in_place=[(0, 0)])

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Any = SUM, async_op: bool = False, native: Native | None = None
    ) -> Work | None:
        """Reduces several tensors in place, as one flat tensor, which is what gloo does."""
        if native is None:
            _, op = premultiplied(tensors, op, in_place=True)
            native = partial(dist.all_reduce_coalesced, tensors, op=op, group=self.group, async_op=async_op)
        plan = None
        if len({tensor.dtype for tensor in tensors}) == 1:
            plan = self._plan(Operation.ALL_REDUCE, tensors[0], sum(tensor.numel() for tensor in tensors), op)
        if plan is None:
            return self._native(Operation.ALL_REDUCE, native, *tensors)
        _, op = premultiplied(tensors, op, in_place=True)
        collective = _FlatAllReduce(AllReduce(plan.reduction, op == AVG, plan.threads, self._all_gather(tensors[0])))
        same = [(i, i) for i in range(len(tensors))]
        return self._run(collective, plan, tensors, tensors, async_op, in_place=same)

    # ------------------------------------------------------------------ broadcast and point to point

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False, native: Native | None = None) -> Work | None:
        """Copies `tensor` of rank `src` of the group to all."""
        native = native or partial(dist.broadcast, tensor, group=self.group, async_op=async_op, group_src=src)
        plan = self._plan(Operation.BROADCAST, tensor, tensor.numel(), has_values=self.rank == src)
        if plan is None:
            return self._native(Operation.BROADCAST, native, tensor)
        own, others = ([tensor], []) if self.rank == src else ([], [tensor])
        return self._run(TreeBroadcast(src), plan, others, own, async_op)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0, native: Native | None = None) -> Work | None:
        """Sends `tensor` to rank `dst` of the group. The receiver needs the same dtype and numel."""
        native = native or partial(dist.isend, tensor, group=self.group, tag=tag, group_dst=dst)
        plan = self._message_plan(tensor, tag)
        if plan is None:
            return self._native(Operation.SEND_RECV, native, tensor)
        with torch.no_grad():
            send = Send(tensor.contiguous().view(-1), dst, tag, self._wire(Operation.SEND_RECV, plan))
        return self._message(tensor, send.finish, is_send=True)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0, native: Native | None = None) -> Work | None:
        """Receives `tensor` from rank `src` of the group, or from any."""
        native = native or partial(dist.irecv, tensor, group=self.group, tag=tag, group_src=src)
        plan = self._message_plan(tensor, tag)
        if plan is None:
            return self._native(Operation.SEND_RECV, native, tensor)
        (target,) = unversioned([tensor])
        flat = target.view(-1) if target.is_contiguous() else empty_flat(target)
        recv = Recv(flat, src, tag, self._wire(Operation.SEND_RECV, plan))

        def finish() -> int:
            source = recv.finish()
            if not target.is_contiguous():
                target.copy_(flat.view(target.shape))
            return source

        return self._message(tensor, finish, is_send=False)

    def _message_plan(self, tensor: Tensor, tag: int) -> Plan | None:
        if tag >= COLLECTIVE_TAG:
            raise ValueError(f"tag {tag} is one of ZipCCL's own; use tags below {COLLECTIVE_TAG}")
        return self._plan(Operation.SEND_RECV, tensor, tensor.numel()) if tensor.numel() else None


class _FlatAllReduce(Collective):
    """An all-reduce of several tensors as if they were one."""

    operation = Operation.ALL_REDUCE
    flattens = True

    def __init__(self, collective: AllReduce) -> None:
        self._collective = collective

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wire: Wire, plan: Plan) -> None:
        """As many outputs as inputs."""
        flat = torch.cat(list(inputs))
        self._collective.run([flat], [flat], wire, plan)
        for output, values in zip(outputs, cut(flat, [output.numel() for output in outputs]), strict=True):
            output.copy_(values)

    def exchanges(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], link: Link, plan: Plan
    ) -> Sequence[Exchange]:
        """One flat output and input."""
        return self._collective.exchanges(outputs, inputs, link, plan)

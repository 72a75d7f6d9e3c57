"""Calls: the way of every call of a group: its plan, then natively or in frames, here or on the worker."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zipccl_core.codec.reduction import REDUCIBLE
from zipccl_core.collective.base import Collective
from zipccl_core.collective.memory import collides, cut, empty_flat, is_plain
from zipccl_core.collective.transport import ProcessGroupTransport
from zipccl_core.collective.wire import Wire
from zipccl_core.collective.work import LazyWork
from zipccl_core.collective.worker import EXIT_PATIENCE_S, Worker
from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import ZipCCLError
from zipccl_core.observe.statistics import Statistics
from zipccl_core.strategy.base import Operation, Plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    from zipccl_core.collective.transport import Transport

logger = logging.getLogger("zipccl")

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
Native = Callable[[], Any]

_REDUCTIONS = (Operation.REDUCE_SCATTER, Operation.ALL_REDUCE)
_MOST_PLANS = 4096
_MOST_OPEN_SENDS = 64


class Calls:
    """The machinery of a `Communicator`, without its operations."""

    def __init__(
        self,
        group: ProcessGroup,
        config: ZipCCLConfig | Mapping[str, Any] | None = None,
        *,
        transport: Transport | None = None,
        name: str = "",
        space: int | None = None,
    ) -> None:
        self.group = group
        self.name = name or str(getattr(group, "group_name", "") or "default")
        self.transport = transport or ProcessGroupTransport(group, self.name, space)
        self.rank, self.world_size = self.transport.rank, self.transport.world_size
        self._statistics = Statistics()
        self._worker = Worker(f"zipccl-{self.name}")
        self._call_numbers = itertools.count(step=2)  # an all-reduce uses two
        self._messages: dict[LazyWork, None] = {}  # those under way
        self._open_sends: dict[LazyWork, None] = {}  # those of them that somebody may still wait for, oldest first
        self._sends = Worker(f"zipccl-sends-{self.name}")
        self._told_about_device = False
        self.configure(ZipCCLConfig.of(config))

    def configure(self, config: ZipCCLConfig) -> None:
        """Changes the configuration; all ranks must do so between the same two calls."""
        self.config = config
        self._plans: dict[tuple[Operation, torch.dtype, int | None], Plan] = {}

    def stats(self) -> Statistics:
        """The counters of this group so far."""
        return self._statistics

    def close(self) -> None:
        """Ends the worker threads after the calls under way."""
        self._worker.stop()
        self._sends.stop(EXIT_PATIENCE_S)
        self.transport.close()

    def _plan(self, operation: Operation, tensor: Tensor, numel: int | None, op: Any = SUM) -> Plan | None:
        """The plan of a compressed call, or None for a native one. All that it looks at is equal on all ranks."""
        if self.world_size == 1 or not self.config.enabled or not is_plain(tensor):
            return None
        # not `op in (SUM, AVG)`, which is always false for the ReduceOp objects that torch passes
        if operation in _REDUCTIONS and not (tensor.dtype in REDUCIBLE and (op == SUM or op == AVG)):  # noqa: SIM109
            return None
        if tensor.device.type != "cpu":
            if not self._told_about_device and self.config.codec.supports(tensor.dtype):
                self._told_about_device = True
                logger.warning(
                    "zipccl: group %r: tensors on %s are sent natively; only CPU tensors are compressed so far",
                    self.name,
                    tensor.device.type,
                )
            return None
        key = (operation, tensor.dtype, numel)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # sizes that change from step to step
                self._plans.clear()
            plan = self._plans[key] = self.config.plan(operation, tensor.dtype, numel, self.world_size)
        return plan if plan.codec is not None else None

    def _native(self, operation: Operation, native: Native, *tensors: Tensor) -> Work | None:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._statistics.add(operation, calls=1, native_calls=1, native_nbytes=nbytes)
        work: Work | None = native()
        return work

    def _wire(self, operation: Operation, plan: Plan, call: int = 0) -> Wire:
        assert plan.codec is not None
        self._statistics.add(operation, calls=1)
        return Wire(self.transport, self._statistics, operation, plan.codec, call)

    def _run(
        self,
        collective: Collective,
        plan: Plan,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        async_op: bool,
        *,
        out_sizes: list[int] | None = None,
        in_sizes: list[int] | None = None,
        in_place: Collection[tuple[int, int]] = (),
    ) -> Work | None:
        """Carries a compressed call out, here or on the worker.

        Sizes cut a single output or input into one part a rank. `in_place` has the pairs of an output and an input part
        that may be the same memory; where they overlap otherwise, the output is built beside and copied, so that the
        whole input has been read before.
        """
        tensors = [*outputs, *inputs]
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"{collective.operation}: dtypes differ: {[str(tensor.dtype) for tensor in tensors]}")
        wire = self._wire(collective.operation, plan, next(self._call_numbers))

        def call() -> None:
            try:
                flat_inputs = [tensor.contiguous().view(-1) for tensor in inputs]
                flat_outputs = [tensor.view(-1) if tensor.is_contiguous() else empty_flat(tensor) for tensor in outputs]
                parts_in = cut(flat_inputs[0], in_sizes) if in_sizes else flat_inputs
                parts_out = cut(flat_outputs[0], out_sizes) if out_sizes else flat_outputs
                if collides(parts_out, parts_in, in_place):
                    flat_outputs = [empty_flat(tensor) for tensor in outputs]
                    parts_out = cut(flat_outputs[0], out_sizes) if out_sizes else flat_outputs
                collective.run(parts_out, parts_in, wire, plan)
                for tensor, flat in zip(outputs, flat_outputs, strict=True):
                    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
                        tensor.copy_(flat.view(tensor.shape))
            except ZipCCLError as error:
                raise type(error)(
                    f"{collective.operation} on rank {self.rank} of group {self.name!r}: {error}"
                ) from error
            finally:
                wire.close()

        if async_op:
            return self._worker.submit(call, list(outputs or inputs))
        self._worker.run(call)
        return None

    def _message(self, tensor: Tensor, finish: Callable[[], int | None], is_send: bool) -> LazyWork:
        """The work of a message that is on its way.

        Its memory is kept until it has left or arrived, even where the caller drops the work. Sends may be dropped for
        good; beyond some of them, the oldest are ended by a thread of their own.
        """
        work = LazyWork([tensor], finish, self._forget)
        self._messages[work] = None
        if is_send:
            self._open_sends[work] = None
            if len(self._open_sends) > _MOST_OPEN_SENDS:
                oldest = next(iter(self._open_sends))
                self._open_sends.pop(oldest, None)
                self._sends.submit(oldest.end, [])
        return work

    def _forget(self, work: LazyWork) -> None:
        self._messages.pop(work, None)
        self._open_sends.pop(work, None)

"""Calls: the way of every call of a group: its plan, then natively or in frames, here or on the worker."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zipccl_core.codec.reduction import REDUCIBLE
from zipccl_core.collective.base import Collective
from zipccl_core.collective.device.exchange import Link
from zipccl_core.collective.device.layer import CudaDevice
from zipccl_core.collective.device.mover import all_agree, mover_of
from zipccl_core.collective.device.path import DeviceCall, DevicePath
from zipccl_core.collective.memory import collides, cut, empty_flat, flat_copy, is_plain, uncopy, unversioned
from zipccl_core.collective.transport import ProcessGroupTransport
from zipccl_core.collective.wire import Wire
from zipccl_core.collective.work import LazyWork
from zipccl_core.collective.worker import EXIT_PATIENCE_S, Worker
from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import ZipCCLError
from zipccl_core.observe.statistics import Statistics
from zipccl_core.plans import Plans
from zipccl_core.probe import GroupProbe
from zipccl_core.strategy.base import Plan
from zipccl_core.strategy.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

    from zipccl_core.collective.device.layer import Device
    from zipccl_core.collective.transport import Transport

logger = logging.getLogger("zipccl")

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
Native = Callable[[], Any]

_ADDITIONS = (SUM, AVG, dist.ReduceOp.PREMUL_SUM)
_REDUCTIONS = (Operation.REDUCE_SCATTER, Operation.ALL_REDUCE)
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
        store: Store | None = None,
        devices: Mapping[torch.device, Device] | None = None,
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
        self._store, self._space = store, getattr(self.transport, "space", 0)
        self._devices = dict(devices or {})
        self._paths: dict[torch.device, DevicePath] = {}
        self._works_on: dict[torch.device, set[Operation]] = {}
        self._begin(ZipCCLConfig.of(config))

    def configure(self, config: ZipCCLConfig) -> None:
        """Changes the configuration; all ranks must do so between the same two calls."""
        self._plans.settle()
        self._begin(config)

    def _begin(self, config: ZipCCLConfig) -> None:
        self.config = config
        self._works_on.clear()
        self._probe = GroupProbe(self.group, self.transport, self._call_numbers, self.name, config.ranks_per_node)
        self._plans = Plans(config, self._probe, self._worker.drain)

    def stats(self) -> Statistics:
        """The counters of this group so far."""
        return self._statistics

    def close(self) -> None:
        """Ends the worker threads after the calls under way."""
        self._worker.stop()
        self._plans.abandon()
        with ExitStack() as stack:
            stack.callback(self.transport.close)
            stack.callback(self._sends.stop, EXIT_PATIENCE_S)
            for path in self._paths.values():
                stack.callback(path.close)

    def abort(self) -> None:
        """Ends what the group does on devices."""
        with ExitStack() as stack:
            for path in self._paths.values():
                stack.callback(path.mover.abort)

    def _plan(
        self,
        operation: Operation,
        tensor: Tensor,
        numel: int | None,
        op: Any = SUM,
        *,
        own_numel: int | None = None,
        has_values: bool = True,
    ) -> Plan | None:
        """The plan of a compressed call, or None for a native one. All that decides is equal on all ranks.

        Args:
            operation: of the call.
            tensor: one of those that this rank contributes.
            numel: of all of them, where every rank contributes as many; else None.
            op: of a reduction.
            own_numel: of all of them, here, where it is not the tensor's.
            has_values: whether the tensor has values before the call.
        """
        if self.world_size == 1 or not self.config.enabled or not is_plain(tensor):
            return None
        # not `op in _ADDITIONS`, which is always false for the ReduceOp objects that torch passes
        if operation in _REDUCTIONS and not (tensor.dtype in REDUCIBLE and any(op == each for each in _ADDITIONS)):
            return None
        where = tensor.device
        on_cpu = where.type == "cpu" and where not in self._devices
        if own_numel is None:
            own_numel = tensor.numel() if numel is None else numel
        plan = self._plans.of(operation, tensor, numel, own_numel, has_values, on_cpu)
        if plan.codec is None:
            return None
        return plan if on_cpu or self._works(where, operation) else None

    def _works(self, where: torch.device, operation: Operation) -> bool:
        """Whether an operation's frames can be made on a device: on all ranks, which ask each other once."""
        device = self._device(where)
        if device is None:
            return False
        if device.capturing():
            _tell_once("zipccl: collectives in a graph that is captured are native: the host has to read sizes")
            return False
        if operation == Operation.SEND_RECV:
            _tell_once("zipccl: messages between two GPUs (send and recv) are native (docs/adr/005)")
            return False
        if where not in self._works_on:
            self._works_on[where] = self._agree(where)
        return operation in self._works_on[where]

    def _agree(self, where: torch.device) -> set[Operation]:
        """The operations that all ranks can compress on a device. As NCCL's first call, it waits for all of them."""
        operations: list[Operation] = list(Operation)
        reasons: dict[Operation, str | None] = {}
        for operation in operations:
            try:
                reasons[operation] = self.config.codec_of(operation).unavailable(where)
            except Exception as error:  # the others wait for an answer
                reasons[operation] = f"{type(error).__name__}: {error}"
        answers = [reasons[operation] is None for operation in operations]
        agreed = all_agree(self.group, where, answers, self._space)
        for operation, all_can in zip(operations, agreed, strict=True):
            if not all_can and operation != Operation.SEND_RECV:
                reason = reasons[operation] or "another rank cannot compress it"
                _tell_once(f"zipccl: {operation} on {where} is native: {reason}")
        if where not in self._paths and any(agreed):
            mover = mover_of(self.group, where, self._store, self._space)
            self._paths[where] = DevicePath(self._devices[where], mover)
        return {operation for operation, all_can in zip(operations, agreed, strict=True) if all_can}

    def _device(self, where: torch.device) -> Device | None:
        device = self._devices.get(where)
        if device is None and where.type == "cuda":
            device = self._devices[where] = CudaDevice(where)
        if device is None and where.type != "cpu":
            _tell_once(f"zipccl: tensors on {where.type} are sent natively; CPUs and CUDA GPUs are supported")
        return device

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
        path = self._paths.get(tensors[0].device)
        if path is not None:
            return self._run_on_device(
                path, collective, plan, outputs, inputs, async_op, wire, out_sizes, in_sizes, in_place
            )

        targets = unversioned(outputs)

        def call() -> None:
            try:
                flat_inputs = [tensor.contiguous().view(-1) for tensor in inputs]
                flat_outputs = [tensor.view(-1) if tensor.is_contiguous() else empty_flat(tensor) for tensor in targets]
                parts_in = cut(flat_inputs[0], in_sizes) if in_sizes else flat_inputs
                parts_out = cut(flat_outputs[0], out_sizes) if out_sizes else flat_outputs
                if collides(parts_out, parts_in, in_place):
                    flat_outputs = [empty_flat(tensor) for tensor in targets]
                    parts_out = cut(flat_outputs[0], out_sizes) if out_sizes else flat_outputs
                collective.run(parts_out, parts_in, wire, plan)
                for tensor, flat in zip(targets, flat_outputs, strict=True):
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

    def _run_on_device(
        self,
        path: DevicePath,
        collective: Collective,
        plan: Plan,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        async_op: bool,
        wire: Wire,
        out_sizes: list[int] | None,
        in_sizes: list[int] | None,
        in_place: Collection[tuple[int, int]],
    ) -> Work | None:
        """The same as steps on the group's communication stream; flat memory that is not the caller's is of that."""
        assert plan.codec is not None
        before: list[Callable[[], None]] = []
        after: list[Callable[[], None]] = []
        targets = unversioned(outputs)
        with path.device.on(path.stream), torch.no_grad():
            if collective.flattens:
                flat_inputs = flat_outputs = [flat_copy(inputs, before)]
                uncopy(flat_outputs[0], targets, after)
            else:
                flat_inputs = [
                    tensor.view(-1) if tensor.is_contiguous() else flat_copy([tensor], before) for tensor in inputs
                ]
                flat_outputs = [tensor.view(-1) if tensor.is_contiguous() else empty_flat(tensor) for tensor in targets]
            parts_in = cut(flat_inputs[0], in_sizes) if in_sizes else flat_inputs
            parts_out = cut(flat_outputs[0], out_sizes) if out_sizes else flat_outputs
            if not collective.flattens and collides(parts_out, parts_in, in_place):
                flat_outputs = [empty_flat(tensor) for tensor in targets]
                parts_out = cut(flat_outputs[0], out_sizes) if out_sizes else flat_outputs
            if not collective.flattens:
                for tensor, flat in zip(targets, flat_outputs, strict=True):
                    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
                        uncopy(flat, [tensor], after)
        link = Link(
            path.device, path.mover, inputs[0].device if inputs else outputs[0].device, plan.codec, plan.dynamic_cap
        )
        call = DeviceCall(
            path,
            lambda: collective.exchanges(parts_out, parts_in, link, plan),
            before,
            after,
            [*outputs, *inputs, *flat_outputs, *flat_inputs],
            wire,
            f"{collective.operation} on rank {self.rank} of group {self.name!r}",
        )
        work = path.run(call, list(outputs or inputs), self._worker, async_op)
        if async_op:
            return work
        work.wait()
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


@functools.cache
def _tell_once(message: str) -> None:
    logger.warning("%s", message)

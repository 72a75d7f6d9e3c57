"""The torch.distributed backend `zipccl`: a ProcessGroup over a Communicator and inner gloo and NCCL groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zipccl_core.agreement import check_agreement
from zipccl_core.arguments import multiplied, options_of, waited
from zipccl_core.collective.work import JoinedWork, completed_work
from zipccl_core.communicator import Communicator
from zipccl_core.compilation import hide_from_compilation
from zipccl_core.config import ZipCCLConfig
from zipccl_core.native_groups import Asked, batch_messages
from zipccl_core.observe.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import Work

logger = logging.getLogger("zipccl")

ENDED = Statistics()
"""What the groups of this process sent that were shut down."""
GLOO, NCCL = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class ZipCCLProcessGroup(dist.ProcessGroup):
    """A group whose collectives go through a `Communicator`; what that leaves native goes to the inner group.

    Every operation that torch calls by its C++ interface is overridden, even where it is only handed on: one that is
    not would run in C++ with the GIL held, and deadlock against gloo's thread. For the same reason nothing calls
    `super()`. Operations have two names, of before and of since torch 2.13; both are here.

    Args:
        store: for the inner groups' rendezvous.
        rank, size: of this process, of the group.
        timeout: of the inner groups' operations.
        config: by default what the environment says.
        name: of the group, for messages.
        asked: the native backends that a program asked for; by default gloo for CPUs, NCCL for GPUs. There is always
            one for CPUs.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        config: ZipCCLConfig | None = None,
        name: str = "",
        asked: Asked | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._plain = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._add_backend(CPU, GLOO, gloo)
        default = GLOO
        on_gpus, options = ("nccl", None) if asked is None else (asked.backends.get("cuda"), asked.options)
        if on_gpus == "gloo":
            self._add_backend(CUDA, GLOO, gloo)
        elif on_gpus == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
            if not isinstance(options, dist.ProcessGroupNCCL.Options):
                options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._add_backend(CUDA, NCCL, dist.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options))
            default = NCCL
        for group in (self._plain, self):
            group._set_default_backend(default)
        self._backend_name = "zipccl" if asked is None else self._plain.name()
        self._coalescing: list[Work] | None = None
        self.is_shut_down = False
        self.communicator = Communicator(self._plain, config, name=name, space=0, store=store)
        check_agreement(store, rank, self.communicator.config.agreement(), name)
        batch_messages()

    def _add_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        # on this group too: functional collectives ask it for its backend
        for group in (self._plain, self):
            group._register_backend(device, kind, backend)

    @property
    def plain(self) -> dist.ProcessGroup:
        """The inner group: gloo and NCCL, nothing compressed."""
        return self._plain

    def stats(self) -> Statistics:
        """The counters of this group so far."""
        return self.communicator.stats()

    # ------------------------------------------------------------------ what has a compressed path

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        output, input = waited([output, input])
        opts = options_of(c10d.AllgatherOptions, opts)
        return self._work(
            [output],
            self.communicator.all_gather_into_tensor(
                output, input, opts.asyncOp, native=lambda: self._plain._allgather_base(output, input, opts)
            ),
        )

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        if isinstance(inputs, torch.Tensor):
            output_lists, inputs = [output_lists], [inputs]
        output_lists, inputs = waited(output_lists), waited(inputs)
        opts = options_of(c10d.AllgatherOptions, opts)
        return self._work(
            output_lists[0],
            self.communicator.all_gather(
                output_lists[0],
                inputs[0],
                opts.asyncOp,
                native=lambda: self._native_all_gather(output_lists, inputs, opts),
            ),
        )

    def _native_all_gather(self, output_lists: Any, inputs: Any, opts: Any) -> Work:
        outputs = output_lists[0]
        if inputs[0].device.type != "cpu" or len({output.numel() for output in outputs}) < 2:
            return self._plain.allgather(output_lists, inputs, opts)
        # gloo gathers equal sizes only
        with torch.no_grad():
            outputs[self.communicator.rank].copy_(inputs[0])
        works = []
        for root, output in enumerate(outputs):
            options = c10d.BroadcastOptions()
            options.rootRank, options.timeout = root, opts.timeout
            works.append(self._plain.broadcast([output], options))
        return JoinedWork(works, outputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._joined(
            self.all_gather_single, zip(outputs, inputs, strict=True), options_of(c10d.AllgatherOptions, opts), outputs
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        output, input = waited([output, input])
        opts = options_of(c10d.ReduceScatterOptions, opts)
        (input,), opts = multiplied([input], opts)
        return self._work(
            [output],
            self.communicator.reduce_scatter_tensor(
                output,
                input,
                opts.reduceOp,
                opts.asyncOp,
                native=lambda: self._plain._reduce_scatter_base(output, input, opts),
            ),
        )

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        if isinstance(outputs, torch.Tensor):
            outputs, input_lists = [outputs], [input_lists]
        outputs, input_lists = waited(outputs), waited(input_lists)
        opts = options_of(c10d.ReduceScatterOptions, opts)
        inputs, opts = multiplied(input_lists[0], opts)
        input_lists = [inputs]
        return self._work(
            outputs,
            self.communicator.reduce_scatter(
                outputs[0],
                input_lists[0],
                opts.reduceOp,
                opts.asyncOp,
                native=lambda: self._plain.reduce_scatter(outputs, input_lists, opts),
            ),
        )

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        inputs, opts = multiplied(waited(inputs), options_of(c10d.ReduceScatterOptions, opts))
        return self._joined(self.reduce_scatter_single, zip(outputs, inputs, strict=True), opts, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        output, input = waited([output, input])
        opts = options_of(c10d.AllToAllOptions, opts)
        return self._work(
            [output],
            self.communicator.all_to_all_single(
                output,
                input,
                output_splits,
                input_splits,
                opts.asyncOp,
                native=lambda: self._plain.alltoall_base(output, input, output_splits, input_splits, opts),
            ),
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        outputs, inputs = waited(outputs), waited(inputs)
        opts = options_of(c10d.AllToAllOptions, opts)
        return self._work(
            outputs,
            self.communicator.all_to_all(
                outputs, inputs, opts.asyncOp, native=lambda: self._plain.alltoall(outputs, inputs, opts)
            ),
        )

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        tensors = waited(tensors)
        opts = options_of(c10d.AllreduceOptions, opts)
        tensors, opts = multiplied(tensors, opts, in_place=True)
        return self._work(
            tensors,
            self.communicator.all_reduce(
                tensors[0], opts.reduceOp, opts.asyncOp, native=lambda: self._plain.allreduce(tensors, opts)
            ),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        tensors = waited(tensors)
        opts = options_of(c10d.AllreduceCoalescedOptions, opts)
        tensors, opts = multiplied(tensors, opts, in_place=True)
        return self._work(
            tensors,
            self.communicator.all_reduce_coalesced(
                tensors, opts.reduceOp, opts.asyncOp, native=lambda: self._plain.allreduce_coalesced(tensors, opts)
            ),
        )

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        tensors = waited(tensors)
        opts = options_of(c10d.BroadcastOptions, opts)
        return self._work(
            tensors,
            self.communicator.broadcast(
                tensors[0], opts.rootRank, opts.asyncOp, native=lambda: self._plain.broadcast(tensors, opts)
            ),
        )

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        tensors = waited(tensors)
        return self._work(
            tensors, self.communicator.isend(tensors[0], dst, tag, native=lambda: self._plain.send(tensors, dst, tag))
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self._work(
            tensors, self.communicator.irecv(tensors[0], src, tag, native=lambda: self._plain.recv(tensors, src, tag))
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        native = lambda: self._plain.recv_anysource(tensors, tag)  # noqa: E731
        return self._work(tensors, self.communicator.irecv(tensors[0], None, tag, native=native))

    def batch_of(self, messages: Sequence[Any]) -> list[Work] | None:
        """The messages of `torch.distributed.batch_isend_irecv` as one native batch; None where they need none."""
        device = messages[0].tensor.device
        if device.type == "cpu" or not self._plain._get_backend(device).supports_coalescing:
            return None
        self._plain._start_coalescing(device)
        for message in messages:
            move = self._plain.send if message.op is dist.isend else self._plain.recv
            move([message.tensor], message.group_peer, message.tag)
        return [self._plain._end_coalescing(device)]

    # the names of before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ what is native always

    def allgather_coalesced(self, *args: Any) -> Work:
        return self._plain.allgather_coalesced(*args)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self._plain.barrier(*args, **kwargs)

    def gather(self, *args: Any) -> Work:
        return self._plain.gather(*args)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        self._plain.monitored_barrier(*args, **kwargs)  # type: ignore[attr-defined]

    def reduce(self, *args: Any) -> Work:
        return self._plain.reduce(*args)

    def scatter(self, *args: Any) -> Work:
        return self._plain.scatter(*args)

    # ------------------------------------------------------------------ coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        """Collects the works up to `_end_coalescing`. Exchanges of frames must not run inside of an NCCL group, so none
        is opened."""
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return JoinedWork(works, [])

    def _joined(self, operation: Callable[..., Work], calls: Any, opts: Any, result: list[Tensor]) -> Work:
        works = [operation(*call, opts) for call in calls]
        return works[0] if len(works) == 1 else JoinedWork(works, result)

    def _work(self, result: Sequence[Tensor], work: Work | None) -> Work:
        work = work if work is not None else completed_work(list(result))
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # ------------------------------------------------------------------ what a group is asked

    def getBackendName(self) -> str:  # which torch's C++ asks; Python asks `name`
        return self._backend_name

    def name(self) -> str:
        return "zipccl"

    def getRank(self) -> int:
        return self.communicator.rank

    def getSize(self) -> int:
        return self.communicator.world_size

    def setGroupName(self, name: str) -> None:
        self._group_name_text = name
        self.communicator.name = name

    def getGroupName(self) -> str:
        return self._group_name_text

    def setGroupDesc(self, description: str) -> None:
        self._group_desc_text = description

    def getGroupDesc(self) -> str:
        return self._group_desc_text

    def get_group_store(self) -> Store:
        return self._store

    def shutdown(self) -> None:
        try:
            self.communicator.close()
        finally:
            if not self.is_shut_down:
                self.is_shut_down = True
                ENDED.merge(self.stats())
            self._plain.shutdown()

    def abort(self) -> None:
        try:
            self.communicator.abort()
        finally:
            self._plain.abort()


hide_from_compilation(*vars(ZipCCLProcessGroup).values())


def create(options: Any, backend_options: Any) -> ZipCCLProcessGroup:
    """What torch.distributed calls for `init_process_group("zipccl")` and `new_group`.

    The configuration is `pg_options` where that is a ZipCCLConfig or a mapping of its keys; else, for a group made
    later, the default group's; else what the environment says.
    """
    config, asked = None, None
    if isinstance(backend_options, Asked):
        asked = backend_options
        own = asked.config is None or isinstance(asked.options, (ZipCCLConfig, Mapping))
        backend_options = asked.options if own else asked.config
    if isinstance(backend_options, (ZipCCLConfig, Mapping)):
        config = ZipCCLConfig.of(backend_options)
    elif isinstance(dist.group.WORLD, ZipCCLProcessGroup):
        config = dist.group.WORLD.communicator.config
    return ZipCCLProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, config, options.group_id, asked
    )

"""Compressed collectives for users who keep their own process group: a communication hook for DDP, communications for
FSDP2.

In a group of the backend `zipccl` neither is needed, nor changes anything: the group compresses by itself.
"""

import atexit
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from zipccl_core.communicator import Communicator
from zipccl_core.compilation import hide_from_compilation
from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import UnsupportedVersionError
from zipccl_core.groups import GroupCommunicators
from zipccl_core.native_groups import backends_of
from zipccl_core.observe.statistics import Statistics
from zipccl_core.process_group import ZipCCLProcessGroup

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError as error:
    raise UnsupportedVersionError(
        f"zipccl supports the FSDP2 of torch 2.13; this is torch {torch.__version__}: {error}"
    ) from error

__all__ = ["CommunicatorState", "CompressedAllGather", "CompressedReduceScatter", "ddp_comm_hook", "stats"]

HOOKS_SPACE = 2
_COMMUNICATORS = GroupCommunicators(HOOKS_SPACE, checks=True)
atexit.register(_COMMUNICATORS.let_go)


def stats() -> Statistics:
    """What the hooks, and groups of the backend `zipccl`, sent in this process so far."""
    return _COMMUNICATORS.stats()


class CommunicatorState:
    """A group and how its calls are compressed: the state of `ddp_comm_hook`.

    Args:
        group: a torch group; None is the default group.
        config: a `ZipCCLConfig` or a mapping of its keys; by default what the environment says. All hooks of a group
            must have the same, on all ranks: another is a ConfigError at the first call.

    A copy, of a copied or pickled model, is for the default group, like the model.

    Raises:
        ConfigError: the configuration cannot be.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, config: ZipCCLConfig | Mapping[str, Any] | None = None
    ) -> None:
        self.group = group
        self.config = ZipCCLConfig.of(config)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}

    def communicator(self, group: dist.ProcessGroup | None = None) -> Communicator | None:
        """That of `group`, else of the state's group; None where calls go to the group itself: it has one rank,
        compresses on its own, or is neither of gloo nor of NCCL."""
        group = group or self.group or dist.group.WORLD
        if group is None or isinstance(group, ZipCCLProcessGroup) or group.size() == 1:
            return None
        if group not in _COMMUNICATORS and not backends_of(dist.get_backend_config(group)):
            return None
        return _COMMUNICATORS.of(group, self.config)


def ddp_comm_hook(
    state: CommunicatorState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket: `model.register_comm_hook(CommunicatorState(), ddp_comm_hook)`.

    The bits are those of DDP without a hook where the additions have its order (`reduction: "gloo"` on gloo): like
    DDP, it multiplies by 1 / world size first, and sums.
    """
    group = state.group or dist.group.WORLD
    gradients = bucket.buffer()
    gradients.mul_(1.0 / dist.get_world_size(group))
    native = partial(dist.all_reduce, gradients, group=group, async_op=True)
    communicator = state.communicator()
    work: Any = native() if communicator is None else communicator.all_reduce(gradients, async_op=True, native=native)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: (done.value(), gradients)[1])
    return future


hide_from_compilation(ddp_comm_hook)


class _FSDPCommunication:
    """What both communications of FSDP2 have."""

    def __init__(self, config: ZipCCLConfig | Mapping[str, Any] | None = None) -> None:
        self._state = CommunicatorState(None, config)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory as torch gives it."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedAllGather(_FSDPCommunication, AllGather):
    """For `FSDPModule.set_custom_all_gather`: gathers parameters compressed, to the same bits.

    Args:
        config: a `ZipCCLConfig` or a mapping of its keys; by default what the environment says.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """As `torch.distributed.all_gather_single`."""
        native = partial(dist.all_gather_single, output_tensor, input_tensor, group, async_op)
        communicator = self._state.communicator(group)
        if communicator is None:
            return cast("dist.Work | None", native())
        return communicator.all_gather_into_tensor(output_tensor, input_tensor, async_op, native)


class CompressedReduceScatter(_FSDPCommunication, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`: reduces gradients compressed.

    Args:
        config: as that of `CompressedAllGather`. `reduction` says in which order is added.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """As `torch.distributed.reduce_scatter_single`."""
        native = partial(dist.reduce_scatter_single, output_tensor, input_tensor, op, group, async_op)
        communicator = self._state.communicator(group)
        if communicator is None:
            return cast("dist.Work | None", native())
        return communicator.reduce_scatter_tensor(output_tensor, input_tensor, op, async_op, native)

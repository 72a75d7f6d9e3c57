"""What torch passes to a group's operations, in the form that a `ZipCCLProcessGroup` works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from zipccl_core.codec.reduction import premultiplied

if TYPE_CHECKING:
    from torch import Tensor


def waited(value: Any) -> Any:
    """Tensors, in lists of any depth, with the results of functional collectives waited for.

    torch's dispatcher would do that, but calls of Python overrides do not pass through it.
    """
    if isinstance(value, AsyncCollectiveTensor):
        return value.wait()
    if isinstance(value, (list, tuple)):
        return [waited(item) for item in value]
    return value


def options_of(kind: Any, opts: Any) -> Any:
    """Options of an operation: as they are, defaults, or made of the ReduceOp or root rank of torch's shorter forms."""
    if isinstance(opts, kind):
        return opts
    options = kind()
    if isinstance(opts, int):
        options.rootRank = opts
    elif opts is not None:
        options.reduceOp = opts
    return options


def multiplied(tensors: Sequence[Tensor], opts: Any, in_place: bool = False) -> tuple[list[Tensor], Any]:
    """The tensors to add and options that say SUM, where the options say PREMUL_SUM; else both as they are."""
    tensors, op = premultiplied(tensors, opts.reduceOp, in_place)
    if op is not ReduceOp.SUM:
        return tensors, opts
    options = type(opts)()
    options.reduceOp, options.asyncOp, options.timeout = op, opts.asyncOp, opts.timeout
    return tensors, options

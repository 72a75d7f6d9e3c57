"""The interface `Strategy`, and what it decides from (`Call`) and on (`Plan`)."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from zipccl_core.codec.base import Codec
from zipccl_core.registry import Registry
from zipccl_core.strategy.operation import Operation
from zipccl_core.strategy.profile import Estimates, Measurements


class Plan(NamedTuple):
    """How one call is carried out.

    Attributes:
        codec: what its frames are; None sends the tensors natively.
        chunk_numel: values in a frame; successive frames overlap encoding, wire and decoding.
        reduction: order of additions: `fp32` or `gloo`.
        dynamic_cap: on a GPU, bytes of a frame's dynamic part, for each value, that its message has room for; None
            sends it at its exact size, in a message of its own.
        codec_threads: those that the codec is configured with, for reductions, too; None is torch's number.
    """

    codec: Codec | None
    chunk_numel: int = 1 << 21
    reduction: str = "fp32"
    dynamic_cap: float | None = None
    codec_threads: int | None = None

    @property
    def threads(self) -> int:
        """Of reductions."""
        return self.codec_threads or torch.get_num_threads()


NATIVE = Plan(None)


class Known(NamedTuple):
    """What all ranks of a group have measured and agreed on, of one operation.

    Attributes:
        measured: what its ways take.
        estimates: of the data and the codec, now.
        typical_nbytes: what a rank has contributed to a call lately, where a call itself does not say (all-to-all).
    """

    measured: Measurements
    estimates: Estimates
    typical_nbytes: float


class Call(NamedTuple):
    """The facts of one call that are equal on every rank of its group, and nothing else.

    Attributes:
        operation: which collective.
        dtype: of the tensors.
        numel: values that one rank contributes (its input); None where ranks may contribute differently
            (all-to-all).
        world_size: of the group.
        compressed: the plan that the configuration gives for a compressed call of this operation.
        known: what has been measured; None where the strategy does not measure, and for messages and GPUs.
    """

    operation: Operation
    dtype: torch.dtype
    numel: int | None
    world_size: int
    compressed: Plan
    known: Known | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes that one rank contributes, where all know."""
        return None if self.numel is None else self.numel * self.dtype.itemsize


class Strategy(BaseModel, ABC):
    """Chooses a plan for a call.

    `choose` must be a pure function of the call: two ranks that choose differently hang the job, so nothing local may
    enter (no timing, no exception, no value of a tensor). A subclass gives its `id` as a `Literal` field with a
    default; defining it registers it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Registers the subclass under its id."""
        super().__pydantic_init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            strategies.register(cls.model_fields["id"].default, cls)

    @abstractmethod
    def choose(self, call: Call) -> Plan:
        """`call.compressed`, a variation of it, or `NATIVE`."""


strategies: Registry[Strategy] = Registry("strategy", "zipccl.strategies")

"""ZipCCLConfig: the whole configuration, one validated and frozen value, with the same keys wherever it is written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

from zipccl_core.codec.base import Codec, codecs
from zipccl_core.codec.exponent import ExponentCodec
from zipccl_core.codec.frame import VERSION
from zipccl_core.codec.raw import RawCodec
from zipccl_core.errors import ConfigError
from zipccl_core.registry import describe
from zipccl_core.strategy.adaptive import AdaptiveStrategy
from zipccl_core.strategy.base import NATIVE, Call, Known, Plan, Strategy, strategies
from zipccl_core.strategy.fixed import AlwaysStrategy, NeverStrategy, ThresholdStrategy
from zipccl_core.strategy.operation import Operation

__all__ = [
    "AdaptiveStrategy",
    "AlwaysStrategy",
    "NeverStrategy",
    "OperationConfig",
    "RawCodec",
    "ThresholdStrategy",
    "ZipCCLConfig",
]

logger = logging.getLogger("zipccl")

ENVIRONMENT_PREFIX = "ZIPCCL_"
_NOT_CONFIGURATION = {"ZIPCCL_NVCC", "ZIPCCL_CACHE_DIR"}  # where kernels are compiled, which is each machine's own

AnyCodec = Annotated[SerializeAsAny[Codec], BeforeValidator(codecs.resolve)]
AnyStrategy = Annotated[SerializeAsAny[Strategy], BeforeValidator(strategies.resolve)]
ChunkNbytes = Annotated[int, Field(ge=2048, le=1 << 30)]


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            raise ConfigError(f"{name}={text!r} is not JSON: {error}") from None
        return text


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shared(item) for key, item in value.items() if key not in ("threads", "kernels")}
    return value


def _known_operations(value: Any) -> Any:
    if isinstance(value, dict):
        for key in value:
            if key not in list(Operation):
                raise ConfigError(f"unknown operation {key!r}; allowed: {', '.join(Operation)}")
    return value


class _Section(BaseModel):
    """A part of the configuration, whose errors name key, value and what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self), "zipccl")) from None


class OperationConfig(_Section):
    """What one operation does differently. Fields that are not given are those of the whole configuration."""

    codec: AnyCodec | None = None
    strategy: AnyStrategy | None = None
    chunk_nbytes: ChunkNbytes | None = None
    reduction: Literal["fp32", "gloo"] | None = None
    dynamic_sizes: Literal["exact", "capped"] | None = None


class ZipCCLConfig(_Section):
    """The configuration of ZipCCL.

    Args:
        enabled: false leaves everything native.
        codec: what tensors become on the wire: an id (`"exponent"`, `"raw"`, one of your own), a mapping with an `id`
            and the codec's fields, or an instance.
        strategy: which way a call goes: `"threshold"` (default, compressed from 64 KiB on), `"adaptive"` (the fastest
            that a measurement finds), `"always"`, `"never"`, a mapping with an `id`, or an instance.
        reduction: order of additions in compressed reduce-scatter and all-reduce. `fp32` adds in rank order in fp32
            and rounds once. `gloo` repeats native gloo's order and roundings, bit for bit.
        chunk_nbytes: bytes of a tensor in one frame, where the adaptive strategy has not chosen. Encoding, wire and
            decoding of successive frames overlap. On a GPU there is nothing to overlap: frames have up to 128 MiB,
            those of all-to-alls more.
        dynamic_sizes: on a GPU, how the part of a frame travels whose size depends on the values. `exact`: in a
            message of its own, of its exact size, which the host reads between the two. `capped`: in one message with
            the rest, which has room for `dynamic_cap` bytes a value; it is decoded without the host, and what did not
            fit follows.
        dynamic_cap: see there. Normally distributed values need 0.03, gradients up to 0.07.
        ranks_per_node: where a group has several ranks on each of several nodes, all-gathers send between nodes once
            for a node, and pass on inside. 0 finds out which ranks share a node, for which the first call waits for all
            ranks; a number says that so many consecutive ranks do; 1 (default) that none do.
        operations: overrides for single operations: `all_gather`, `reduce_scatter`, `all_to_all`, `all_reduce`,
            `broadcast`, `send_recv`.

    Raises:
        ConfigError: an unknown key or a value that is not allowed; the message names key, value and what is allowed.
    """

    enabled: bool = True
    codec: AnyCodec = ExponentCodec()
    strategy: AnyStrategy = ThresholdStrategy()
    reduction: Literal["fp32", "gloo"] = "fp32"
    chunk_nbytes: ChunkNbytes = 4 << 20
    dynamic_sizes: Literal["exact", "capped"] = "exact"
    dynamic_cap: Annotated[float, Field(gt=0, le=2)] = 0.08
    ranks_per_node: Annotated[int, Field(ge=0)] = 1
    operations: Annotated[dict[Operation, OperationConfig], BeforeValidator(_known_operations)] = {}

    @classmethod
    def of(cls, value: ZipCCLConfig | Mapping[str, Any] | None) -> ZipCCLConfig:
        """A configuration from a mapping (a section of a JSON), from the environment for None, or as it is."""
        if isinstance(value, ZipCCLConfig):
            return value
        return cls.from_env() if value is None else cls(**value)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ZipCCLConfig:
        """Reads `ZIPCCL_<FIELD>` for every field: JSON where it is JSON, else a string.

        `ZIPCCL_CODEC=raw`, `ZIPCCL_CODEC='{"id": "exponent", "sigma": 0.02}'`. An unknown variable is logged.

        Raises:
            ConfigError: as the constructor; the message says that it comes from the environment.
        """
        environ = os.environ if environ is None else environ
        given = {name: text for name, text in environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
        given = {name: text for name, text in given.items() if name not in _NOT_CONFIGURATION}
        values = {}
        for field in cls.model_fields:
            name = ENVIRONMENT_PREFIX + field.upper()
            if name in given:
                values[field] = _parse(name, given.pop(name))
        for name in given:
            known = ", ".join(ENVIRONMENT_PREFIX + field.upper() for field in cls.model_fields)
            logger.warning("zipccl: unknown environment variable %s is ignored; known: %s", name, known)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"from the environment ({ENVIRONMENT_PREFIX}*): {error}") from None

    def agreement(self) -> str:
        """What all ranks of a group must have alike, as text: everything but how fast a rank computes."""
        return json.dumps({"wire format": VERSION, **_shared(self.model_dump(mode="json"))}, sort_keys=True)

    def codec_of(self, operation: Operation) -> Codec:
        """The codec of an operation's frames."""
        return self.operations.get(operation, OperationConfig()).codec or self.codec

    def strategy_of(self, operation: Operation) -> Strategy:
        """The strategy of an operation's calls."""
        return self.operations.get(operation, OperationConfig()).strategy or self.strategy

    def call(self, operation: Operation, dtype: Any, numel: int | None, world_size: int) -> Call | None:
        """The facts of a call, with the plan for compressing it; None where the codec does not take its dtype."""
        override, codec = self.operations.get(operation, OperationConfig()), self.codec_of(operation)
        if not codec.supports(dtype):
            return None
        chunk_numel = (override.chunk_nbytes or self.chunk_nbytes) // 2048 * 1024
        capped = (override.dynamic_sizes or self.dynamic_sizes) == "capped"
        compressed = Plan(
            codec,
            chunk_numel,
            override.reduction or self.reduction,
            self.dynamic_cap if capped else None,
            getattr(codec, "threads", None),
        )
        return Call(operation, dtype, numel, world_size, compressed)

    def plan(
        self, operation: Operation, dtype: Any, numel: int | None, world_size: int, known: Known | None = None
    ) -> Plan:
        """The plan for one call, from facts that are equal on all ranks."""
        call = self.call(operation, dtype, numel, world_size)
        return NATIVE if call is None else self.strategy_of(operation).choose(call._replace(known=known))

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

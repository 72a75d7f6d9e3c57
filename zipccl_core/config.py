"""ZipCCLConfig: the whole configuration, one validated and frozen value, with the same keys wherever it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

from zipccl_core.codec.base import Codec, codecs
from zipccl_core.codec.exponent import ExponentCodec
from zipccl_core.codec.raw import RawCodec
from zipccl_core.errors import ConfigError
from zipccl_core.registry import describe
from zipccl_core.strategy.base import NATIVE, Call, Operation, Plan, Strategy, strategies
from zipccl_core.strategy.fixed import AlwaysStrategy, NeverStrategy, ThresholdStrategy

__all__ = ["AlwaysStrategy", "NeverStrategy", "OperationConfig", "RawCodec", "ThresholdStrategy", "ZipCCLConfig"]

ENVIRONMENT_PREFIX = "ZIPCCL_"

AnyCodec = Annotated[SerializeAsAny[Codec], BeforeValidator(codecs.resolve)]
AnyStrategy = Annotated[SerializeAsAny[Strategy], BeforeValidator(strategies.resolve)]
ChunkNbytes = Annotated[int, Field(ge=2048, le=1 << 30)]


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


class ZipCCLConfig(_Section):
    """The configuration of ZipCCL.

    Args:
        enabled: false leaves everything native.
        codec: what tensors become on the wire: an id (`"exponent"`, `"raw"`, one of your own), a mapping with an `id`
            and the codec's fields, or an instance.
        strategy: which calls are compressed: `"threshold"` (default, from 64 KiB on), `"always"`, `"never"`, a
            mapping with an `id`, or an instance.
        reduction: order of additions in compressed reduce-scatter and all-reduce. `fp32` adds in rank order in fp32
            and rounds once. `gloo` repeats native gloo's order and roundings, bit for bit.
        chunk_nbytes: bytes of a tensor in one frame. Encoding, wire and decoding of successive frames overlap.
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
    operations: dict[Operation, OperationConfig] = {}

    @classmethod
    def of(cls, value: ZipCCLConfig | Mapping[str, Any] | None) -> ZipCCLConfig:
        """A configuration from a mapping (a section of a JSON), from the environment for None, or as it is."""
        if isinstance(value, ZipCCLConfig):
            return value
        return cls.from_env() if value is None else cls(**value)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ZipCCLConfig:
        """Reads `ZIPCCL_<FIELD>` for every field: JSON where it is JSON, else a string. `ZIPCCL_CODEC=raw`,
        `ZIPCCL_CODEC='{"id": "exponent", "sigma": 0.02}'`."""
        environ = os.environ if environ is None else environ
        values = {}
        for field in cls.model_fields:
            text = environ.get(ENVIRONMENT_PREFIX + field.upper())
            if text is not None:
                try:
                    values[field] = json.loads(text)
                except json.JSONDecodeError:
                    values[field] = text
        return cls(**values)

    def plan(self, operation: Operation, dtype: Any, numel: int | None, world_size: int) -> Plan:
        """The plan for one call, from facts that are equal on all ranks."""
        override = self.operations.get(operation, OperationConfig())
        codec, strategy = override.codec or self.codec, override.strategy or self.strategy
        if not codec.supports(dtype):
            return NATIVE
        chunk_numel = (override.chunk_nbytes or self.chunk_nbytes) // 2048 * 1024
        compressed = Plan(codec, chunk_numel, override.reduction or self.reduction)
        return strategy.choose(Call(operation, dtype, numel, world_size, compressed))

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

"""ZipCCLPlugin: a kwargs handler for `Accelerator(kwargs_handlers=[ZipCCLPlugin()])`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from zipccl_accelerate.installation import Handler, install
from zipccl_core.config import OperationConfig, ZipCCLConfig
from zipccl_core.groups import stats


@dataclass
class ZipCCLPlugin(Handler):
    """Makes the collectives of an Accelerator compressed: of DDP, FSDP2, and DeepSpeed.

    The fields are the keys of `ZipCCLConfig`. One that is not given is what `ZIPCCL_<FIELD>` says, else its default;
    afterwards each has its value. All Accelerators of a process share its groups, so that their plugins must agree.

    Raises:
        ConfigError: a value that is not allowed; the message names key, value and what is allowed.
        UnsupportedVersionError: this Accelerate is not built as this version of zipccl knows it.
    """

    enabled: bool | None = None
    codec: Any = None
    strategy: Any = None
    reduction: Literal["fp32", "gloo"] | None = None
    chunk_nbytes: int | None = None
    dynamic_sizes: Literal["exact", "capped"] | None = None
    dynamic_cap: float | None = None
    ranks_per_node: int | None = None
    operations: Mapping[Any, OperationConfig | Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        environment = ZipCCLConfig.from_env()
        values = {name: getattr(environment, name) for name in environment.model_fields_set}
        names = [field.name for field in fields(self)]
        values.update({name: getattr(self, name) for name in names if getattr(self, name) is not None})
        config = ZipCCLConfig(**values)
        for name in names:
            setattr(self, name, getattr(config, name))
        install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # in a spawned process
        install()

    @property
    def config(self) -> ZipCCLConfig:
        """What the fields say now."""
        return ZipCCLConfig(**{field.name: getattr(self, field.name) for field in fields(self)})

    def stats(self) -> dict[str, float]:
        """The counters of this process so far, for `accelerator.log`: `zipccl/<operation>/<counter>` and a float each.

        `zipccl_core.OperationStatistics` says what they mean.
        """
        return stats().flat()

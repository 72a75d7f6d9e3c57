"""ZipCCL: the collectives of LLM training, losslessly compressed.

The names below are imported when they are first used, so that the entry point which `import torch` runs costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zipccl_core.registration import register

if TYPE_CHECKING:
    from zipccl_core.codec.base import Codec, compress, decompress
    from zipccl_core.codec.exponent import ExponentCodec
    from zipccl_core.codec.frame import Frame, FrameLayout
    from zipccl_core.codec.raw import RawCodec
    from zipccl_core.communicator import Communicator
    from zipccl_core.config import OperationConfig, ZipCCLConfig
    from zipccl_core.errors import ConfigError, TransportError, UnsupportedVersionError, WireFormatError, ZipCCLError
    from zipccl_core.observe.statistics import OperationStatistics, Statistics
    from zipccl_core.process_group import ZipCCLProcessGroup
    from zipccl_core.strategy.adaptive import AdaptiveStrategy
    from zipccl_core.strategy.base import NATIVE, Call, Plan, Strategy
    from zipccl_core.strategy.fixed import AlwaysStrategy, NeverStrategy, ThresholdStrategy
    from zipccl_core.strategy.operation import Operation

_HOME = {
    "AdaptiveStrategy": "strategy.adaptive",
    "AlwaysStrategy": "strategy.fixed",
    "Call": "strategy.base",
    "Codec": "codec.base",
    "Communicator": "communicator",
    "ConfigError": "errors",
    "ExponentCodec": "codec.exponent",
    "Frame": "codec.frame",
    "FrameLayout": "codec.frame",
    "NATIVE": "strategy.base",
    "NeverStrategy": "strategy.fixed",
    "Operation": "strategy.operation",
    "OperationConfig": "config",
    "OperationStatistics": "observe.statistics",
    "Plan": "strategy.base",
    "RawCodec": "codec.raw",
    "Statistics": "observe.statistics",
    "Strategy": "strategy.base",
    "ThresholdStrategy": "strategy.fixed",
    "TransportError": "errors",
    "UnsupportedVersionError": "errors",
    "WireFormatError": "errors",
    "ZipCCLConfig": "config",
    "ZipCCLError": "errors",
    "ZipCCLProcessGroup": "process_group",
    "compress": "codec.base",
    "decompress": "codec.base",
}

__all__ = [
    "NATIVE",
    "AdaptiveStrategy",
    "AlwaysStrategy",
    "Call",
    "Codec",
    "Communicator",
    "ConfigError",
    "ExponentCodec",
    "Frame",
    "FrameLayout",
    "NeverStrategy",
    "Operation",
    "OperationConfig",
    "OperationStatistics",
    "Plan",
    "RawCodec",
    "Statistics",
    "Strategy",
    "ThresholdStrategy",
    "TransportError",
    "UnsupportedVersionError",
    "WireFormatError",
    "ZipCCLConfig",
    "ZipCCLError",
    "ZipCCLProcessGroup",
    "compress",
    "decompress",
    "register",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("zipccl")
    if name in _HOME:
        return getattr(import_module(f"zipccl_core.{_HOME[name]}"), name)
    raise AttributeError(f"module 'zipccl_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

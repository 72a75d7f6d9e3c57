"""ZipCCL for Accelerate. The plugin's name and place are fixed; it does not work yet, and says so."""

from zipccl_accelerate.plugin import ZipCCLPlugin

__all__ = ["ZipCCLPlugin"]

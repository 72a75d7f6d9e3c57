"""The exceptions of ZipCCL.

```
ZipCCLError
├── ConfigError (ValueError)      a configuration, codec or strategy that cannot be
├── WireFormatError (ValueError)  bytes that are not the frame they should be
├── TransportError (RuntimeError) a peer or the network below failed
└── UnsupportedVersionError (ImportError)  a framework that this version does not know
```
"""

from __future__ import annotations


class ZipCCLError(Exception):
    """The base of all of ZipCCL's own exceptions."""


class ConfigError(ZipCCLError, ValueError):
    """A configuration that cannot be: the message names the key, the value and what is allowed."""


class WireFormatError(ZipCCLError, ValueError):
    """Bytes that are not the frame they should be: the message names the field, what came and what was wanted."""

    frame: int | None = None
    """Of several frames that were decoded together, which."""


class TransportError(ZipCCLError, RuntimeError):
    """A send or receive failed: the message names the operation, the peer and the group."""


class UnsupportedVersionError(ZipCCLError, ImportError):
    """A framework in a version that the adapter does not know: the message says which versions it does."""

"""What `import torch` runs where zipccl is installed (entry point `torch.backends`): one registration, no work.

It makes the backend name `zipccl` known to torch.distributed, and with `ZIPCCL=1` installs the drop-in.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches both off; `zipccl_core.register()` does the former by hand.
"""

from __future__ import annotations

import logging
import os

from zipccl_core.registration import register


def autoload() -> None:
    """Registers the backend. An exception here would break `import torch`, so none leaves."""
    try:
        register()
    except Exception:
        logging.getLogger("zipccl").exception(
            "zipccl: the backend could not be registered with torch; it stays unknown"
        )
        return
    if "ZIPCCL" in os.environ:
        try:
            _drop_in()
        except Exception:
            logging.getLogger("zipccl").exception("zipccl: ZIPCCL has no effect; groups of nccl and gloo stay native")


def _drop_in() -> None:
    import torch.distributed as dist

    if dist.is_available():
        from zipccl_core import drop_in

        if drop_in.wanted():
            drop_in.install()

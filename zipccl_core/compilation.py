"""What torch.compile may not look into."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy


def hide_from_compilation(*functions: Any) -> None:
    """Lets torch.compile run functions, and what they call, as they are; other values are passed over.

    C++ calls them while it watches (DDP's reducer in a compiled model, an operation after a graph break); it would
    compile them, and fails.
    """
    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for function in functions:
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, skip)

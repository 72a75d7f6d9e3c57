"""Lets megatron-core, which names CUDA in many places, run where there is no GPU. For trying things out, not for work.

Streams and events become objects that do nothing, `torch.cuda.current_device()` and `device="cuda"` mean the CPU, and a
CPU tensor that is asked for its type says `torch.cuda.*`. Communication is not touched.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Idle:
    """A stream or an event: everything is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Idle:
        return self

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _nothing


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):  # the optimizer sorts parameters by this name
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def use_cpu() -> None:
    """From here on, to the end of the process. Before megatron-core builds anything; importing it may come first."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = _Idle()
    cuda: dict[str, Any] = {
        "Stream": _Idle,
        "Event": _Idle,
        "current_device": lambda: "cpu",
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args: nullcontext(),
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    tensor_parallel.random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host  # it leaves a CPU tensor as it is, where numpy is expected
    if not hasattr(
        moe_utils, "te_general_gemm"
    ):  # without Transformer Engine the router asks for a name that is missing
        moe_utils.te_general_gemm = None
    _CudaMeansCpu().__enter__()

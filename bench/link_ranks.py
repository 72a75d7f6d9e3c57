"""What a rank of bench/links.py does: one operation by several plans in turn, on one clock with the other ranks."""

from __future__ import annotations

import hashlib
import random
import resource
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from network import sent_nbytes

from zipccl_core import Codec, Communicator, ExponentCodec, Frame, FrameLayout, ZipCCLConfig
from zipccl_core.codec.reduction import Reduction
from zipccl_core.collective.wire import Wire
from zipccl_core.strategy.switcher import forget_profiles

BF16 = torch.bfloat16
OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
CHUNK = 1 << 20
PLANS: dict[str, dict[str, Any] | None] = {
    "native": None,
    "raw": {"codec": "raw", "chunk_nbytes": CHUNK},
    "one-shot": {"chunk_nbytes": 16 << 20},
    "pipelined": {"chunk_nbytes": CHUNK},
    "adaptive": {"strategy": "adaptive"},
}


class SlowCodec(Codec):
    """The exponent codec as if it were slower: it idles until the time has passed that a codec of that speed takes.

    Args:
        gbyte_per_s: of values, encoding and decoding alike; 1e9 bytes.
    """

    id: Literal["slow_exponent"] = "slow_exponent"
    gbyte_per_s: float = 1.0

    def supports(self, dtype: torch.dtype) -> bool:
        """As the exponent codec."""
        return _EXPONENT.supports(dtype)

    def layout(self, numel: int, dtype: torch.dtype) -> FrameLayout:
        """As the exponent codec."""
        return _EXPONENT.layout(numel, dtype)

    def encode(self, tensor: torch.Tensor, frame: Frame) -> None:
        """Encodes, and idles."""
        begin = time.perf_counter()
        _EXPONENT.encode(tensor, frame)
        self._idle(begin, tensor.numel())

    def decode(self, frame: Frame, out: torch.Tensor) -> None:
        """Decodes, and idles."""
        begin = time.perf_counter()
        _EXPONENT.decode(frame, out)
        self._idle(begin, out.numel())

    def decode_reduce(self, frames: Any, out: torch.Tensor, reduction: Reduction) -> None:
        """Decodes and reduces, and idles."""
        begin = time.perf_counter()
        _EXPONENT.decode_reduce(frames, out, reduction)
        self._idle(begin, out.numel() * len(frames))

    def _idle(self, begin: float, numel: int) -> None:
        left = begin + numel * 2 / (self.gbyte_per_s * 1e9) - time.perf_counter()
        if left > 0:
            time.sleep(left)


_EXPONENT = ExponentCodec()


class Sample(NamedTuple):
    """One plan on one rank: a start and an end for each iteration, and what all of them took.

    Attributes:
        spans: seconds on the machine's clock.
        sent_nbytes: by the interface, for an iteration.
        digest: of the result's bits.
    """

    spans: list[tuple[float, float]]
    sent_nbytes: float
    digest: str


def measure(
    operation: str, nbytes: int, plans: dict[str, dict[str, Any] | None], iterations: int, warm: int = 1
) -> dict[str, Sample]:
    """Every plan once an iteration, in random order, each behind a barrier.

    Args:
        operation: one of OPERATIONS.
        nbytes: of the largest tensor of the call on a rank: the gathered one, the one to scatter, the only one.
        plans: a configuration by name; None is native.
    """
    made = {name: _call(operation, nbytes, _communicator(name, plan)) for name, plan in plans.items()}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    sent = dict.fromkeys(plans, 0)
    names, shuffled = list(plans), random.Random(0)
    for iteration in range(-warm, iterations):
        shuffled.shuffle(names)  # alike on all ranks; what runs first leaves caches behind
        for name in names:
            call = made[name][0]
            dist.barrier()
            sent_before = sent_nbytes()
            begin = time.monotonic()
            call()
            end = time.monotonic()
            dist.barrier()  # everything has arrived
            if iteration >= 0:
                spans[name].append((begin, end))
                sent[name] += sent_nbytes() - sent_before
    return {name: Sample(spans[name], sent[name] / iterations, _digest(made[name][1])) for name in plans}


def blocks(nbytes: int, late_rank: int | None, late_s: float, iterations: int) -> list[tuple[float, dict[int, float]]]:
    """When an all-to-all began here, and when the last value from each peer had been decoded, on the machine's clock.

    Args:
        nbytes: of a rank's input.
        late_rank: begins `late_s` after the others.
    """
    ready: dict[int, float] = {}
    decode = Wire.decode

    def recording(wire: Wire, frame: Frame, out: torch.Tensor, peer: int) -> Any:
        header = decode(wire, frame, out, peer)
        ready[peer] = time.monotonic()
        return header

    call, _ = _call("all_to_all", nbytes, _communicator("pipelined", PLANS["pipelined"]))
    seen = []
    Wire.decode = recording  # type: ignore[method-assign, assignment]
    try:
        for _ in range(iterations + 1):
            dist.barrier()
            ready.clear()
            begin = time.monotonic()
            if dist.get_rank() == late_rank:
                time.sleep(late_s)
            call()
            seen.append((begin, dict(ready)))
    finally:
        Wire.decode = decode  # type: ignore[method-assign]
    return seen[1:]


def program_s() -> float:
    """Processor time of this process so far, without the kernel's part."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


_COMMUNICATORS: dict[str, Communicator] = {}


def _communicator(name: str, plan: dict[str, Any] | None) -> Communicator | None:
    if plan is None:
        return None
    config = ZipCCLConfig(**{"strategy": "always", **plan})
    if name not in _COMMUNICATORS:
        _COMMUNICATORS[name] = Communicator(dist.group.WORLD, config, space=len(_COMMUNICATORS))
    forget_profiles()  # of another rate
    _COMMUNICATORS[name].configure(config)
    return _COMMUNICATORS[name]


def _call(operation: str, nbytes: int, communicator: Communicator | None) -> tuple[Callable[[], Any], torch.Tensor]:
    """A call, and the tensor that it writes. Reductions repeat on the same input; all_reduce's output is restored."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = max(nbytes // 2 // world_size, 1)
    whole = part * world_size
    generator = torch.Generator().manual_seed(rank)
    values = (torch.randn(whole, generator=generator) * 0.02).to(BF16)
    output = torch.zeros(whole, dtype=BF16)
    if operation == "all_gather":
        own = values[:part]
        if communicator is None:
            return lambda: dist.all_gather_single(output, own), output
        return lambda: communicator.all_gather_into_tensor(output, own), output
    if operation == "reduce_scatter":
        reduced = torch.zeros(part, dtype=BF16)
        if communicator is None:
            return lambda: dist.reduce_scatter_single(reduced, values), reduced
        return lambda: communicator.reduce_scatter_tensor(reduced, values), reduced
    if operation == "all_to_all":
        if communicator is None:
            return lambda: dist.all_to_all_single(output, values), output
        return lambda: communicator.all_to_all_single(output, values), output
    if operation == "broadcast":
        if communicator is None:
            return lambda: dist.broadcast(values, 0), values
        return lambda: communicator.broadcast(values, 0), values
    if operation == "all_reduce":  # in place: ranks have the same values, whose sum has the same bits in any order
        values = (torch.randn(whole, generator=torch.Generator().manual_seed(0)) * 0.02).to(BF16)
        if communicator is None:
            return lambda: dist.all_reduce(values), values
        return lambda: communicator.all_reduce(values), values
    raise ValueError(f"unknown operation {operation!r}; known: {', '.join(OPERATIONS)}")

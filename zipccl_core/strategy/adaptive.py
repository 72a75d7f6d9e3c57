"""The adaptive strategy: each call the way that takes the least time here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zipccl_core.codec.raw import RawCodec
from zipccl_core.strategy.base import NATIVE, Call, Plan, Strategy
from zipccl_core.strategy.cost import PIECE_NBYTES, WHOLE_NBYTES, seconds
from zipccl_core.strategy.profile import Way

_RAW = RawCodec()
_PREFERENCE = (Way.PIPELINED, Way.RAW, Way.WHOLE)
"""Behind native. What comes later must promise more than the margin less: what is so near may be noise."""


class AdaptiveStrategy(Strategy):
    """Chooses between native, raw on ZipCCL's schedule, and compressed in one piece or in many, by a cost model over a
    profile of the group: what each way takes, measured when an operation first comes and agreed by all ranks.

    Messages (`send_recv`), whose two ranks have no profile in common, and calls on GPUs go by size.

    Args:
        min_nbytes: smaller calls are native, and measure nothing.
        unmeasured_min_nbytes: of calls that go by size, those that are compressed.
        margin: how much less time than native another way must promise, as a part of native's; also what raw and whole
            must promise to be taken before pipelined.
        margin_s: the former in seconds.
        profile: a file of measurements. Rank 0 reads it, and adds what it does not have.
        measure_s: seconds that measuring one operation may take, about; the smallest size is measured in any case.
        adapt: whether ratio and codec speed are those of the job's own tensors, estimated while it runs. Without, and
            with a profile that has all operations, calls of the same size go the same way on every run (all-to-alls
            by the size of the first one).
    """

    id: Literal["adaptive"] = "adaptive"
    min_nbytes: Annotated[int, Field(ge=0)] = 16 * 1024
    unmeasured_min_nbytes: Annotated[int, Field(ge=0)] = 64 * 1024
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.03
    margin_s: Annotated[float, Field(ge=0)] = 1e-4
    profile: str | None = None
    measure_s: Annotated[float, Field(gt=0)] = 2.0
    adapt: bool = True

    def choose(self, call: Call) -> Plan:
        """The plan of the way that promises the least."""
        nbytes = call.nbytes
        if nbytes is not None and nbytes < self.min_nbytes:
            return NATIVE
        if call.known is None:
            return NATIVE if nbytes is not None and nbytes < self.unmeasured_min_nbytes else call.compressed
        return plan_of(self.way(call), call)

    def way(self, call: Call) -> Way:
        """The way of a call whose group has been measured."""
        assert call.known is not None
        costs, best = self.costs(call), Way.NATIVE
        for way in _PREFERENCE:
            least = costs[best] * (1 - self.margin) - (self.margin_s if best == Way.NATIVE else 0.0)
            best = way if costs[way] < least else best
        return best

    def costs(self, call: Call) -> dict[Way, float]:
        """Seconds that each way promises."""
        assert call.known is not None
        measured, estimates = call.known.measured, call.known.estimates
        nbytes = call.known.typical_nbytes if call.nbytes is None else float(call.nbytes)
        return {
            way: seconds(way, call.operation, nbytes, call.world_size, measured, estimates) for way in measured.seconds
        }


def plan_of(way: Way, call: Call) -> Plan:
    """The plan of a way: that of a compressed call, with another codec or other pieces."""
    if way == Way.NATIVE:
        return NATIVE
    piece_nbytes = WHOLE_NBYTES if way == Way.WHOLE else PIECE_NBYTES
    codec = _RAW if way == Way.RAW else call.compressed.codec
    return call.compressed._replace(codec=codec, chunk_numel=piece_nbytes // call.dtype.itemsize)

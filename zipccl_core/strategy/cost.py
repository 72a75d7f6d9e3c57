"""The cost model: seconds of a call by each way, from a profile and what is known of the data (docs/adaptive.md).

Only +, -, *, / and comparisons, which give the same bits on every processor: ranks that compute a choice agree on it.
"""

from __future__ import annotations

from typing import NamedTuple

from zipccl_core.strategy.operation import Operation
from zipccl_core.strategy.profile import Estimates, Measurements, Way

PIECE_NBYTES = 1 << 20
"""Of values in a frame, where a call is pipelined or raw."""
WHOLE_NBYTES = 1 << 24
"""Of values in a frame at most, where it is not."""


class Volume(NamedTuple):
    """Bytes of values that one rank handles for each byte that it contributes.

    Attributes:
        encoded: by the codec.
        decoded: by the codec.
        sent: over its link in the busier direction, before compression.
    """

    encoded: float
    decoded: float
    sent: float


def volume(operation: Operation, world_size: int) -> Volume:
    """What an operation makes of a rank's contribution, its input."""
    away = (world_size - 1) / world_size
    if operation == Operation.ALL_GATHER:
        return Volume(1.0, world_size - 1.0, world_size - 1.0)
    if operation == Operation.ALL_REDUCE:  # all-to-all of parts, then all-gather of the reduced part
        return Volume(away + 1 / world_size, 2 * away, 2 * away)
    if operation == Operation.BROADCAST:  # the source sends to each of its children
        return Volume(1.0, 1.0, float((world_size - 1).bit_length()))
    return Volume(away, away, away)


def seconds(
    way: Way, operation: Operation, nbytes: float, world_size: int, measured: Measurements, now: Estimates
) -> float:
    """What a call takes: as measured, plus what the model says that other data, another codec speed, and, beyond the
    largest size that was measured, more pieces change."""
    if way in (Way.NATIVE, Way.RAW):
        return measured.at(way, nbytes)
    per_byte, largest = _wire_s_per_byte(operation, world_size, measured), float(measured.largest)

    def model(nbytes: float, estimates: Estimates) -> float:
        return modelled(way, operation, nbytes, world_size, per_byte, estimates)

    nearest, then = min(nbytes, largest), measured.estimates
    real = measured.at(way, largest) / max(
        model(largest, then), 1e-12
    )  # of this machine, where codec and wire share processors
    return max(measured.at(way, nearest) + real * (model(nbytes, now) - model(nearest, then)), 0.0)


def modelled(
    way: Way, operation: Operation, nbytes: float, world_size: int, wire_s_per_byte: float, estimates: Estimates
) -> float:
    """Seconds of a compressed call without its latencies: k pieces, one rank's codec beside its wire.

    With C seconds of encoding and decoding and W of the wire, k pieces take max(C, W) + min(C, W) / k: the slower of
    the two is always busy, and the other adds what one piece of it takes, before the first or behind the last.
    """
    volumes = volume(operation, world_size)
    codec = nbytes * (volumes.encoded * estimates.encode_s + volumes.decoded * estimates.decode_s)
    wire = nbytes * volumes.sent * wire_s_per_byte / estimates.ratio
    piece = PIECE_NBYTES if way == Way.PIPELINED else WHOLE_NBYTES
    part = nbytes if operation in (Operation.ALL_GATHER, Operation.BROADCAST) else nbytes / world_size
    pieces = max(1.0, part / piece)
    return max(codec, wire) + min(codec, wire) / pieces


def _wire_s_per_byte(operation: Operation, world_size: int, measured: Measurements) -> float:
    """Of the raw schedule, between the largest two sizes."""
    if len(measured.nbytes) == 1:
        return measured.seconds[Way.RAW][0] / (measured.nbytes[0] * volume(operation, world_size).sent)
    (x0, x1), (y0, y1) = measured.nbytes[-2:], measured.seconds[Way.RAW][-2:]
    return max(y1 - y0, 0.0) / ((x1 - x0) * volume(operation, world_size).sent)

"""Profile: what the ways of carrying an operation out take on a group of ranks, measured, and equal on all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from zipccl_core.strategy.operation import Operation


class Way(str, Enum):
    """How a call can go. Every way but the native one is ZipCCL's schedule.

    `raw`: tensors as they are, in pieces. `whole`: compressed, one frame a peer. `pipelined`: compressed, in pieces, so
    that encoding and decoding overlap the wire.
    """

    NATIVE = "native"
    RAW = "raw"
    WHOLE = "whole"
    PIPELINED = "pipelined"

    def __str__(self) -> str:
        return self.value


class Estimates(BaseModel):
    """What changes while a job runs.

    Attributes:
        ratio: bytes of tensors for a byte of frames.
        encode_s: seconds to encode a byte of values, on the slowest rank.
        decode_s: seconds to decode one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ratio: float
    encode_s: float
    decode_s: float


class Measurements(BaseModel):
    """One operation, measured: seconds of each way at some sizes.

    Attributes:
        nbytes: what a rank contributes, ascending.
        seconds: by way, one for each size; the median over rounds of the slowest rank's time.
        estimates: those of the frames that were measured.
        is_cut: whether larger sizes would have taken too long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nbytes: tuple[int, ...]
    seconds: dict[Way, tuple[float, ...]]
    estimates: Estimates
    is_cut: bool = False

    @property
    def largest(self) -> int:
        """The largest size that was measured."""
        return self.nbytes[-1]

    def at(self, way: Way, nbytes: float) -> float:
        """Seconds of a way at a size: linear between measured sizes, and on from the last two.

        Times are a latency and a time for each byte, so straight lines are what to expect.
        """
        points = list(zip(self.nbytes, self.seconds[way], strict=True))
        if len(points) == 1 or nbytes <= points[0][0]:
            return points[0][1]
        segments = list(pairwise(points))
        for (x0, y0), (x1, y1) in segments:
            if nbytes <= x1:
                return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        (x0, y0), (x1, y1) = segments[-1]
        return y1 + max(y1 - y0, 0.0) * (nbytes - x1) / (x1 - x0)


class Profile(BaseModel):
    """All that is known of one kind of group: of so many ranks, on nodes in that order.

    Attributes:
        measurements: by operation; one that no call has asked for is not there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    measurements: dict[Operation, Measurements] = {}

    def having(self, operation: Operation, measured: Measurements) -> Profile:
        """This and one more operation."""
        return Profile(measurements={**self.measurements, operation: measured})


def topology(nodes: Sequence[int]) -> str:
    """The kind of a group, for cache and file: how its ranks lie on nodes, in words such as `0,0,1,1`."""
    return ",".join(map(str, nodes))


def load(path: Path) -> dict[str, Profile]:
    """The profiles in a file, by topology; none where there is no file.

    Raises:
        ValueError: it is no file of profiles.
    """
    if not path.exists():
        return {}
    return {key: Profile.model_validate(value) for key, value in json.loads(path.read_text()).items()}


def save(path: Path, profiles: dict[str, Profile]) -> None:
    """Writes profiles beside those of other topologies in the file; readers see the old file or the new one."""
    known = {**load(path), **profiles}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".tmp{id(profiles)}")
    beside.write_text(json.dumps({key: value.model_dump(mode="json") for key, value in known.items()}, indent=1))
    beside.replace(path)

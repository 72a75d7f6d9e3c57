"""Profile: what the ways of carrying operations out take on groups of ranks, as measured."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from zipccl_core.strategy.operation import Name


class Way(Name):
    """How a call can go. Every way but the native one is ZipCCL's schedule.

    `raw`: tensors as they are, in pieces. `whole`: compressed, one frame a peer. `pipelined`: compressed, in pieces, so
    that encoding and decoding overlap the wire.
    """

    NATIVE = "native"
    RAW = "raw"
    WHOLE = "whole"
    PIPELINED = "pipelined"


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Estimates(BaseModel):
    """What changes while a job runs.

    Attributes:
        ratio: bytes of tensors for a byte of frames.
        encode_s: seconds to encode a byte of values, on the slowest rank.
        decode_s: seconds to decode one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ratio: Positive
    encode_s: Positive
    decode_s: Positive


class Measurements(BaseModel):
    """One operation, measured: seconds of each way at some sizes.

    Attributes:
        nbytes: what a rank contributes, ascending.
        seconds: by way, one for each size; the median over rounds of the slowest rank's time.
        estimates: those of the frames that were measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nbytes: Annotated[tuple[int, ...], Field(min_length=1)]
    seconds: dict[Way, tuple[Positive, ...]]
    estimates: Estimates

    @model_validator(mode="after")
    def _fits_together(self) -> Measurements:
        if any(small >= large for small, large in pairwise((0, *self.nbytes))):
            raise ValueError("sizes must be positive and ascend")
        if set(self.seconds) != set(Way) or any(len(times) != len(self.nbytes) for times in self.seconds.values()):
            raise ValueError(f"there must be as many seconds as sizes, for each of {', '.join(Way)}")
        return self

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


_FILE = TypeAdapter(dict[str, Measurements])


def load(path: Path) -> dict[str, Measurements]:
    """The measurements in a file, by kind of call and group; none where there is no file.

    Raises:
        ValueError: it is no file of measurements.
    """
    return _FILE.validate_json(path.read_bytes()) if path.exists() else {}


def save(path: Path, measured: Mapping[str, Measurements]) -> None:
    """Adds measurements to a file. Processes that do so at the same time keep each other's; readers see the old file or
    the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = {**load(path), **measured}
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as beside:
            json.dump(_FILE.dump_python(known, mode="json"), beside, indent=1)
        Path(beside.name).replace(path)

"""Switcher: measures a group, agrees with all its ranks on the figures, and keeps them up to date while a job runs.

A choice follows from figures that are equal on all ranks, and those change at a call that all ranks count alike. So no
rank's own clock decides anything, and two ranks cannot choose differently.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from zipccl_core.errors import ConfigError
from zipccl_core.strategy.adaptive import AdaptiveStrategy, plan_of
from zipccl_core.strategy.base import Call, Known, Plan
from zipccl_core.strategy.operation import Operation
from zipccl_core.strategy.profile import Estimates, Measurements, Way, load, save

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("zipccl")

SIZES = tuple((16 << 10) << 2 * step for step in range(6))
"""What a rank contributes to the calls that are measured, bytes: 16 KiB to 16 MiB, as far as time allows."""
MOST_NBYTES = 256 << 20
"""Of a tensor that is made for measuring."""
ROUNDS = 5
ENOUGH_S = 0.01
"""For a way at a size: where five rounds take less, there are more, since short times vary."""
MOST_ROUNDS = 25
FIRST_STEP, LAST_INTERVAL, LAG = 8, 256, 4
"""Calls until figures are gathered first, between two gatherings in the end, and until they count."""
SAMPLE_WITHIN = 64
"""Calls before a gathering, of which the first of each operation is sampled."""
DEAD_BANDS = {"ratio": 0.05, "encode_s": 0.25, "decode_s": 0.25, "typical_nbytes": 0.25}
"""How far, as a part of itself, a figure must move to count: what is near a break-even does not go to and fro."""


class Sampled(NamedTuple):
    """A piece of a real tensor, encoded and decoded: bytes of values and of the frame, and seconds; these are 0 where
    the piece is so small that they would say nothing of a larger one."""

    nbytes: float
    frame_nbytes: float
    encode_s: float
    decode_s: float


NOTHING = Sampled(0.0, 0.0, 0.0, 0.0)


class Peers(Protocol):
    """What a switcher needs of a group. All ranks call `gather`, `broadcast` and `timed` in the same order."""

    rank: int
    world_size: int
    name: str

    def nodes(self) -> list[int]:
        """The node of each rank, numbered. All ranks ask together."""

    def gather(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Sends as many values as the other ranks do; the call that comes back waits for theirs, by rank."""

    def broadcast(self, text: str) -> str:
        """Rank 0's text."""

    def timed(self, operation: Operation, plans: Sequence[Plan], nbytes: int) -> Callable[[int], list[float]]:
        """Makes random values, and gives what takes the seconds of calls, here, from when all ranks are there: every
        plan in turn, so many times."""

    def sample(self, plan: Plan, values: Tensor | None) -> Sampled:
        """Encodes and decodes some of a tensor's values, or of normal ones."""


class Switcher:
    """The figures of one group for one strategy.

    Args:
        strategy: says how long to measure, where to keep measurements, and which way a call goes.
        peers: the group.
    """

    def __init__(self, strategy: AdaptiveStrategy, peers: Peers) -> None:
        self._strategy, self._peers = strategy, peers
        self._known: dict[Operation, Known] = {}
        self._running: dict[Operation, dict[str, float]] = {}
        self._last: dict[Operation, Call] = {}
        self._calls, self._next_step = 0, FIRST_STEP
        self._seen = {operation: _Seen() for operation in Operation}
        self._gathering: Callable[[], list[list[float]]] | None = None

    def measures(self, call: Call) -> bool:
        """Whether the figures decide a call; else it is a small one."""
        return call.nbytes is None or call.nbytes >= self._strategy.min_nbytes

    def has_measured(self, operation: Operation) -> bool:
        """Whether `known` answers at once."""
        return operation in self._known

    def known(self, call: Call, nbytes: int, values: Tensor | None) -> tuple[Known, bool]:
        """The figures for a call, which is counted; and whether they have changed, so that choices must be made again.

        The first call of an operation measures it, which takes about `measure_s`; all ranks make that call.

        Args:
            call: the next of the group's.
            nbytes: what this rank contributes.
            values: some of it, for its ratio; None where it has none yet.
        """
        operation, changed = call.operation, False
        if operation not in self._known:
            self._known[operation] = self._first(call, nbytes, values)
            changed = True
        self._last[operation] = call
        if self._strategy.adapt:
            self._seen[operation].add(call, nbytes, values, self._peers, self._calls >= self._next_step - SAMPLE_WITHIN)
            changed |= self._step()
        return self._known[operation], changed

    def settle(self) -> None:
        """Waits for the figures that are on their way: the other ranks have sent theirs, or will at the same call."""
        if self._gathering is not None:
            self._gathering()
            self._gathering = None

    def abandon(self) -> None:
        """Keeps the memory of figures on their way, for good: gloo cannot take a receive back."""
        if self._gathering is not None:
            _ABANDONED.append(self._gathering)
            self._gathering = None

    # ------------------------------------------------------------------ at first use

    def _first(self, call: Call, nbytes: int, values: Tensor | None) -> Known:
        begin = perf_counter()
        peers, adapt = self._peers, self._strategy.adapt
        sampled = peers.sample(call.compressed, values) if adapt and values is not None else NOTHING
        every = peers.gather([sampled.nbytes, sampled.frame_nbytes, float(nbytes)])()
        typical = sum(values[2] for values in every) / len(every)
        kind = _kind(call, peers.nodes())
        measured, known_before = self._from_rank_0(kind), True
        if measured is None:
            measured, known_before = self._measure(call), False
            _MEASURED[kind] = measured
            if self._strategy.profile and peers.rank == 0:
                _save(Path(self._strategy.profile), kind, measured)
        estimates = measured.estimates.model_copy(update={"ratio": _ratio(every, measured.estimates.ratio)})
        known = Known(measured, estimates, typical)
        if peers.rank == 0:
            logger.info(
                "zipccl: group %r: %s %s in %.2f s: %s",
                peers.name, call.operation, "known from a profile," if known_before else "measured",
                perf_counter() - begin, _described(self._strategy, call._replace(known=known)),
            )  # fmt: skip
        return known

    def _from_rank_0(self, kind: str) -> Measurements | None:
        """What rank 0 has measured of such calls, or read. What is wrong with its file, all ranks raise."""
        text, path = "", self._strategy.profile
        if self._peers.rank == 0:
            try:
                measured = load(Path(path)).get(kind) if path else None
                measured = measured or _MEASURED.get(kind)
                text = measured.model_dump_json() if measured else ""
            except Exception as error:  # the others wait for an answer
                text = f"{_WRONG}{path}: {error}"
        text = self._peers.broadcast(text)
        if text.startswith(_WRONG):
            raise ConfigError(f"no profile can be read from {text.removeprefix(_WRONG)}")
        return Measurements.model_validate_json(text) if text else None

    def _measure(self, call: Call) -> Measurements:
        """Measures size after size, until the time is up."""
        peers, ways = self._peers, list(Way)
        plans = [plan_of(way, call) for way in ways]
        every = peers.gather(peers.sample(call.compressed, None))()
        estimates = Estimates(
            ratio=_ratio(every, 1.0),
            encode_s=max(values[2] / values[0] for values in every),
            decode_s=max(values[3] / values[0] for values in every),
        )
        sizes: list[int] = []
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        began = perf_counter()

        def left_s() -> float:
            """As the rank says whose clock is behind."""
            return self._strategy.measure_s - max(values[0] for values in peers.gather([perf_counter() - began])())

        for nbytes in SIZES:
            if sizes:
                next_round = 4 * sum(times[-1] for times in seconds.values())
                if nbytes * _gathered(call) > MOST_NBYTES or left_s() < 2 * next_round:
                    break
            timed = peers.timed(call.operation, plans, nbytes)
            a_round = sum(self._slowest(timed(1)))  # and warms up
            wanted = max(ROUNDS, min(MOST_ROUNDS, int(ENOUGH_S * len(ways) / a_round)))
            slowest = self._slowest(timed(max(1, min(wanted, int(left_s() / a_round)))))
            for i, way in enumerate(ways):
                seconds[way].append(statistics.median(slowest[i :: len(ways)]))
            sizes.append(nbytes)
        times = {way: tuple(seconds[way]) for way in ways}
        return Measurements(nbytes=tuple(sizes), seconds=times, estimates=estimates)

    def _slowest(self, mine: Sequence[float]) -> list[float]:
        return [max(times) for times in zip(*self._peers.gather(mine)(), strict=True)]

    # ------------------------------------------------------------------ while the job runs

    def _step(self) -> bool:
        self._calls += 1
        if self._calls == self._next_step:
            self._gathering = self._peers.gather([value for seen in self._seen.values() for value in seen.values()])
        if self._gathering is None or self._calls < self._next_step + LAG:
            return False
        every, self._gathering = self._gathering(), None
        self._next_step = self._calls + min(self._next_step, LAST_INTERVAL)
        self._seen = {operation: _Seen() for operation in Operation}
        changed = False
        for i, operation in enumerate(Operation):
            if operation in self._known:
                changed |= self._adopt(operation, [values[i * _Seen.N : (i + 1) * _Seen.N] for values in every])
        return changed

    def _adopt(self, operation: Operation, every: Sequence[Sequence[float]]) -> bool:
        """Takes what all ranks have seen of an operation, where it has moved far enough."""
        old = self._known[operation]
        calls, nbytes = (sum(values[i] for values in every) for i in (0, 1))
        if not calls:
            return False
        timed = [values for values in every if values[4]]
        seen = {
            "ratio": _ratio([values[2:] for values in every], old.estimates.ratio),
            "typical_nbytes": nbytes / calls,
        }
        if timed:
            seen["encode_s"] = max(values[4] / values[2] for values in timed)
            seen["decode_s"] = max(values[5] / values[2] for values in timed)
        counting = {**old.estimates.model_dump(), "typical_nbytes": old.typical_nbytes}
        running = self._running.setdefault(operation, dict(counting))
        for name, value in seen.items():
            running[name] = (running[name] + value) / 2
            if abs(running[name] - counting[name]) > DEAD_BANDS[name] * counting[name]:
                counting[name] = running[name]
        typical = counting.pop("typical_nbytes")
        new = Known(old.measured, Estimates(**counting), typical)
        if new == old:
            return False
        self._known[operation] = new
        if self._peers.rank == 0:
            call = self._last[operation]
            before, after = (self._strategy.way(call._replace(known=known)) for known in (old, new))
            if before != after:
                nbytes = call.nbytes or round(new.typical_nbytes)
                costs = self._strategy.costs(call._replace(known=new))
                logger.info(
                    "zipccl: group %r: %s of %s bytes goes %s now, it went %s: %s; it was: %s; promised: %s",
                    self._peers.name, operation, nbytes, after, before,
                    _in_words(new.estimates), _in_words(old.estimates), _costs_in_words(costs),
                )  # fmt: skip
        return True


_WRONG = "!"
_MEASURED: dict[str, Measurements] = {}
"""What has been measured in this process, by kind of call and group; rank 0's of a group counts."""
_ABANDONED: list[object] = []


def forget_profiles() -> None:
    """Lets new groups measure anew, in this process: the network, or its load, is another one."""
    _MEASURED.clear()


class _Seen:
    """Of one operation, since the last step."""

    N = 6

    def __init__(self) -> None:
        self._calls, self._nbytes = 0, 0
        self._sampled: Sampled | None = None

    def add(self, call: Call, nbytes: int, values: Tensor | None, peers: Peers, may_sample: bool) -> None:
        """Counts a call."""
        self._calls, self._nbytes = self._calls + 1, self._nbytes + nbytes
        if may_sample and self._sampled is None and values is not None and values.numel():
            self._sampled = peers.sample(call.compressed, values)

    def values(self) -> list[float]:
        """As many for every operation, so that all ranks send alike."""
        return [float(self._calls), float(self._nbytes), *(self._sampled or NOTHING)]


def _kind(call: Call, nodes: Sequence[int]) -> str:
    """What calls and groups have in common that take the same time."""
    compressed = call.compressed
    assert compressed.codec is not None
    codec = compressed.codec.model_dump_json()
    return f"{call.operation} {compressed.reduction} {codec} on nodes {','.join(map(str, nodes))}"


def _save(path: Path, kind: str, measured: Measurements) -> None:
    """On rank 0 alone, so that it must not raise."""
    try:
        save(path, {kind: measured})
    except (OSError, ValueError) as error:
        logger.warning("zipccl: what was measured is not kept in %s: %s", path, error)


def _gathered(call: Call) -> int:
    return call.world_size if call.operation == Operation.ALL_GATHER else 1


def _ratio(every: Sequence[Sequence[float]], otherwise: float) -> float:
    nbytes, frame_nbytes = (sum(values[i] for values in every) for i in (0, 1))
    return nbytes / frame_nbytes if frame_nbytes else otherwise


def _in_words(estimates: Estimates) -> str:
    encode, decode = 1e-9 / estimates.encode_s, 1e-9 / estimates.decode_s
    return f"ratio {estimates.ratio:.3f}, encoding {encode:.2f} GB/s, decoding {decode:.2f} GB/s"


def _costs_in_words(costs: Mapping[Way, float]) -> str:
    return ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in costs.items())


def _described(strategy: AdaptiveStrategy, call: Call) -> str:
    if call.nbytes is None:
        return str(strategy.way(call))
    ways: list[tuple[int, Way]] = []
    for nbytes in SIZES:
        way = strategy.way(call._replace(numel=nbytes // call.dtype.itemsize))
        if not ways or ways[-1][1] != way:
            ways.append((nbytes, way))
    return ", ".join(f"from {nbytes >> 10} KiB on {way}" for nbytes, way in ways)

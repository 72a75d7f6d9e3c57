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
from zipccl_core.strategy.profile import Estimates, Measurements, Profile, Way, load, save, topology

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
DEAD_BANDS = {"ratio": 0.05, "encode_s": 0.25, "decode_s": 0.25, "typical_nbytes": 0.25}
"""How far, as a part of itself, a figure must move to count: what is near a break-even does not go to and fro."""


class Sampled(NamedTuple):
    """A piece of a real tensor, encoded and decoded: bytes of values and of the frame, and seconds."""

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

    def timed(self, operation: Operation, plans: Sequence[Plan], nbytes: int, rounds: int) -> list[float]:
        """Seconds of calls of random values, here, from when all ranks are there: every plan in turn, so many times."""

    def sample(self, plan: Plan, values: Tensor | None) -> Sampled:
        """Encodes and decodes some of a tensor's values, or of normal ones."""


class Switcher:
    """The figures of one group for one strategy.

    Args:
        strategy: says how long to measure, where to keep profiles, and which way a call goes.
        peers: the group.
    """

    def __init__(self, strategy: AdaptiveStrategy, peers: Peers) -> None:
        self._strategy, self._peers = strategy, peers
        self._key = ""
        self._profile = Profile()
        self._known: dict[Operation, Known] = {}
        self._running: dict[Operation, dict[str, float]] = {}
        self._compressed: dict[Operation, Call] = {}
        self._calls, self._next_step = 0, FIRST_STEP
        self._seen = {operation: _Seen() for operation in Operation}
        self._gathering: Callable[[], list[list[float]]] | None = None

    def measures(self, call: Call) -> bool:
        """Whether the figures decide a call; else it is a small one."""
        return call.nbytes is None or call.nbytes >= self._strategy.min_nbytes

    def has_measured(self, call: Call) -> bool:
        """Whether `known` answers at once: what was measured reaches up to the call's size, as far as that goes."""
        known = self._known.get(call.operation)
        return known is not None and _reaches(known.measured, call, known.typical_nbytes)

    def known(self, call: Call, nbytes: int, values: Tensor | None) -> tuple[Known, bool]:
        """The figures for a call, which is counted; and whether they have changed, so that choices must be made again.

        The first call of an operation measures it, and so may a larger one, which takes about `measure_s`; all ranks
        make that call.

        Args:
            call: the next of the group's.
            nbytes: what this rank contributes.
            values: some of it, for its ratio; None where it has none yet.
        """
        operation, changed = call.operation, False
        if not self.has_measured(call):
            self._known[operation] = self._first(call, nbytes, values)
            changed = True
        seen = self._seen[operation]
        seen.calls, seen.nbytes = seen.calls + 1, seen.nbytes + nbytes
        self._compressed[operation] = call
        if self._strategy.adapt:
            if seen.sampled is None and values is not None:
                seen.sampled = self._peers.sample(call.compressed, values)
            changed |= self._step()
        return self._known[operation], changed

    # ------------------------------------------------------------------ at first use

    def _first(self, call: Call, nbytes: int, values: Tensor | None) -> Known:
        begin = perf_counter()
        peers, operation = self._peers, call.operation
        sampled = NOTHING if values is None else peers.sample(call.compressed, values)
        every = peers.gather([sampled.nbytes, sampled.frame_nbytes, float(nbytes)])()
        typical = sum(values[2] for values in every) / len(every)
        if not self._key:
            assert call.compressed.codec is not None
            self._key = f"{call.compressed.codec.id} {topology(peers.nodes())}"
            self._profile = self._from_rank_0()
        measured = self._profile.measurements.get(operation)
        fresh = measured is None or not _reaches(measured, call, typical)
        if fresh:
            measured = self._measure(call, _needed(call, typical), measured)
            self._profile = self._profile.having(operation, measured)
            _PROFILES[self._key] = self._profile
            if self._strategy.profile and peers.rank == 0:
                save(Path(self._strategy.profile), {self._key: self._profile})
        assert measured is not None
        estimates = measured.estimates.model_copy(update={"ratio": _ratio(every, measured.estimates.ratio)})
        known = Known(measured, estimates, typical)
        if peers.rank == 0:
            logger.info(
                "zipccl: group %r: %s %s in %.2f s: %s",
                peers.name,
                operation,
                "measured" if fresh else "known from a profile,",
                perf_counter() - begin,
                _described(self._strategy, call._replace(known=known)),
            )
        return known

    def _from_rank_0(self) -> Profile:
        """What rank 0 knows of groups like this one. What is wrong with its file, all ranks raise."""
        text, path = "", self._strategy.profile
        if self._peers.rank == 0:
            try:
                profile = load(Path(path)).get(self._key) if path else None
                text = (profile or _PROFILES.get(self._key, Profile())).model_dump_json()
            except (OSError, ValueError) as error:
                text = f"{_WRONG}{path}: {error}"
        text = self._peers.broadcast(text)
        if text.startswith(_WRONG):
            raise ConfigError(f"no profile can be read from {text.removeprefix(_WRONG)}")
        return Profile.model_validate_json(text)

    def _measure(self, call: Call, needed: int, smaller: Measurements | None) -> Measurements:
        """Measures sizes up to the one that is needed, those that have not been, until the time is up."""
        peers, ways = self._peers, list(Way)
        plans = [plan_of(way, call.compressed) for way in ways]
        sampled = peers.sample(call.compressed, None)
        every = peers.gather([sampled.nbytes, sampled.frame_nbytes, sampled.encode_s, sampled.decode_s])()
        estimates = Estimates(
            ratio=_ratio(every, 1.0),
            encode_s=max(values[2] / values[0] for values in every),
            decode_s=max(values[3] / values[0] for values in every),
        )
        sizes = list(smaller.nbytes) if smaller else []
        seconds = {way: list(smaller.seconds[way]) if smaller else [] for way in ways}
        spent, is_cut = 0.0, False
        for nbytes in SIZES[len(sizes) :]:
            if sizes and (sizes[-1] >= needed or nbytes * _gathered(call) > MOST_NBYTES):
                break
            rounds = MOST_ROUNDS
            if sizes:
                a_round = 4 * sum(seconds[way][-1] for way in ways)
                rounds = max(ROUNDS, min(MOST_ROUNDS, int(ENOUGH_S * len(ways) / a_round)))
                if len(sizes) > 1:
                    rounds = min(rounds, int((self._strategy.measure_s - spent) / a_round) - 1)
                if rounds < 1:
                    is_cut = True
                    break
            mine = peers.timed(call.operation, plans, nbytes, rounds + 1)  # the first one warms up
            slowest = [max(times) for times in zip(*peers.gather(mine)(), strict=True)]
            for i, way in enumerate(ways):
                seconds[way].append(statistics.median(slowest[i + len(ways) :: len(ways)]))
            sizes.append(nbytes)
            spent += sum(slowest)
        times = {way: tuple(seconds[way]) for way in ways}
        return Measurements(nbytes=tuple(sizes), seconds=times, estimates=estimates, is_cut=is_cut)

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
        measured = [values for values in every if values[2]]
        if not calls or not measured:
            return False
        seen = {
            "ratio": _ratio([values[2:] for values in measured], old.estimates.ratio),
            "encode_s": max(values[4] / values[2] for values in measured),
            "decode_s": max(values[5] / values[2] for values in measured),
            "typical_nbytes": nbytes / calls,
        }
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
            call = self._compressed[operation]
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
_PROFILES: dict[str, Profile] = {}
"""What rank 0 of some group has measured in this process, by kind of group."""


def forget_profiles() -> None:
    """Lets new groups measure anew, in this process: the network, or its load, is another one."""
    _PROFILES.clear()


class _Seen:
    """Of one operation, since the last step."""

    N = 6

    def __init__(self) -> None:
        self.calls, self.nbytes = 0, 0
        self.sampled: Sampled | None = None

    def values(self) -> list[float]:
        """As many for every operation, so that all ranks send alike."""
        return [float(self.calls), float(self.nbytes), *(self.sampled or NOTHING)]


def _needed(call: Call, typical_nbytes: float) -> int:
    """The size up to which to measure."""
    wanted = typical_nbytes if call.nbytes is None else call.nbytes
    return next((nbytes for nbytes in SIZES if nbytes >= wanted), SIZES[-1])


def _reaches(measured: Measurements, call: Call, typical_nbytes: float) -> bool:
    needed, next_one = _needed(call, typical_nbytes), 4 * measured.largest
    return measured.is_cut or measured.largest >= needed or next_one * _gathered(call) > MOST_NBYTES


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
    ways: list[tuple[int, Way]] = []
    for nbytes in SIZES:
        way = strategy.way(call._replace(numel=nbytes // call.dtype.itemsize))
        if not ways or ways[-1][1] != way:
            ways.append((nbytes, way))
    return ", ".join(f"from {nbytes >> 10} KiB on {way}" for nbytes, way in ways)

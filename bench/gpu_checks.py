"""Section `checks` of bench/gpu.py: every bit of what the kernels do, against the reference on the CPU.

Nothing is measured before all of it holds. What only a device can get wrong is here, too: streams that wait for each
other, launches of several threads, graphs that are replayed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from gpu_cases import BF16, CODINGS, Case, Extent, Tally, cases, outliers, patterns, reference
from gpu_machine import Machine, different, parts_of

from zipccl_core import ExponentCodec, WireFormatError
from zipccl_core.codec.frame import HEADER_NBYTES, Frame
from zipccl_core.codec.gaussian import window_start
from zipccl_core.codec.reduction import Reduction
from zipccl_core.kernels import OVERFLOW, Split, Window

FILL = 0xA5
GUARD = 256
"""Bytes behind an output that must stay as they are."""


class Checks:
    """All checks of one variant of the kernels."""

    def __init__(self, machine: Machine, variant: str, extent: Extent, tally: Tally) -> None:
        self.machine, self.variant, self.extent, self.tally = machine, variant, extent, tally
        self.kernels = machine.kernels(variant)

    def run(self, material: Sequence[Case]) -> None:
        for coding in CODINGS:
            self.frames(material, coding)
        for number in (64, 100):
            self.batch(number)
        self.damaged()
        self.sums()
        self.split_frames()
        self.streams()
        self.threads()
        self.graphs()

    # ------------------------------------------------------------------ frames

    def frames(self, material: Sequence[Case], coding: str) -> None:
        """Encodes and decodes everything in one call, and the largest ones in calls of their own."""
        check = f"frames, {coding}"
        self._round_trip(check, material, coding)
        for case in sorted(material, key=lambda case: -case.values.numel())[:6]:
            self._round_trip(check, [case], coding)

    def batch(self, number: int) -> None:
        """So many tensors of one call, of unequal sizes, some empty."""
        made = [(outliers if i % 5 else patterns)(i % 11 * 997 + i, i) for i in range(number)]
        material = [Case(f"number {i}", values, 0, {"auto": reference(values)}) for i, values in enumerate(made)]
        self._round_trip(f"batch of {number}", material, "auto")

    def _round_trip(self, check: str, material: Sequence[Case], coding: str) -> None:
        fields, codec = CODINGS[coding], ExponentCodec()
        window = Window(window_start(fields["sigma"]) if "sigma" in fields else None, fields.get("table"))
        values = [self._placed(case.values, case.offset) for case in material]
        memory, buffers = [], []
        for number, case in enumerate(material):
            begin, nbytes = 8 * (number % 2), codec.layout(case.values.numel(), BF16).frame_nbytes
            memory.append(self._filled(begin + nbytes + GUARD)[begin:])
            buffers.append(memory[-1][:nbytes])
        sizes = self.kernels.encode_frames(values, buffers, window).tolist()
        for case, whole, buffer, size in zip(material, memory, buffers, sizes, strict=True):
            wanted = case.frames[coding]
            came = buffer[: wanted.numel()].cpu()
            self._holds(check, f"the frame of {case.name} differs", torch.equal(came, wanted))
            told = int.from_bytes(bytes(wanted[40:48].tolist()), "little")
            self._holds(check, f"{case.name} has {told} dynamic bytes, not {size}", size == told)
            self._holds(check, f"memory behind the frame of {case.name}", bool((whole[buffer.numel() :] == FILL).all()))

        outs = [self._filled(2 * (case.values.numel() + case.offset) + GUARD) for case in material]
        targets = [
            out[2 * case.offset : -GUARD].view(BF16)[: case.values.numel()]
            for case, out in zip(material, outs, strict=True)
        ]
        frames = [
            parts_of(self._at(case.frames[coding], 8 * (number % 2)), case.values.numel())
            for number, case in enumerate(material)
        ]
        status = self.kernels.decode_frames(frames, targets).tolist()
        for case, out, target, said in zip(material, outs, targets, status, strict=True):
            self._holds(check, f"{case.name} is refused: {self.kernels.explain(said)}", said == 0)
            self._equal(check, f"values of {case.name}", target, case.values)
            behind = bool((out[-GUARD:] == FILL).all()) and bool((out[: 2 * case.offset] == FILL).all())
            self._holds(check, f"memory around the values of {case.name}", behind)

    def damaged(self) -> None:
        """Bit flips in header and body: refused exactly where the CPU's decoder refuses, else the same values. The
        checksum is not the device's to check."""
        check, numel = "damaged frames", 5000
        for coding in ("auto", "table"):
            codec, good = ExponentCodec(kernels="reference", **CODINGS[coding]), reference(outliers(numel, 3), coding)
            layout = codec.layout(numel, BF16)
            wanted: list[tuple[str, torch.Tensor, torch.Tensor | None]] = []
            positions = [*range(HEADER_NBYTES + 64), *range(HEADER_NBYTES + 64, good.numel(), self.extent.damaged)]
            for position, flip in itertools.product(positions, (0x01, 0x40)):
                frame, out = good.clone(), torch.empty(numel, dtype=BF16)
                frame[position] ^= flip
                what = f"{coding}, byte {position} ^ {flip:#x}"
                try:
                    codec.read(Frame(frame, numel, BF16, layout), out)
                    wanted.append((what, frame, out))
                except WireFormatError as error:
                    if not str(error).startswith("checksum is"):
                        wanted.append((what, frame, None))
            frames = [parts_of(frame.to(self.machine.device), numel) for _, frame, _ in wanted]
            outs = [torch.empty(numel, dtype=BF16, device=self.machine.device) for _ in wanted]
            status = self.kernels.decode_frames(frames, outs).tolist()
            for (what, _, values), out, said in zip(wanted, outs, status, strict=True):
                if values is None:
                    self._holds(check, f"{what} is not refused", said != 0)
                else:
                    self._holds(check, f"{what} is refused: {self.kernels.explain(said)}", said == 0)
                    self._equal(check, what, out, values)
            own, sums = torch.zeros(numel, dtype=BF16, device=self.machine.device), zip(frames, status, strict=True)
            for part, said in itertools.islice(sums, 0, None, 41):
                in_sum = self.kernels.decode_reduce([own, part], outs[0], 1).tolist()
                self._holds(check, f"{coding}: status {said}, in a sum {in_sum}", in_sum == [0, said])

    def split_frames(self) -> None:
        """Frames of which a part of the dynamic part has come: OVERFLOW, and good once the rest is there."""
        check = "split frames"
        for values in (outliers(200_000, 4), patterns(4000, 5), patterns(700, 6), torch.zeros(3000, dtype=BF16)):
            numel, frame = values.numel(), reference(values).to(self.machine.device)
            whole = parts_of(frame, numel)
            needed = whole.dynamic.numel()
            for room in sorted({0, 128, max(0, needed - 128), needed, needed + 128}):
                dynamic = self._filled(room)
                dynamic[: min(room, needed)].copy_(whole.dynamic[:room])
                part, out = Split(whole.static.clone(), dynamic), self._placed(torch.zeros_like(values), 0)
                (said,) = self.kernels.decode_frames([part], [out]).tolist()
                total = torch.empty_like(out)
                in_sum = self.kernels.decode_reduce([self._placed(values, 1), part], total, 2).tolist()
                what = f"{numel} values, {room} of {needed} bytes: status {said}, in a sum {in_sum}"
                status = OVERFLOW if room < needed else 0
                self._holds(check, what, said == status and in_sum == [0, status])
                if status == 0:
                    self._equal(check, what, out, values)
            (said,) = self.kernels.decode_frames([whole], [out]).tolist()
            self._holds(check, f"{numel} values, whole: status {said}", said == 0)
            self._equal(check, f"{numel} values, whole", out, values)

    # ------------------------------------------------------------------ sums

    def sums(self) -> None:
        """decode_reduce, with a rank's own values at some rank, in place too, against the reduction on the CPU."""
        for n_parts, numel in [*itertools.product((2, 4, 8), self.extent.reduced), (70, 3000)]:
            values = [self._addend(numel, seed) for seed in range(n_parts)]
            frames = [parts_of(reference(one).to(self.machine.device), numel) for one in values]
            for own, divisor in itertools.product((None, 0, n_parts // 2, n_parts - 1), (1, n_parts)):
                self._sum(values, frames, own, divisor)

    def _addend(self, numel: int, seed: int) -> torch.Tensor:
        """No sum of these is a NaN, whose bits in fp32 differ between processors."""
        if seed % 4 != 3:
            return outliers(numel, seed)
        values = patterns(numel, seed)
        return torch.where(values.float().abs() < 1e30, values, -0.0)

    def _sum(self, values: list[torch.Tensor], frames: list[Split], own: int | None, divisor: int) -> None:
        numel, n_parts = values[0].numel(), len(values)
        rounded, total = torch.empty_like(values[0]), values[0].float()
        Reduction("fp32", divisor != 1, numel, 0).reduce(values, rounded)
        for one in values[1:]:
            total = total + one.float()
        for wanted, in_place in (
            (total / divisor if divisor != 1 else total, False),
            (rounded, False),
            (rounded, True),
        ):
            if in_place and own is None:
                continue
            parts: list[Split | torch.Tensor] = list(frames)
            target = torch.empty_like(wanted, device=self.machine.device)
            if own is not None:
                parts[own] = mine = self._placed(values[own], 1)
                target = mine if in_place else target
            status = self.kernels.decode_reduce(parts, target, divisor).tolist()
            what = f"{n_parts} parts, numel {numel}, own {own}, divisor {divisor}, {wanted.dtype}, in place {in_place}"
            self._holds("sums", f"{what}: status {status}", not any(status))
            self._equal("sums", what, target, wanted)

    # ------------------------------------------------------------------ order

    def streams(self) -> None:
        """Everything on one stream behind work that takes its time, then across two streams; the host never waits in
        between. A kernel that is launched too early, or not waited for, finds other values."""
        values, numel = outliers(300_000, 7), 300_000
        frame = reference(values)
        for (name, stream), (other_name, other) in itertools.product(self.machine.streams().items(), repeat=2):
            with self.machine.on(stream):
                source, buffer = self._placed(torch.zeros_like(values), 0), self._filled(frame.numel() + GUARD)
                staged, out = self._placed(values, 0), self._placed(torch.zeros_like(values), 0)
                room = self._filled(ExponentCodec().layout(numel, BF16).frame_nbytes)
                self.machine.synchronize()
                self.machine.keep_busy()
                source.copy_(staged)
                self.kernels.encode_frames([source], [room], Window())
                source.zero_()
                buffer[: frame.numel()].copy_(room[: frame.numel()])
            if other is not stream:
                other.wait_stream(stream)
            with self.machine.on(other):
                status = self.kernels.decode_frames([parts_of(room, numel)], [out])
                came = out.clone()
                out.zero_()
            self.machine.synchronize()
            what = f"encoded on {name}, decoded on {other_name}"
            self._holds("streams", f"{what}: the frame differs", torch.equal(buffer[: frame.numel()].cpu(), frame))
            self._holds("streams", f"{what}: status {status.tolist()}", not any(status.tolist()))
            self._equal("streams", what, came, values)

    def threads(self) -> None:
        """Threads with a stream each, all at the same time."""
        errors: list[BaseException] = []

        def body(number: int) -> None:
            try:
                self._one_thread(number)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(number,)) for number in range(self.extent.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._holds("threads", f"raised {errors}", not errors)

    def _one_thread(self, number: int) -> None:
        values = outliers(20_000 + 8192 * number, number)
        numel, frame = values.numel(), reference(values)
        stream = self.machine.new_stream() if number % 2 else self.machine.streams()["own"]
        with self.machine.on(stream):
            source = self._placed(values, number)
            kept = []
            for _ in range(self.extent.calls):
                room = self._filled(ExponentCodec().layout(numel, BF16).frame_nbytes)
                self.kernels.encode_frames([source], [room], Window())
                out = torch.empty_like(source)
                status = self.kernels.decode_frames([parts_of(room, numel)], [out])
                kept.append((room, out, status))
            for room, out, status in kept:  # the first .tolist() waits for this stream
                good = not any(status.tolist()) and torch.equal(room[: frame.numel()].cpu(), frame)
                self._holds("threads", f"thread {number}: the frame differs", good)
                self._equal("threads", f"thread {number}", out, values)

    def graphs(self) -> None:
        """Encode, decode and sum in a graph, replayed on new values, with eager calls of the same stream between."""
        numel = 100_001
        for name, stream in self.machine.streams().items():
            if name == "default":
                continue  # which cannot be captured
            with self.machine.on(stream):
                source, own = self._placed(outliers(numel, 0), 0), self._placed(outliers(numel, 1), 1)
                room, eager = (self._filled(ExponentCodec().layout(numel, BF16).frame_nbytes) for _ in range(2))
                out, total = torch.empty_like(source), torch.empty_like(source)
            held: list[torch.Tensor] = []

            def call(tensors: tuple[torch.Tensor, ...] = (source, own, room, out, total), held: Any = held) -> None:
                source, own, room, out, total = tensors
                self.kernels.encode_frames([source], [room], Window())
                part = parts_of(room, source.numel())
                status = self.kernels.decode_frames([part], [out])
                held[:] = [status, self.kernels.decode_reduce([part, own], total, 2)]

            replay = self.machine.capture(call, stream)
            for seed in range(2, 6):
                values, frame = outliers(numel, seed), reference(outliers(numel, seed))
                wanted = torch.empty_like(values)
                Reduction("fp32", True, numel, 0).reduce([values, outliers(numel, 1)], wanted)
                with self.machine.on(stream):
                    source.copy_(values)
                    room.fill_(FILL)
                    out.zero_()
                    total.zero_()
                    replay()
                    self.kernels.encode_frames([source], [eager], Window())
                self.machine.synchronize()
                what = f"replay on {name}"
                for memory in (room, eager):
                    self._holds("graphs", f"{what}: frame", torch.equal(memory[: frame.numel()].cpu(), frame))
                said = [status.tolist() for status in held]
                self._holds("graphs", f"{what}: status {said}", said == [[0], [0, 0]])
                self._equal("graphs", what, out, values)
                self._equal("graphs", f"{what}: sum", total, wanted)

    # ------------------------------------------------------------------ help

    def _holds(self, check: str, what: str, good: bool) -> None:
        self.tally.holds(self.variant, check, what, good)

    def _equal(self, check: str, what: str, came: torch.Tensor, wanted: torch.Tensor) -> None:
        n_wrong = different(came.cpu(), wanted)
        self._holds(check, f"{what}: {n_wrong} of {wanted.numel()} values differ", n_wrong == 0)

    def _filled(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), FILL, dtype=torch.uint8, device=self.machine.device)

    def _placed(self, values: torch.Tensor, offset: int) -> torch.Tensor:
        """On the device, `offset` values behind where memory begins."""
        memory = torch.empty(values.numel() + offset, dtype=values.dtype, device=self.machine.device)
        memory[offset:].copy_(values)
        return memory[offset:]

    def _at(self, frame: torch.Tensor, offset: int) -> torch.Tensor:
        """On the device, `offset` bytes behind where memory begins."""
        memory = self._filled(offset + frame.numel())
        memory[offset:].copy_(frame)
        return memory[offset:]


def run(machine: Machine, variants: Sequence[str], extent: Extent) -> Tally:
    """All variants against the same reference, and so against each other."""
    tally, material = Tally(), cases(extent)
    for variant in variants:
        Checks(machine, variant, extent, tally).run(material)
    return tally

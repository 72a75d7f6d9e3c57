"""Device path: how the collectives of a group run on a device: on a communication stream, ordered by events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from zipccl_core.collective.work import NO_TIMEOUT, ZipCCLWork, in_mode_of_caller
from zipccl_core.collective.worker import EXIT_PATIENCE_S
from zipccl_core.errors import TransportError, ZipCCLError

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.device.exchange import Exchange, Verdict
    from zipccl_core.collective.device.layer import Device, Event
    from zipccl_core.collective.device.mover import Mover
    from zipccl_core.collective.wire import Wire
    from zipccl_core.collective.worker import Worker

logger = logging.getLogger("zipccl")

Steps = Sequence[Callable[[], None]]


class DevicePath:
    """The calls of one group on one device.

    All steps of a call are put on one stream of the group's own: it waits for the caller's stream, then encodes, lets
    the bytes move, and decodes; `Work.wait` lets the stream of whoever waits wait for the end of that. The host reads
    sizes on the way (`Exchange.run`): for a call with `async_op=True` the group's worker does, so that the caller goes
    on at once; a synchronous call does it in the caller's thread.
    """

    def __init__(self, device: Device, mover: Mover) -> None:
        self.device, self.mover = device, mover
        self._stream: Any = None
        self._under_way: list[DeviceCall] = []
        self._damage: list[tuple[DeviceCall, Exception]] = []  # found, and perhaps not told yet
        self._broken: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def stream(self) -> Any:
        """The communication stream, made when it is first used."""
        if self._stream is None:
            self._stream = self.device.new_stream()
        return self._stream

    def run(self, call: DeviceCall, result: list[Tensor], worker: Worker, async_op: bool) -> DeviceWork:
        """Starts a call: on the group's worker where it is asynchronous, else here, after those before it."""
        work = DeviceWork(result, call)
        if async_op:
            worker.submit(call.start, [], work)
        else:
            worker.run(call.start)
            work.complete()
        return work

    def close(self) -> None:
        """No more calls will come. Waits a while for what the device has still to do, and logs what nobody was told."""
        try:
            self.mover.close()
        finally:
            deadline = monotonic() + EXIT_PATIENCE_S
            while self._broken is None and monotonic() < deadline and not all(map(DeviceCall.is_over, self._under_way)):
                sleep(1e-3)
            self._sweep()
            for call, error in self._damage:
                if not call.is_told:
                    logger.error("zipccl: %s", error)

    def keep(self, call: DeviceCall) -> None:
        """Keeps a call until the device has carried it out, whoever drops it.

        Raises:
            TransportError: an earlier call has broken the path.
        """
        if self._broken is not None:
            raise TransportError(f"an earlier call ended half way on this rank, so no other can follow: {self._broken}")
        self._sweep()
        with self._lock:
            self._under_way.append(call)

    def give_up(self, error: BaseException) -> None:
        """After a call that ended half way. Peers may be in a movement in which this rank takes no part, and would take
        the next call's bytes for it; so there is none, and where the backend can it lets the peers fail, too."""
        self._broken = error
        self.mover.abort()

    def raise_damage(self) -> None:
        """Raises, once, that an earlier call met a damaged frame, where its own `wait` came too soon to see it."""
        with self._lock:
            untold = [(call, error) for call, error in self._damage if not call.is_told]
            self._damage = untold[1:]
        if untold:
            call, error = untold[0]
            call.is_told = True
            raise error

    def _sweep(self) -> None:
        """Lets calls go that are over, and looks at what they have found."""
        with self._lock:
            over = [call for call in self._under_way if call.is_over()]
            self._under_way = [call for call in self._under_way if call not in over]
        for call in over:
            try:
                if not call.is_told:
                    call.check()
            except ZipCCLError as error:
                with self._lock:
                    self._damage.append((call, error))


class DeviceCall:
    """One call on its way. The stream on which it is made is the caller's: what is there so far comes first.

    Args:
        path: of the group, on the device.
        exchanges: makes them; they are carried out one after another.
        before, after: steps before the first and after the last exchange.
        tensors: what the steps use, kept until they have.
        wire: for the counters.
        name: of the call, for messages.
    """

    def __init__(
        self,
        path: DevicePath,
        exchanges: Callable[[], Sequence[Exchange]],
        before: Steps,
        after: Steps,
        tensors: Sequence[Tensor],
        wire: Wire,
        name: str,
    ) -> None:
        self.path, self._device, self._exchanges, self._name = path, path.device, exchanges, name
        self._before, self._after, self._tensors, self._wire = before, after, list(tensors), wire
        self._caller = self._device.current()
        self._ready = self._device.record()  # on the caller's stream: the input is there
        self._verdicts: list[Verdict] = []
        self._done: Event | None = None
        self.is_told = False  # whether somebody has been told what became of the frames

    def start(self) -> None:
        """Puts everything on the communication stream; the host waits for movements whose sizes it has to read."""
        try:
            with self._named():
                self.path.keep(self)
            with self._named(), self._device.on(self.path.stream), torch.no_grad():
                try:
                    self._enqueue()
                except BaseException as error:
                    self.path.give_up(error)
                    raise
                finally:  # of what failed half way, too: the device may still be writing
                    self._done = self._device.record()
        finally:
            self._wire.close()
            del self._exchanges, self._before, self._after  # they hold the caller's tensors

    def _enqueue(self) -> None:
        self._device.wait(self._ready)
        for step in self._before:
            self._device.enqueue(step)
        for exchange in self._exchanges():
            verdict = exchange.run(self._wire.count)
            if verdict is not None:
                self._verdicts.append(verdict)
        for step in self._after:
            self._device.enqueue(step)

    def finish(self) -> None:
        """Lets the current stream wait for the output, and raises what is known to be damaged by now."""
        self.wait()
        if self._device.current() == self._caller:
            # Whatever reuses the memory comes behind the wait. On another stream it would not: then it is kept longer.
            self._tensors = []
        self.tell()

    def tell(self) -> None:
        """Raises what is known by now to be damaged: of this call, or of an earlier one, of which nobody was told."""
        if self.is_over():
            self.is_told = True
            self.check()
        self.path.raise_damage()

    def check(self) -> None:
        """Raises what the device found wrong with frames; blocks the host until it is known."""
        with self._named():
            for verdict in self._verdicts:
                verdict.check()

    def is_over(self) -> bool:
        """Whether the device has carried it out."""
        return self._done is not None and self._done.done()

    def wait(self) -> None:
        """Lets the current stream wait for it."""
        assert self._done is not None
        self._device.wait(self._done)

    def synchronize(self) -> None:
        """Blocks the host until the device has carried it out."""
        assert self._done is not None
        self._done.synchronize()
        self.tell()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ZipCCLError as error:
            raise type(error)(f"{self._name}: {error}") from error


class DeviceWork(ZipCCLWork):
    """A call on a device. `wait` means what it means natively on a GPU: the current stream waits. The host waits until
    the call's steps are on their way, which with more than one rank it is when all have begun the call."""

    def __init__(self, result: list[Tensor], call: DeviceCall) -> None:
        super().__init__(result)
        self._call = call
        self._future_devices = call.path.device.future_devices

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Lets the current stream wait for the output."""
        super().wait(timeout)
        self._call.finish()
        return True

    def is_completed(self) -> bool:
        """Whether the device has carried it out, or it has failed."""
        return super().is_completed() and (self._error is not None or self._call.is_over())

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        """A future with devices takes the event of its result from the current stream, as NCCL's do: here from one that
        waits for this call, and for nothing else. One without is for the host, which knows of no stream."""
        device = self._call.path.device
        if self._error is not None or self._future_devices:
            with device.on(device.side_stream()):
                try:
                    if self._error is None:
                        self._call.wait()
                        self._call.tell()
                except Exception as error:  # raised by the future
                    self._error = error
                super()._resolve(future)
            return

        def resolve() -> None:
            try:
                self._call.synchronize()
            except Exception as error:  # raised by the future
                self._error = error
            super(DeviceWork, self)._resolve(future)

        threading.Thread(target=in_mode_of_caller(resolve), name="zipccl-future", daemon=True).start()

"""A device without a GPU: its streams are lists of steps, carried out as late and in as odd an order as events let."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RecordedEvent:
    def __init__(self, device: RecordedDevice) -> None:
        self._device, self.reached = device, False

    def done(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self._device.run_until(self)


class RecordedStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: deque[tuple[str, Callable[[], None] | RecordedEvent]] = deque()


class RecordedCopy:
    def __init__(self, event: RecordedEvent, holder: list[Tensor]) -> None:
        self._event, self._holder = event, holder

    def get(self) -> list[int]:
        self._event.synchronize()
        return self._holder[0].tolist()


class RecordedDevice:
    """Implements `zipccl_core.collective.device.layer.Device` on CPU tensors. What a step does happens when somebody
    synchronises with an event that is behind it, and no sooner than that: a wait that is missing leaves its steps
    undone. Among streams that could go on, chance decides, so steps that nothing orders change places.

    Steps of other streams run along with some probability: a reader that should have been waited for is overtaken.
    """

    def __init__(self, seed: int, chunk_numel: int = 1 << 26, eagerness: float = 0.3) -> None:
        self.chunk_numel, self.future_devices = chunk_numel, []
        self._random, self._eagerness = random.Random(seed), eagerness
        self._streams: list[RecordedStream] = []
        self._local = threading.local()
        self._lock = threading.RLock()
        self.capture = False

    # ---- what a Device does

    def current(self) -> RecordedStream:
        if not hasattr(self._local, "stream"):
            self._local.stream = self.new_stream()
        return self._local.stream

    @contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def new_stream(self) -> RecordedStream:
        with self._lock:
            self._streams.append(RecordedStream(f"stream {len(self._streams)}"))
            return self._streams[-1]

    def side_stream(self) -> RecordedStream:
        return self.new_stream()

    def capturing(self) -> bool:
        return self.capture

    def enqueue(self, step: Callable[[], None]) -> None:
        with self._lock:
            self.current().steps.append(("do", step))

    def record(self) -> RecordedEvent:
        event = RecordedEvent(self)
        with self._lock:
            self.current().steps.append(("record", event))
        return event

    def wait(self, event: RecordedEvent) -> None:
        with self._lock:
            self.current().steps.append(("wait", event))

    def read(self, numbers: Callable[[], Tensor]) -> RecordedCopy:
        holder: list[Tensor] = []
        self.enqueue(lambda: holder.append(numbers().clone()))
        return RecordedCopy(self.record(), holder)

    # ---- how it is carried out

    def run_until(self, event: RecordedEvent) -> None:
        while not event.reached:
            self._step(event)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Carries steps out meanwhile, whether or not anybody waits for them, as a real device does."""
        ended = threading.Event()

        def loop() -> None:
            while not ended.is_set():
                with self._lock:
                    ready = [stream for stream in self._streams if self._is_ready(stream)]
                    if ready:
                        self._carry_out(self._random.choice(ready))
                ended.wait(0 if ready else 1e-3)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def run_all(self) -> None:
        """Carries everything out."""
        for stream in list(self._streams):
            with self.on(stream):
                self.record().synchronize()

    def _step(self, wanted: RecordedEvent) -> None:
        with self._lock:
            if wanted.reached:  # by another thread
                return
            needed, ready = self._needed(wanted), [stream for stream in self._streams if self._is_ready(stream)]
            assert ready, "no stream can go on: an event is waited for that nobody has recorded"
            if self._random.random() > self._eagerness:
                ready = [stream for stream in ready if stream in needed] or ready
            self._carry_out(self._random.choice(ready))

    def _carry_out(self, stream: RecordedStream) -> None:
        """The next step of a stream; with the lock held."""
        kind, what = stream.steps.popleft()
        if kind == "do":
            with torch.no_grad():
                what()
        elif kind == "record":
            what.reached = True

    def _is_ready(self, stream: RecordedStream) -> bool:
        if not stream.steps:
            return False
        kind, what = stream.steps[0]
        return kind != "wait" or what.reached

    def _needed(self, wanted: RecordedEvent) -> list[RecordedStream]:
        """Streams that have to go on so that an event is reached."""
        needed, events = [], [wanted]
        while events:
            event = events.pop()
            for stream in self._streams:
                if stream not in needed and any(kind == "record" and what is event for kind, what in stream.steps):
                    needed.append(stream)
                    events += [what for kind, what in stream.steps if kind == "wait" and not what.reached]
        return needed

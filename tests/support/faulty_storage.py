"""A storage that fails, is slow or hangs when it is told to, and time that passes when it is told to."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fsdmoe.checkpoint.limited_storage import LimitedStorage, Limits, Waits

OPERATIONS = (
    "begin", "written_size", "commit", "discard", "names", "size", "read_into", "delete", "sweep", "point_at",
    "recover", "tidy",
)  # fmt: skip


class TestTime(Waits):
    """Nothing waits; ``hung`` says that all time has passed."""

    __test__ = False

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.hung = threading.Event()
        self.looks = threading.Semaphore(0)
        """One for each look at an operation that was still going on."""

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def until(self, done: threading.Event, seconds: float) -> bool:
        while not done.wait(0.001):
            if self.hung.is_set():
                self.looks.release()
                return False
        return True


class Faulty:
    """Another storage, with faults before, in and after what it does.

    ``fault`` is asked at each point, as ``("write", "before")``, ``("write", "inside")`` or ``("commit",
    "after")``; it may raise, or wait.
    """

    def __init__(self, inner: Any, fault: Callable[[str, str], None]) -> None:
        self.inner = inner
        self.fault = fault
        self.root = inner.root
        self.is_remote = inner.is_remote

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in OPERATIONS:
            return found

        def act(*args: Any, **kwargs: Any) -> Any:
            self.fault(name, "before")
            result = found(*args, **kwargs)
            self.fault(name, "after")
            return result

        return act

    def write(self, name: str, file: str, fill: Callable[[Any], Any]) -> Any:
        self.fault("write", "before")
        with self._opened(name, file) as handle:
            result = fill(handle)
        self.fault("write", "after")
        return result

    @contextlib.contextmanager
    def _opened(self, name: str, file: str) -> Iterator[Any]:
        with self.inner.create(name, file) as handle:
            yield _Interrupted(handle, self.fault)


class _Interrupted:
    def __init__(self, handle: Any, fault: Callable[[str, str], None]) -> None:
        self._handle = handle
        self._fault = fault

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self._handle.write(data[:half])
        self._fault("write", "inside")
        self._handle.write(data[half:])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Hang:
    """Waits at one point until it is let go."""

    def __init__(self, time: TestTime, operation: str, when: str) -> None:
        self.time = time
        self.point = (operation, when)
        self.go = threading.Event()

    def __call__(self, operation: str, when: str) -> None:
        if (operation, when) == self.point and not self.time.hung.is_set():
            self.time.hung.set()
            self.go.wait()


def random_faults(seed: int, share: float, error: Callable[[], Exception]) -> Callable[[str, str], None]:
    draw = random.Random(seed)

    def fault(operation: str, when: str) -> None:
        if draw.random() < share:
            raise error()

    return fault


def limited(inner: Any, fault: Callable[[str, str], None], retries: int, time: TestTime) -> LimitedStorage:
    return LimitedStorage(Faulty(inner, fault), Limits(retries, 300.0, time))  # type: ignore[arg-type]

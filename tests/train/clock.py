"""Clocks that replace the module `time` in tests, so that results do not depend on the machine."""


class Clock:
    """A monotonic clock that moves only when a test adds to `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Ticking(Clock):
    """A clock that moves by `tick` seconds at every call."""

    def __init__(self, tick: float) -> None:
        super().__init__()
        self.tick = tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

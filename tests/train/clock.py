"""Clocks for tests, in the place of the module `time`: what they say does not depend on the machine."""


class Clock:
    """A monotonic clock that only work moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Ticking(Clock):
    """A clock that moves by `tick` seconds whenever it is asked."""

    def __init__(self, tick: float) -> None:
        super().__init__()
        self.tick = tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

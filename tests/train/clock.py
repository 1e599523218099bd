"""A clock that replaces the module `time` in tests, so that results do not depend on the machine."""


class Clock:
    """A monotonic clock that moves by `tick` seconds at every call, and when a test adds to `now`."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

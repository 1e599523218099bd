"""Accuracy on held-out images: what `estimate` finds during a run, and `exact` when it has ended. Without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Fractions of `images`: right, and right with a radius above each of the radii."""

    images: int
    clean: float
    certified: dict[str, float]

    @property
    def score(self) -> float:
        """What selection compares: the certified fraction at the first radius."""
        return next(iter(self.certified.values()))

    def told(self, how: str) -> str:
        """In words; how radii were obtained, "estimated" or "exact", is always said."""
        certified = "  ".join(f"{name}: {fraction:.1%}" for name, fraction in self.certified.items())
        return f"clean {self.clean:.1%}, certified ({how}) {certified}"

"""Durations as people write them: 90s, 30m, 2h, 1h30m."""

import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile(r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?")


def parse_duration(text: str) -> float:
    """Seconds: "90s" → 90, "1h30m" → 5400, "0.5s" → 0.5."""
    match = _FORM.fullmatch(text.strip().lower())
    try:
        if match is None or not any(match.groups()):
            raise ValueError
        return sum(float(n) * unit for n, unit in zip(match.groups(), _UNITS.values(), strict=True) if n)
    except ValueError:
        raise ValueError(f"a duration is written as 90s, 30m, 2h or 1h30m, not {text!r}") from None


def format_duration(seconds: float) -> str:
    """ "42s", "3m05s", "2h07m", "1d03h": the two greatest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for (big, size), (small, part) in zip(list(_UNITS.items())[:-1], list(_UNITS.items())[1:], strict=True):
        if whole >= size:
            return f"{whole // size}{big}{whole % size // part:02d}{small}"
    raise AssertionError(whole)

"""Units and bounds that several packages share. Times are int64 milliseconds since the Unix epoch, UTC."""

from __future__ import annotations

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

#: ``hidden_from`` of an event that nothing supersedes, and the open upper bound of arrival numbers.
NEVER = (1 << 63) - 1

#: The upper bits of an arrival number are the epoch of the recent tier that gave it; this many are left for counting.
EPOCH_BITS = 40

#: The longest string user id, in UTF-8 bytes (inclusive).
MAX_USER_BYTES = 255


def format_bytes(n: float) -> str:
    """``1536`` -> ``'1.5 KB'`` (powers of 1,000, as disks are sold)."""
    for unit in ("B", "KB", "MB", "GB"):
        text = f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        if abs(float(text.split()[0])) < 1000:
            return text
        n /= 1000
    return f"{n:.1f} TB"

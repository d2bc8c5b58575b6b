"""How many rows fit: learned from the sub-batches that ran and those that ran out of memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchsplit.errors import CutError

log = logging.getLogger("batchsplit")

PATIENCE = 10  # clean steps before a larger size is tried; doubled each time that it did not fit
LONGEST = 1_000
EDGE = 10  # a size that has failed before is tried again after so many times as many: memory may have become free


@dataclass
class Known:
    """What is known of one padded width."""

    rows: int  # at most so many a sub-batch
    fits: int = 0  # the most that ran
    failed: int | None = None  # the fewest that ran out of memory
    clean: int = 0  # steps since the last change
    patience: int = PATIENCE


class Sizes:
    """The most rows that fit in a sub-batch, by padded width.

    Activations take `rows × (a × width + b × width²)` bytes: what a row has at each position, and what it has for each
    pair of them (attention). With the memory there is for them as the unit, a width's limit says
    `1 / (limit × width) = a + b × width`, a line, fitted through the widths whose limit is known. It gives the first
    guess at a width that was not seen yet; from then on that width has a limit of its own.

    Example:
        >>> from batchsplit.fitting import Sizes
        >>> sizes = Sizes()
        >>> sizes.failed(100, rows=16)
        >>> sizes.limit(100), sizes.limit(50), sizes.limit(400)
        (8, 16, 2)
    """

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}

    def limit(self, width: int) -> int | None:
        """At most so many rows a sub-batch of this width; None where nothing is known to set a limit."""
        own = self.known.get(width)
        return own.rows if own is not None else self._fitted(width)

    def failed(self, width: int, rows: int) -> None:
        """Note that a sub-batch ran out of memory, and lower the limit of its width below its rows."""
        own = self.known.setdefault(width, Known(rows))
        if 0 < own.fits < rows:  # a size was tried too early
            own.patience = min(2 * own.patience, LONGEST)
        if own.fits >= rows:  # less memory is free than there was
            own.fits = 0
        own.failed = rows if own.failed is None else min(own.failed, rows)
        own.rows = min(own.rows, own.fits or (rows + 1) // 2)
        own.clean = 0
        log.warning("out of memory with %s: now at most %d", _text(rows, width), own.rows)

    def ran(self, width: int, largest: int, rows: int) -> None:
        """Note that sub-batches of this width ran, the largest with so many rows.

        `rows` is how many the batch has, if the limit held it back and nothing ran out; after enough such steps the
        limit grows. Otherwise it is 0.
        """
        limit = self.limit(width)
        if limit is None:
            return
        held = rows > limit
        own = self.known.get(width)
        if own is None:
            if not held:
                return
            own = self.known[width] = Known(limit)
        own.fits = max(own.fits, largest)
        if own.failed is not None and own.fits >= own.failed:
            own.failed = None
        if not held:
            return
        own.clean += 1
        larger = _larger(own, rows)
        known_to_fail = own.failed is not None and larger >= own.failed
        if own.clean >= own.patience * (EDGE if known_to_fail else 1):
            log.info("%d clean steps: now trying %s", own.clean, _text(larger, width))
            own.rows, own.clean = larger, 0

    def _fitted(self, width: int) -> int | None:
        seen = [(w, known.rows) for w, known in self.known.items() if w > 0]
        if not seen or width < 1:
            return None
        a, b = _line(seen)
        guess = int(1 / (width * (a + b * width)) + 1e-9)
        least = max((rows for w, rows in seen if w >= width), default=1)
        narrower = [known.failed for w, known in self.known.items() if 0 < w <= width]
        most = min((failed - 1 for failed in narrower if failed is not None), default=guess)
        return max(min(max(guess, least), most), 1)

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain numbers."""
        return {"widths": {width: asdict(known) for width, known in self.known.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what was known when the state was taken.

        Raises:
            CutError: the state is of another kind.
        """
        try:
            self.known = {int(width): Known(**known) for width, known in state["widths"].items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CutError(f"this is no state of learned sizes ({error!r}).") from error


def _larger(own: Known, rows: int) -> int:
    """The next size to try: half way to what failed, and enough that the batch takes one sub-batch fewer."""
    fewer = -(-rows // (-(-rows // own.rows) - 1))
    if own.failed is None:
        return max(fewer, min(2 * own.rows, rows))
    return max(fewer, min((own.rows + own.failed) // 2, rows))


def _line(seen: list[tuple[int, int]]) -> tuple[float, float]:
    """The a ≥ 0 and b ≥ 0 of `1 / (limit × width) = a + b × width` with the least squared error."""
    widths = np.array([w for w, _ in seen], dtype=float)
    values = 1 / (widths * np.array([rows for _, rows in seen], dtype=float))
    b = 0.0
    if len(seen) > 1:
        b = float(((widths - widths.mean()) * (values - values.mean())).sum() / ((widths - widths.mean()) ** 2).sum())
    a = float(values.mean() - b * widths.mean())
    if b < 0:
        return float(values.mean()), 0.0
    if a < 0:
        return 0.0, float((values * widths).sum() / (widths**2).sum())
    return a, b


def _text(rows: int, width: int) -> str:
    return f"{rows} {'row' if rows == 1 else 'rows'}" + (f" of width {width}" if width else "")

"""Leaves that are cut as the user said: by a registered type, by a function, or entry by entry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from batchsplit.containers import lookup
from batchsplit.errors import LeafError
from batchsplit.layout import Packed, Registered, normal
from batchsplit.leaves import Dense, Kind, Made, RowList, Spans, has_numbers, is_offsets, is_plain, like_list
from batchsplit.plan import offsets


class Own(Kind):
    """A leaf of a type that the user registered."""

    def __init__(self, cls: type, how: Registered) -> None:
        self.how = how
        self.text, self.why = "per row", f"as {cls.__name__} was registered"

    def count(self, leaf: Any) -> int:
        rows = self.how.count(leaf)
        if isinstance(rows, bool) or not hasattr(rows, "__index__") or int(rows) < 0:
            raise LeafError(f"count of the registered {type(leaf).__name__} gave {rows!r}, not a number of rows.")
        return int(rows)

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        def part(rows: slice) -> Any:
            taken = self.how.take(leaf, rows)
            if self.count(taken) != rows.stop - rows.start:
                raise LeafError(
                    f"take of the registered {type(leaf).__name__} gave {self.count(taken)} rows for "
                    f"slice({rows.start}, {rows.stop}); it has to give those rows and no others."
                )
            return taken

        return Made(part, spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        return self.how.join(list(parts))


class ByFunction(Kind):
    """A leaf that the user's own function cuts: (leaf, rows) -> part."""

    text, why = "cut by your function", "as declared"
    bears_rows = False

    def __init__(self, function: Callable[[Any, slice], Any]) -> None:
        self.function = function

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return Made(lambda rows: self.function(leaf, rows), spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if like is None:
            raise LeafError("a leaf cut by your own function can't be joined: nobody knows the way back.")
        return like  # the function has no inverse, so the batch's own leaf is given back

    def fits(self, leaf: Any, rows: int) -> bool:
        return True


class PackedEntries(Kind):
    """A leaf of which row i owns the next counts[i] entries; or the running offsets of such entries."""

    bears_rows = False  # not by itself: its counts do

    def __init__(self, marker: Packed, path: str) -> None:
        self.counts = marker.counts
        self.path = path
        self.text, self.why = "per row, the entries it owns", str(marker)

    def counts_of(self, batch: Any, memo: dict[Any, Any]) -> list[int]:
        """How many entries each row owns: one whole number a row."""
        key = self.counts if isinstance(self.counts, (str, int)) else id(self.counts)
        if key not in memo:
            memo[key] = self._read_counts(batch)
        return memo[key]

    def _read_counts(self, batch: Any) -> list[int]:
        found = self._found(batch) if isinstance(self.counts, str) else self.counts(batch)
        numbers = found.tolist() if has_numbers(found) else found
        whole = isinstance(numbers, (list, tuple)) and all(type(n) is int and n >= 0 for n in numbers)
        if not whole:
            raise LeafError(
                f'the counts of packed leaf "{self.path}" are {_brief(numbers)}: '
                "they have to be one whole number, 0 or more, for each row."
            )
        return list(numbers)

    def _found(self, batch: Any) -> Any:
        try:
            return lookup(batch, normal(self.counts))
        except KeyError as error:
            raise LeafError(f'packed({self.counts!r}) for "{self.path}": no such leaf; {error.args[0]}') from None

    def rows_of(self, leaf: Any, batch: Any, memo: dict[Any, Any]) -> int:
        """The rows of the batch, as the counts have it."""
        if not isinstance(self.counts, int):
            return len(self.counts_of(batch, memo))
        entries = len(leaf)
        if (entries - 1) % self.counts == 0 and is_offsets(leaf):
            entries -= 1
        if entries % self.counts:
            raise LeafError(f'packed leaf "{self.path}" has {len(leaf)} entries, no multiple of {self.counts} a row.')
        return entries // self.counts

    def fits(self, leaf: Any, rows: int) -> bool:
        # Its sums are checked at each cut.
        return isinstance(leaf, (list, tuple, deque)) or (is_plain(leaf) and leaf.ndim > 0)

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        rows = sum(spans.sizes)
        counts = [self.counts] * rows if isinstance(self.counts, int) else self.counts_of(spans.batch, spans.memo)
        if len(counts) != rows:
            raise LeafError(f'the counts of packed leaf "{self.path}" are {len(counts)} numbers for {rows} rows.')
        ends = offsets(counts)
        length, total = len(leaf), ends[-1]
        if length == rows + 1 and is_offsets(leaf) and leaf.tolist() == ends:  # of the rows' entries: cu_seqlens
            return [leaf[s.start : s.stop + 1] - leaf[s.start] for s in spans.slices]
        if length == total + 1 and is_offsets(leaf):  # of entries that lie elsewhere: cu_seqlens of several texts a row
            return [leaf[ends[s.start] : ends[s.stop] + 1] - leaf[ends[s.start]] for s in spans.slices]
        if length != total:
            raise LeafError(
                f'packed leaf "{self.path}" has {length} entries, but its counts add up to {total}; '
                "the counts say how many entries of its first axis each row owns."
            )
        if isinstance(leaf, (list, deque)):
            return Made(lambda s: like_list(leaf, list(leaf)[ends[s.start] : ends[s.stop]]), spans.slices)
        return [leaf[ends[s.start] : ends[s.stop]] for s in spans.slices]

    def join(self, parts: list[Any], like: Any = None) -> Any:
        entries = sum(map(len, parts)) - len(parts) + 1  # if they are offsets, which each have one more
        if len(parts) > 1 and like is not None and len(like) == entries and is_offsets(like):
            lasts = offsets([int(part[-1]) for part in parts])
            parts = [parts[0], *(part[1:] + last for part, last in zip(parts[1:], lasts[1:-1], strict=True))]
        return RowList().join(parts) if isinstance(parts[0], (list, tuple, deque)) else Dense().join(parts)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""How many rows each sub-batch gets: integers only, no tensor in sight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, groupby, pairwise

from batchsplit.errors import CutError


def check_limit(name: str, value: object) -> int:
    """Return `value` if it is a whole number of at least 1, else raise a CutError that names the argument.

    >>> check_limit("rows", 8)
    8
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise CutError(f"{name}={value!r}: a limit is a whole number of at least 1; write {name}=8, say.")
    number = value.__index__()  # type: ignore[attr-defined]
    if number < 1:
        unit = {"rows": "1 row", "area": "1 padded position", "parts": "1 part"}.get(name, "1")
        none = f", or {name}=None for no cut" if name == "rows" else ""
        subject = "a cut" if name == "parts" else "a group" if name == "batches" else "a sub-batch"
        raise CutError(f"{name}={number}: {subject} needs at least {unit}; write {name}=1 or more{none}.")
    return number


def even_sizes(rows: int, parts: int) -> list[int]:
    """Sizes of `parts` sub-batches that differ by at most 1, the larger ones first; never an empty one.

    >>> even_sizes(10, 3), even_sizes(3, 5)
    ([4, 3, 3], [1, 1, 1])
    """
    parts = min(parts, rows)
    if parts == 0:
        return []
    size, larger = divmod(rows, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def limited_sizes(rows: int, limit: int, sizes: str = "even") -> list[int]:
    """Sizes of the fewest sub-batches of at most `limit` rows: all alike ("even") or all full but the last ("full").

    >>> limited_sizes(10, 4), limited_sizes(10, 4, "full")
    ([4, 3, 3], [4, 4, 2])
    """
    if sizes == "even":
        return even_sizes(rows, -(-rows // limit))
    full, rest = divmod(rows, limit)
    return [limit] * full + [rest] * (rest > 0)


def shrunk(sizes: Sequence[int], limit: int, kept: Collection[int] = ()) -> list[int]:
    """Sizes of at most `limit` rows in place of larger ones; sub-batches that are `kept` (by index) stay as they are.

    What is too large is cut anew together with its neighbours, up to the next one kept.

    >>> shrunk([8, 8, 8], 5), shrunk([8, 8, 8], 5, kept=[0])
    ([5, 5, 5, 5, 4], [8, 4, 4, 4, 4])
    """
    result: list[int] = []
    for stays, run in groupby(range(len(sizes)), key=lambda i: i in kept):
        own = [sizes[i] for i in run]
        result += own if stays or max(own) <= limit else limited_sizes(sum(own), limit)
    return result


def shared_out(parts: int, rows: Sequence[int]) -> list[int]:
    """How many of `parts` sub-batches each of several loader batches gets: at least 1, then where most rows are left.

    >>> shared_out(4, [5, 5, 2])
    [2, 1, 1]
    """
    if len(rows) == 1:
        return [max(1, min(parts, rows[0]))]
    given = [1] * len(rows)
    queue: list[tuple[float, int]] = [(-count, i) for i, count in enumerate(rows) if count > 1]  # the largest sub-batches first
    heapify(queue)
    for _ in range(parts - len(rows)):
        if not queue:
            break
        _, i = queue[0]
        given[i] += 1
        if given[i] < rows[i]:
            heapreplace(queue, (-rows[i] / given[i], i))
        else:
            heappop(queue)
    return given


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each sub-batch starts, and where the last one ends.

    >>> offsets([4, 3, 3])
    [0, 4, 7, 10]
    """
    return list(accumulate(sizes, initial=0))


def ranges(sizes: Sequence[int]) -> list[slice]:
    """The rows of each sub-batch as slices.

    >>> ranges([2, 1])
    [slice(0, 2, None), slice(2, 3, None)]
    """
    return [slice(a, b) for a, b in pairwise(offsets(sizes))]

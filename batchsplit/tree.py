"""A batch as read: its containers and leaves, which take later batches apart and build parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from batchsplit.codecs import Codec
from batchsplit.containers import codec_of
from batchsplit.layout import Path
from batchsplit.leaves import DECLARED_SHARED, Kind


@dataclass
class Leaf:
    """One leaf, as read."""

    path: Path
    type: type
    kind: Kind
    other: str = ""  # the `layout` line of another possible reading, where the shapes allow one
    container: bool = False  # not a leaf: a container that others of its kind are built from

    def gather(self, value: Any, into: list[Any]) -> bool:
        into.append(value)
        return type(value) is self.type or self.kind is DECLARED_SHARED

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def build(self, values: Sequence[Any]) -> Any:
        return values[0]

    def build_all(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        return (row[0] for row in rows)

    def fill(self, values: Iterator[Any]) -> Any:
        return next(values)


class Branch:
    """One container, as read: gathers the leaves of a batch, and builds a part from theirs."""

    def __init__(self, cls: type, codec: Codec, keys: tuple[Any, ...], children: list[Leaf | Branch]) -> None:
        self.type, self.codec, self.keys, self.children = cls, codec, keys, children
        self.flat = all(isinstance(child, Leaf) for child in children)

    def gather(self, value: Any, into: list[Any]) -> bool:
        """Append the leaves in order (before them the container itself, where it is needed to build another)."""
        if type(value) is not self.type or codec_of(value) is not self.codec:
            return False
        keys, values = self.codec.take(value)
        if keys != self.keys:
            return False
        if not self.codec.plain:
            into.append(value)
        return all(child.gather(v, into) for child, v in zip(self.children, values, strict=True))

    def leaves(self) -> Iterator[Leaf]:
        if not self.codec.plain:
            yield Leaf((), self.type, DECLARED_SHARED, container=True)
        for child in self.children:
            yield from child.leaves()

    def build(self, values: Sequence[Any]) -> Any:
        """A container of these leaves."""
        if self.flat and self.codec.plain:  # the usual case, and the fastest
            return self.codec.make(None, self.keys, values)
        return self.fill(iter(values))

    def build_all(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """A container of each row of leaves: as `build`, one after the other, for little more than the containers cost."""
        if self.flat and self.type is tuple:
            return iter(rows)
        if self.flat and self.type is dict:
            return map(dict, map(zip, repeat(self.keys), rows))
        return map(self.build, rows)

    def fill(self, values: Iterator[Any]) -> Any:
        original = None if self.codec.plain else next(values)
        if self.flat:
            return self.codec.make(original, self.keys, list(islice(values, len(self.children))))
        return self.codec.make(original, self.keys, [child.fill(values) for child in self.children])

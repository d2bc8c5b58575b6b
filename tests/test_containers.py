"""Containers keep their type, the order of their keys, and what else they carry."""

from __future__ import annotations

import collections
import dataclasses
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from batchsplit import BatchCutter, CutError, join
from batchsplit.containers import leaves_of, lookup, map_leaves
from kinds import Pair, Record, difference


def x() -> torch.Tensor:
    return torch.arange(10.0).view(5, 2)


def y() -> torch.Tensor:
    return torch.arange(5)


def parts(batch: Any, **settings: Any) -> list[Any]:
    """The data of a batch's sub-batches, after what has to hold for every container."""
    before = map_leaves(lambda leaf: leaf, batch)
    cut = BatchCutter(rows=2, **settings).cut(batch)
    datas = [sub.data for sub in cut]
    assert all(type(data) is type(batch) for data in datas) and type(join(cut)) is type(batch)
    assert all(type(sub.to("cpu").data) is type(batch) for sub in cut)
    assert not difference(join(cut), batch) and not difference(before, batch)
    return datas


class Attributes(dict):
    """The idiom that makes items attributes: the dict is its own __dict__."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class ItemsAsAttributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Twins(dict):
    """Each item is an attribute as well; and the constructor wants an argument."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


class Wrapped(MutableMapping[str, Any]):
    def __init__(self, items: Mapping[str, Any], tag: str | None = None) -> None:
        self._items, self.tag = dict(items), tag

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize(
    "make",
    [
        dict,
        OrderedDict,
        UserDict,
        MappingProxyType,
        ChainMap,
        Wrapped,
        lambda items: defaultdict(list, items),
        lambda items: Attributes(**items),
        ItemsAsAttributes,
    ],
)
def test_mappings(make: Callable[[dict[str, Any]], Any]) -> None:
    batch = make({"z": x(), "a": y(), "none": None, "empty": {}})
    for data in parts(batch):
        assert list(data) == list(batch) and len(data["z"]) == len(data["a"])
        assert data["none"] is None and data["empty"] == {}
    assert isinstance(batch["z"], torch.Tensor) and len(batch["z"]) == 5


def test_a_defaultdict_keeps_its_factory_and_a_counter_its_counts() -> None:
    for data in parts({"d": defaultdict(list, x=x()), "c": Counter("abca")}):
        assert data["d"]["new"] == [] and data["c"].most_common(1) == [("a", 2)]


def test_items_that_are_attributes_too_are_cut_in_both_places() -> None:
    for data in parts(Attributes(x=x())):
        assert data.x is data["x"]
    batch = Twins("train")
    batch["x"] = x()
    for data in parts(batch):
        assert data.x is data["x"] and data.tag == "train"
    assert len(batch.x) == 5  # type: ignore[attr-defined]


def test_tensors_that_hang_on_a_container_are_leaves() -> None:
    batch = Twins("train")
    batch["x"] = x()
    batch.lengths = y()  # type: ignore[attr-defined]
    assert [data.lengths.tolist() for data in parts(batch)] == [[0, 1], [2, 3], [4]]
    batch.lengths = torch.arange(7)  # type: ignore[attr-defined]
    with pytest.raises(CutError, match=r'batch.lengths has 7.*layout=\{"lengths": SHARED\}'):
        BatchCutter(rows=2).cut(batch)


def test_a_mapping_keeps_its_attributes_and_not_its_inner_store() -> None:
    batch = {"rows": Wrapped({"x": x()}, tag="train"), "options": Wrapped({"top": 1}, tag="options")}
    for data in parts(batch):
        assert data["rows"].tag == "train" and data["options"].tag == "options"
        data["options"]["top"] = data["rows"]["x"] = 2
    assert batch["options"]["top"] == 1 and len(batch["rows"]["x"]) == 5


class Closed(Mapping[str, Any]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, key: str) -> Any:
        return x()

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class Frozen(dict):
    """Takes no items, and its constructor and its copies want something else."""

    def __new__(cls, items: dict[str, Any], why: str) -> Frozen:
        new = super().__new__(cls)
        dict.update(new, items)
        return new

    def __init__(self, items: dict[str, Any], why: str) -> None:
        self.why = why

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def test_a_dict_is_built_past_its_own_code() -> None:
    assert [(data.why, len(data["x"])) for data in parts(Frozen({"x": x()}, "just so"))] == [
        ("just so", 2),
        ("just so", 2),
        ("just so", 1),
    ]


def test_a_mapping_that_can_not_be_built_again_is_an_error() -> None:
    with pytest.raises(CutError, match=r"a Closed can't be built again.*register\(Closed, count=") as caught:
        list(BatchCutter(rows=2).cut(Closed(3)))
    assert "plain dict" in str(caught.value)


# Tuples and lists


class Tagged(Pair):
    """A subclass of a namedtuple with other arguments and attributes."""

    tag: str

    def __new__(cls, x: Any, y: Any, tag: str) -> Tagged:
        new = super().__new__(cls, x, y)
        new.tag = tag
        return new

    @property
    def rows(self) -> int:
        return len(self.x)


class Triple(tuple):
    """A plain tuple subclass."""


class Listed(list):
    """A list subclass."""


def test_b04_a_namedtuple_stays_one() -> None:
    class Fields(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    for sub in BatchCutter(rows=2).cut(Fields(x=torch.zeros(4, 2), y=torch.arange(4))):
        assert type(sub.data) is Fields and sub.data.x.shape == (2, 2) and len(sub.data.y) == 2
    for data in parts(Tagged(x(), y(), "train")):
        assert data.tag == "train" and data.rows == len(data.y)


def test_tuples_lists_and_deques() -> None:
    for data in parts((x(), [y(), x(), None], Triple([x(), 1]))):
        assert [len(leaf) for leaf in leaves_of(data) if isinstance(leaf, torch.Tensor)] == [len(data[0])] * 4
    batch = Listed([x(), y()])
    batch.tag = "train"  # type: ignore[attr-defined]
    assert all(data.tag == "train" for data in parts(batch))
    queue = deque([x(), y()], maxlen=7)
    assert all(data.maxlen == 7 for data in parts(queue))
    assert [list(data["q"]) for data in parts({"x": x(), "q": deque("abcde")})] == [["a", "b"], ["c", "d"], ["e"]]


def test_torch_sizes_and_return_types() -> None:
    for data in parts({"x": x(), "size": x().shape, "max": torch.max(x(), dim=1)}):
        assert type(data["size"]) is torch.Size and data["size"] == (5, 2)
        assert type(data["max"]) is torch.return_types.max and len(data["max"].indices) == len(data["x"])


# Dataclasses


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    y: Any = None


@dataclass
class FromDict(dict):
    x: Any = None


@dataclass
class Computed:
    x: torch.Tensor
    twice: torch.Tensor = field(init=False)
    calls: list[int] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2
        self.calls.append(1)

    @cached_property
    def rows(self) -> int:
        return len(self.x)


def test_b04_a_dataclass_is_rebuilt_field_by_field() -> None:
    record = Record(torch.zeros(5, 2), None)
    object.__setattr__(record, "made", "elsewhere")
    for data in parts(record):
        assert data.made == "elsewhere" and data.y is None and data.notes == {} and len(data.x) <= 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            data.x = 1  # type: ignore[misc]
    for data in parts(({"r": [Record(x(), (y(),)), Slotted(x())]}, 1)):
        assert torch.equal(data[0]["r"][0].x, data[0]["r"][1].x)


def test_b04_neither_init_nor_post_init_runs_again_and_caches_are_dropped() -> None:
    batch = Computed(x())
    assert batch.rows == 5
    for data in parts(batch):
        assert data.calls == [1] and torch.equal(data.twice, data.x * 2)
        assert data.rows == len(data.x), "the cached number of rows is that of the whole batch"
    assert batch.rows == 5 and batch.calls == [1]


def test_dataclasses_with_slots_or_from_dict_or_with_attributes_of_their_own() -> None:
    assert [data.x.shape for data in parts(Slotted(x(), y()))] == [(2, 2), (2, 2), (1, 2)]
    batch = FromDict(x())
    batch["k"] = y()
    assert [(len(data.x), len(data["k"])) for data in parts(batch)] == [(2, 2), (2, 2), (1, 1)]
    computed = Computed(x())
    computed.extra = y()  # type: ignore[attr-defined]
    assert [data.extra.tolist() for data in parts(computed)] == [[0, 1], [2, 3], [4]]


# Types of other packages


@pytest.fixture
def tokenizer() -> Any:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", pad_token="?")


@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_a_batch_encoding_keeps_its_encodings_row_by_row(tokenizer: Any, tensors: str | None) -> None:
    texts = ["a b", "b", "a b a", "b b b b", "a a"]
    batch = tokenizer(texts, return_tensors=tensors, padding=True)
    cut = BatchCutter(rows=2).cut(batch)
    for sub in cut:
        assert type(sub.data) is type(batch) and list(sub.data) == list(batch) and sub.data.is_fast
        for i, row in enumerate(range(5)[sub.where]):
            assert sub.data.tokens(i) == batch.tokens(row) and sub.data.word_ids(i) == batch.word_ids(row)
        assert len(sub.data.encodings) == sub.rows
        assert type(sub.to("cpu").data) is type(batch)
    joined = join(cut)
    assert joined.encodings == batch.encodings and joined.n_sequences == batch.n_sequences
    assert [list(map(int, row)) for row in joined["input_ids"]] == [list(map(int, row)) for row in batch["input_ids"]]


def test_batch_features_and_model_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    for data in parts(transformers.BatchFeature({"pixel_values": x(), "names": list("abcde")})):
        assert len(data.pixel_values) == len(data["names"])
    batch = outputs.SequenceClassifierOutput(logits=x(), hidden_states=(x(), x()))
    for sub in BatchCutter(rows=2).cut(batch):
        assert type(sub.data) is type(batch) and sub.data.loss is None and list(sub.data) == ["logits", "hidden_states"]
        assert sub.data.logits is sub.data["logits"] and len(sub.data.hidden_states[1]) == sub.rows
    joined = join(BatchCutter(rows=2).cut(batch))
    assert torch.equal(joined.logits, x()) and joined[1][0].shape == (5, 2)


# Walking


def test_lookup_names_the_nearest_path() -> None:
    batch = {"in": [Record(x(), {"mask": y()})], 3: "three"}
    assert lookup(batch, "in.0.y.mask") is batch["in"][0].y["mask"] and lookup(batch, "3") == "three"
    assert lookup(batch, "") is batch
    with pytest.raises(KeyError, match=r'did you mean "in\.0\.y\.mask"'):
        lookup(batch, "in.0.y.masks")


def test_containers_are_new_each_time_and_the_batch_stays_as_it_was() -> None:
    batch = {"names": list("abcde"), "options": ["o"], "in": {"x": x()}, "list": [x(), y()]}
    cut = BatchCutter(rows=2).cut(batch)
    for sub in cut:
        sub.data["names"].append("new")
        sub.data["options"].append("new")
        sub.data["list"].clear()
        sub.data["in"].update(new=1)
        del sub.data["names"]
    assert not difference(join(cut), batch) and len(batch["names"]) == 5 and batch["options"] == ["o"]
    assert [len(sub.data["names"]) for sub in cut] == [2, 2, 1] and all(sub.data["options"] == ["o"] for sub in cut)
    assert collections.Counter(map(type, leaves_of(batch))) == {str: 6, torch.Tensor: 3}

"""One forward written down: every operation with the shapes of its tensors, on fake tensors or on a few real rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from batchsplit.randomness.operations import RandomnessError, argument, draws_nothing, generator_of, seeded
from batchsplit.randomness.streams import host_states, set_host_states


@dataclass(frozen=True)
class Ref:
    """A tensor in a trace: its number in order of appearance, its shape, its strides, and whether it is a mask."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    mask: bool = False


@dataclass(frozen=True)
class Event:
    """An operation with its arguments (tensors as `Ref`) and what it gave back."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Ref]
    module: str

    @property
    def name(self) -> str:
        return self.op._schema.name.partition("::")[2]

    @property
    def tensors(self) -> list[Ref]:
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Ref)]

    def argument(self, name: str, default: Any = None) -> Any:
        value = argument(self.op, self.args, self.kwargs, name)
        return default if value is None else value


@dataclass
class Trace:
    """All events of one forward; the first `leaves` numbers are tensors of the batch itself."""

    rows: int
    leaves: int = 0
    events: list[Event] = field(default_factory=list)
    host_states: tuple[Any, ...] = ()


class Known(Protocol):
    """A random operation already learned: `whole_draws.WholeDraw`."""

    def fits(self, op: Any, args: Any, kwargs: Any, rows: int) -> bool: ...

    def draw(self, args: Any, kwargs: Any, where: slice, rows: int) -> Any: ...


class _Recorder(TorchDispatchMode):
    def __init__(self, trace: Trace, real: bool, known: Sequence[Known], whole: int) -> None:
        super().__init__()
        self.trace, self.real, self.known, self.whole = trace, real, list(known), whole
        self.modules: list[str] = []
        self.generators: dict[torch.Generator, torch.Tensor] = {}
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._made: set[int] = set()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: list[torch.Tensor] = []
        self._count = 0

    def ref(self, tensor: torch.Tensor, made: bool = False) -> Ref:
        number = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = self._count
            self._count += 1
            if made:
                self._made.add(number)
            if not self.real:
                self._kept.append(tensor)
        strides = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        return Ref(number, tuple(tensor.shape), strides, tensor.dtype == torch.bool)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given_args, given_kwargs = tree_map_only(torch.Tensor, self.ref, (args, kwargs))
        run = func
        if seeded(func) and not draws_nothing(func, args, kwargs):
            generator = generator_of(func, args, kwargs)
            if generator not in self.generators:
                self.generators[generator] = generator.get_state()
            known = self.known.pop(0) if self.known else None
            if known is not None and known.fits(func, args, kwargs, self.trace.rows):
                run = partial(_draw_as, known, self.trace.rows, self.whole)
            else:
                self.known.clear()
        self._keep_overwritten(func, args, kwargs)
        result = run(*args, **kwargs)
        views = any(returned.alias_info is not None for returned in func._schema.returns)
        given = [leaf for leaf in tree_leaves((given_args, given_kwargs)) if isinstance(leaf, Ref)]
        made = not views or not given or given[0].number in self._made
        results = [self.ref(out, made) for out in tree_leaves(result) if isinstance(out, torch.Tensor)]
        self.trace.events.append(Event(func, given_args, given_kwargs, results, " > ".join(self.modules)))
        return result

    def _keep_overwritten(self, func: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in func._schema.arguments]
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if "batch_norm" in func._schema.name:
            written |= {"running_mean", "running_var"}  # overwritten, though most schemas do not say so
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for tensor in tree_leaves(value) if name in written else ():
                lasting = isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor)
                if lasting and self._numbers.get(tensor) not in self._made:
                    with _disable_current_modes():
                        self._before.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        for generator, state in self.generators.items():
            generator.set_state(state)
        for tensor, before in reversed(self._before):
            tensor.detach().copy_(before)


def _draw_as(known: Known, rows: int, whole: int, *args: Any, **kwargs: Any) -> Any:
    return known.draw(args, kwargs, slice(0, rows), whole)


def record(
    loss_fn: Callable[[Any], Any],
    data: Any,
    rows: int,
    fake: bool,
    model: torch.nn.Module | None,
    known: Sequence[Known] = (),
    whole: int = 0,
) -> Trace:
    """Run `loss_fn(data)` once and write down its operations; nothing it changes on the way stays changed.

    What is `known` already is drawn for the `whole` batch, so that a forward steered by its draws takes its course.
    With `fake`, tensors have shapes and no values, so that the run costs no memory. Kept as they were: the random
    generators (torch's, Python's, numpy's), the attributes and buffers of every module that runs, tensors that real
    runs write into. Python objects that are changed in place (a list that a forward appends to) can't be.
    """
    trace = Trace(rows)
    recorder = _Recorder(trace, not fake, known, whole)
    before = host_states()
    with ExitStack() as stack:
        stack.callback(set_host_states, before)
        torch.clear_autocast_cache()  # with casts of parameters in it, this forward would leave them out,
        stack.callback(torch.clear_autocast_cache)  # and it would lend fake ones to the real run
        stack.callback(recorder.put_back)
        stack.enter_context(_modules_kept(recorder.modules, model))
        if fake:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            data = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)
            stack.enter_context(_no_validation())
            stack.enter_context(mode)
        for leaf in tree_leaves(data):
            if isinstance(leaf, torch.Tensor):
                recorder.ref(leaf)
        trace.leaves = recorder._count
        with recorder:
            loss_fn(data)
        trace.host_states = host_states()
    return trace


@contextmanager
def _no_validation() -> Iterator[None]:
    """torch.distributions checks its arguments by value, and fake tensors have none."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@contextmanager
def _modules_kept(path: list[str], model: torch.nn.Module | None) -> Iterator[None]:
    """Put every module's attributes, buffers and parameters back as they were; `path` says which module runs."""
    kept: dict[torch.nn.Module, tuple[dict[str, Any], ...]] = {}

    def keep(root: torch.nn.Module) -> None:
        for module in root.modules() if root not in kept else ():
            if module in kept:
                continue
            _refuse_unready(module)
            inner = (module._parameters, module._buffers, module._modules)
            kept[module] = (dict(module.__dict__), *(dict(part) for part in inner))
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                # No backward follows, and nothing is to be sent to other ranks.
                module.require_backward_grad_sync = module.require_forward_param_sync = False

    me = get_ident()  # the hooks are called for the modules of all threads

    def enter(module: torch.nn.Module, args: Any) -> None:
        if get_ident() == me:
            path.append(type(module).__name__)
            keep(module)

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        if get_ident() == me:
            path.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        if model is not None:
            keep(model)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, (attributes, *inner) in kept.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for part, before in zip((module._parameters, module._buffers, module._modules), inner, strict=True):
                part.clear()
                part.update(before)


def _refuse_unready(module: torch.nn.Module) -> None:
    """A module whose forward can't be run ahead, or does not draw what it says."""
    name = f"randomness='whole': {type(module).__name__}"
    if any(torch.nn.parameter.is_lazy(p) for p in module._parameters.values() if p is not None):
        raise RandomnessError(
            f"{name} has parameters without a shape yet, so the forward can't be run ahead; run the model once on any "
            "rows before the first step"
        )
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        raise RandomnessError(
            f"{name} is compiled by torch.compile, whose code draws other numbers than the forward it stands for; pass "
            "the module uncompiled, or use randomness='fresh'"
        )

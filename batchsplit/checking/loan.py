"""Stand-ins for everything that a forward could change, so that what the user owns is never touched.

For the time of a run every module holds copies: parameters and buffers (as float64 where wanted), tensors, arrays and
containers among its attributes. Afterwards the user's own objects are put back, the very same ones.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from batchsplit.checking.widening import Widening
from batchsplit.errors import CutError
from batchsplit.randomness.streams import Streams

INTERNALS = frozenset(nn.Module().__dict__)  # what torch itself keeps in every module
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, bytearray, np.ndarray)
Change = Callable[[nn.Module], Any]


class Loan:
    """A context in which `model`, and any other module that runs, works on stand-ins.

    `dtype=torch.float64` widens every floating tensor, also those that `loss_fn` closes over or makes on the way;
    `dtype=None` keeps the working precision. `prepare(model)` is called once the stand-ins are in place.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        prepare: Change | None = None,
        beside: dict[int, Any] | None = None,
    ) -> None:
        self.model, self.dtype, self._prepare = model, dtype, prepare
        self._beside = (
            {} if beside is None else beside
        )  # parameters that only the loss holds, in order of their first use
        self.widening = Widening(self._find, dtype)
        self._names = {module: name for name, module in model.named_modules()}
        self._kept: dict[
            nn.Module, tuple[dict[str, Any], dict[str, dict[Any, Any]]]
        ] = {}  # attributes; what is in them
        self._lent: dict[int, tuple[Any, Any]] = {}  # by identity: what the user owns, what stands in for it
        self._stack = ExitStack()

    def __enter__(self) -> Loan:
        with ExitStack() as stack:
            stack.callback(Streams.now().restore)
            stack.callback(self._put_back)
            for module in self.model.modules():
                self._keep(module)
            if self._prepare is not None:
                self._prepare(self.model)
            hook = register_module_forward_pre_hook(lambda module, args: self._keep(module))
            stack.callback(hook.remove)
            if self.dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of stand-ins that are not laid out as the originals (cuDNN), say
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):  # something may be compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self.widening)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The stand-ins that gradients flow to, by name, each once: the model's, then those that only a loss holds."""
        seen = set()
        for name, original in self._owned():
            stand_in = self._lent[id(original)][1]
            if id(stand_in) not in seen:
                seen.add(id(stand_in))
                yield name, stand_in
        for original, stand_in in list(self._lent.values()):
            if (
                original is not stand_in
                and isinstance(stand_in, Tensor)
                and stand_in.requires_grad
                and id(stand_in) not in seen
            ):
                seen.add(id(stand_in))
                place = self._beside.setdefault(id(original), (len(self._beside), original))[0]
                yield f"(beside the model) {place}: {tuple(original.shape)}", stand_in

    def _owned(self) -> Iterator[tuple[str, Tensor]]:
        for module, name in self._names.items():
            for key, p in self._kept[module][1]["_parameters"].items():
                if p is not None and p.requires_grad:
                    yield f"{name}.{key}".lstrip("."), p

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module that has stand-ins, with its qualified name (the class's where it is not the model's)."""
        for module in self._kept:
            yield self.name_of(module), module

    def changed_parameters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The stand-ins of a module's parameters that have changed since they were made, by name."""
        for key, own in self._kept[module][1]["_parameters"].items():
            now = module._parameters.get(key)
            with torch._C.DisableTorchFunction():  # the user's own, not what stands in for them
                changed = (
                    own is not None
                    and now is not None
                    and not torch.equal(self.widening.wide(own.detach()), now.detach())
                )
            if changed:
                yield key, module._parameters[key]  # type: ignore[misc]

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, f"({type(module).__name__} beside the model)")

    def _keep(self, module: nn.Module) -> None:
        if module in self._kept:
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise CutError(
                f"{self.name_of(module)} is scripted, and its parameters can't be lent: check it before scripting."
            )
        # Parameters, buffers, submodules and hooks: a forward that adds to them adds to torch's own dictionaries.
        inner = {
            key: dict(value) for key, value in vars(module).items() if key in INTERNALS and isinstance(value, dict)
        }
        self._kept[module] = dict(vars(module)), inner
        for part in (module._parameters, module._buffers):
            for key, value in part.items():
                part[key] = value if value is None else self.stand_in(value)
        for key, value in list(module.__dict__.items()):
            if key not in INTERNALS:
                module.__dict__[key] = self._copied(value)
        if isinstance(module, nn.parallel.DistributedDataParallel):  # nothing is to be sent to other ranks
            module.require_backward_grad_sync = module.require_forward_param_sync = False

    def _find(self, tensor: Tensor, missed: bool) -> Tensor | None:
        if id(tensor) in self._lent:
            return self._lent[id(tensor)][1]
        return self.stand_in(tensor) if missed else None

    def stand_in(self, own: Any) -> Any:
        """What stands in for a tensor of the user's: always the same one."""
        if id(own) not in self._lent:
            if nn.parameter.is_lazy(own):
                raise CutError("a parameter has no shape yet: run the model once on any rows before the check.")
            if hasattr(own, "full_tensor"):
                raise CutError("a parameter is sharded over ranks: check the unsharded model in one process.")
            with torch._C.DisableTorchFunction():
                new = self.widening.wide(own.detach().clone())
            if isinstance(own, nn.Parameter):
                new = nn.Parameter(new, requires_grad=own.requires_grad)
                vars(new).update(vars(own))
            elif own.requires_grad and own.is_leaf:
                new.requires_grad_()
            self._lent[id(own)] = (own, new)
            self._lent[id(new)] = (new, new)
        return self._lent[id(own)][1]

    def _copied(self, value: Any) -> Any:
        """A copy of what a forward may change in place; anything else as it is."""
        if isinstance(value, Tensor):
            return self.stand_in(value)
        if type(value) is tuple:
            return tuple(self._copied(item) for item in value)
        if id(value) in self._lent:
            return self._lent[id(value)][1]
        new: Any
        if isinstance(value, torch.Generator):
            new = value.clone_state()
        elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            new = copy.deepcopy(value)
        elif type(value) in CONTAINERS:
            new = copy.copy(value)
        else:
            return value
        self._lent[id(value)] = (value, new)  # before its items, which may refer to it
        if isinstance(value, (list, deque)):
            for i, item in enumerate(value):
                new[i] = self._copied(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                new[key] = self._copied(item)
        return new

    def _put_back(self) -> None:
        for module, (attributes, inner) in self._kept.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, before in inner.items():
                module.__dict__[key].clear()
                module.__dict__[key].update(before)

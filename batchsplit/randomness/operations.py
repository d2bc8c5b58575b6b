"""Random operations of torch: which there are, which can be drawn for a whole batch, and how.

Every operation that torch tags `nondeterministic_seeded` is sorted here, so that none goes unseen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from batchsplit.errors import CutError

FUSED = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
    "_triton_scaled_dot_attention", "_flash_attention_forward", "_efficient_attention_forward",
    "_cudnn_attention_forward",
}  # fmt: skip
FUSED_RNN = {"_cudnn_rnn", "miopen_rnn", "_lstm_mps"}
# Their draws stop when a value is accepted, so what a row uses up of the stream depends on the rows before it.
BY_VALUE = {"poisson", "binomial", "_standard_gamma", "_sample_dirichlet"}
RRELU = {"rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"}
DRAWS = {
    "bernoulli", "bernoulli_", "native_dropout", "_fused_dropout", "multinomial", "normal", "normal_",
    "normal_functional", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random", "random_",
    "uniform", "uniform_", "exponential", "exponential_", "geometric", "geometric_", "cauchy", "cauchy_",
    "log_normal", "log_normal_",
}  # fmt: skip
FACTORIES = {"rand", "randn", "randint", "normal"}
# What stands in for rows of other sub-batches in tensors whose values an operation reads.
STAND_IN = {"bernoulli": 0.5, "bernoulli_": 0.5, "normal": 1.0, "native_dropout": 1.0, "_fused_dropout": 1.0,
            "multinomial": 1.0, "randint_like": 1.0}  # fmt: skip


class RandomnessError(CutError):
    """A random operation that a sub-batch can't draw as the unsplit batch would."""


@cache
def seeded(op: Any) -> bool:
    """Whether the operation may draw from a generator (backward kernels and the choice of a kernel do not)."""
    name = base(op)
    return torch.Tag.nondeterministic_seeded in op.tags and not (
        name.endswith("_backward") or name in {"_fused_sdp_choice", "_flash_attention_forward_no_dropout_inplace"}
        or name in {"_cudnn_init_dropout_state", "_nested_tensor_softmax_with_shape"}
    )  # fmt: skip


def base(op: Any) -> str:
    """An operation's name without namespace and overload: `bernoulli_`."""
    return op._schema.name.partition("::")[2]


def argument(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value an operation was called with for one argument of its schema, its default where it was not given."""
    for position, formal in enumerate(op._schema.arguments):
        if formal.name == name:
            if name in kwargs:
                return kwargs[name]
            return args[position] if position < len(args) and not formal.kwarg_only else formal.default_value
    return None


def draws_nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call leaves the generator alone: no dropout in a fused kernel, RReLU outside training."""
    name = base(op)
    if name in FUSED:
        return not argument(op, args, kwargs, "dropout_p")
    if name in FUSED_RNN:
        return not argument(op, args, kwargs, "dropout") or not argument(op, args, kwargs, "train")
    if name in RRELU:
        return not argument(op, args, kwargs, "training")
    return False


def refusal(op: Any) -> str:
    """Why an operation can't be drawn row by row, and the way out; empty where it can."""
    name = base(op)
    if name in DRAWS:
        return ""
    if name in FUSED:
        return (
            "a fused attention kernel draws its dropout mask inside and shows no rows of it; run the attention with "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or with dropout 0 in it"
        )
    if name in FUSED_RNN:
        return (
            "a fused RNN kernel draws the dropout between its layers inside; stack one-layer RNNs with nn.Dropout "
            "between them, or run it under torch.backends.cudnn.flags(enabled=False)"
        )
    if name in BY_VALUE:
        return (
            "how much of the random stream a row uses depends on the values of the rows before it; draw it while "
            "the batch is made (in the collate function) and pass the sample as data"
        )
    if name in RRELU:
        return (
            "it draws for negative inputs only, so a row's noise depends on the rows before it; use LeakyReLU or PReLU"
        )
    if name == "randperm":
        return (
            "a permutation over the batch couples its rows; permute while the batch is made and pass the result as data"
        )
    return "batchsplit does not know how this operation draws"


def generator_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator a call draws from: the one it is given, else the default one of its device."""
    given = argument(op, args, kwargs, "generator")
    if given is not None:
        return given
    device = argument(op, args, kwargs, "device")
    tensor = next((value for value in args if isinstance(value, torch.Tensor)), kwargs.get("out"))
    if tensor is not None and device is None:
        device = tensor.device
    device = torch.device(device) if device is not None else torch.device("cpu")
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = getattr(torch, device.type)
    if not hasattr(module, "default_generators"):
        raise RandomnessError(f"randomness='whole' knows no generator of device {device}; use randomness='fresh'")
    return module.default_generators[module.current_device() if device.index is None else device.index]

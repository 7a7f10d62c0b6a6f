"""A stand-in for one GPU: tensors say that they are on cuda:0, and their numbers lie on
the CPU.

    env = environment(folder)   # for a new process: torch asks for a driver when it is
                                # imported
    install()                   # in that process, before megatron is imported
    with on_stand_in_gpu(): Trainer(...)

Code then takes the branches for a GPU, and each operation is checked as a GPU's would
be: tensors of two devices do not meet (DevicesMixed), except where CUDA lets them, and
a product of bytes is refused in all layouts but the one of cuBLASLt's kernels. The
operations that only CUDA has are computed from their definitions: products with another
output type, varlen_attn, the head's kernels (by their plain form). Since numbers are
real, a step can be compared with the same step on a CPU.

It shows nothing of kernels, of their precision, of memory, or of the order of streams.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten


class DevicesMixed(RuntimeError):
    """An operation got tensors of the GPU and of the CPU."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process with the stand-in, whose driver is compiled
    into `folder`.
    """
    library = folder / "libcuda.so.1"
    words = [
        "cc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
        "-o",
        str(library),
        str(HERE / "driver.c"),
    ]
    subprocess.run(words, check=True, timeout=60)
    return os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


class _Stream:
    """A stream or event: all that is asked of it has happened."""

    device = GPU
    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...
    def __getattr__(self, name: str) -> "Callable[..., _Stream]":
        return lambda *_, **__: self


def install() -> None:
    """Make torch.cuda answer for one GPU of compute capability 9.0."""
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        name="stand-in",
        uuid="stand-in",
        pci_domain_id=0xFFFF,  # of no device here
        pci_bus_id=0,
        pci_device_id=0,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "init": None,
        "_lazy_init": None,
        "_lazy_call": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "ipc_collect": None,
        "manual_seed": None,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "stream": _Stream(),
        "current_stream": _Stream(),
        "default_stream": _Stream(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.default_generators = (torch.Generator(),)
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(…, device="cuda") is made on the CPU and moved


class OnGpu(Tensor):
    """A tensor of the stand-in. in_truth: its numbers, on the CPU, with the same shape,
    strides and offset.
    """

    in_truth: Tensor

    @staticmethod
    def __new__(cls, in_truth: Tensor) -> "OnGpu":
        tensor: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            in_truth.size(),
            strides=in_truth.stride(),
            storage_offset=in_truth.storage_offset(),
            dtype=in_truth.dtype,
            layout=in_truth.layout,
            device=GPU,
        )
        tensor.in_truth = in_truth
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: "OnGpu") -> None:
        with torch._C.DisableTorchFunction():
            Tensor.data.__set__(self, other)
        self.in_truth = other.in_truth

    def record_stream(self, stream: object) -> None: ...

    def __repr__(self) -> str:
        return f"OnGpu({self.in_truth})"


def on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations whose indices may lie on the CPU when the tensor does not."""
MOVES = {aten.copy_.default, aten._to_copy.default}


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU. What it makes is on the GPU if it says so, or if
    its tensors are.
    """
    mine: list[OnGpu] = []
    others: list[Tensor] = []

    def truth(value: Any) -> Any:
        if on_gpu(value):
            mine.append(value)
            return value.in_truth
        if isinstance(value, Tensor) and value.dim() > 0:
            others.append(value)
        return value

    plain_args = _mapped(truth, args)
    plain = {name: _mapped(truth, value) for name, value in kwargs.items()}
    if mine and others and func not in MOVES and not (func in INDEXED and on_gpu(args[0])):
        raise DevicesMixed(
            f"{func}: {[(x.device.type, x.dtype, tuple(x.shape)) for x in (*mine, *others)]}"
        )
    device = kwargs.get("device")
    if func is aten.copy_.default:
        device = args[0].device
    to_gpu = bool(mine) if device is None else torch.device(device).type == "cuda"
    plain |= {"device": CPU} if kwargs.get("device") is not None else {}
    plain |= {"pin_memory": False} if kwargs.get("pin_memory") else {}
    act = ONLY_CUDA.get(func, func)
    if mine:
        act = STRICTER_THERE.get(func, act)
    out = act(*plain_args, **plain)
    known = {id(x.in_truth): x for x in mine}

    def placed(value: Any) -> Any:
        if id(value) in known:  # changed in place
            return known[id(value)]
        return OnGpu(value) if to_gpu and isinstance(value, Tensor) and not on_gpu(value) else value

    return _mapped(placed, out)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Map each value in lists and tuples. torch's own way through trees takes as long
    as the operations.
    """
    return (
        type(value)(_mapped(function, x) for x in value)
        if type(value) in (list, tuple)
        else function(value)
    )


def _parts(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, left: int | None
) -> Iterator[tuple[Any, ...]]:
    """Yield for each segment its slices, its queries, keys and values [heads, n,
    head_dim], and which keys are not seen.
    """
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert starts.dtype == key_starts.dtype == torch.int32
    shared = q.shape[1] // k.shape[1]
    for i in range(len(starts) - 1):
        own = slice(int(starts[i]), int(starts[i + 1]))
        theirs = slice(int(key_starts[i]), int(key_starts[i + 1]))
        n = own.stop - own.start
        m = theirs.stop - theirs.start
        keys, values = (
            t[theirs].float().repeat_interleave(shared, 1).transpose(0, 1) for t in (k, v)
        )
        beyond = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
        unseen = beyond > 0 if left is None or left < 0 else (beyond > 0) | (beyond < -left)
        yield own, theirs, q[own].float().transpose(0, 1), keys, values, unseen


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    scale: float | None,
    left: int | None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    sums = torch.empty(q.shape[1], len(q))
    for own, _theirs, queries, keys, values, unseen in _parts(q, k, v, starts, key_starts, left):
        scores = (queries @ keys.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(
            unseen, -torch.inf
        )
        sums[:, own] = scores.logsumexp(-1)
        out[own] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out, sums


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    scale: float | None,
    left: int | None,
) -> tuple[Tensor, ...]:
    """From `out` and `sums`, log-sum-exp of a query's scores [heads, tokens], as they
    are given: sinks change both.
    """
    found = [torch.zeros(t.shape) for t in (q, k, v)]
    scale = scale or q.shape[-1] ** -0.5
    for own, theirs, queries, keys, values, unseen in _parts(q, k, v, starts, key_starts, left):
        upstream, made = (t[own].float().transpose(0, 1) for t in (gradient, out))
        p = (
            (queries @ keys.transpose(1, 2) * scale - sums[:, own, None])
            .masked_fill(unseen, -torch.inf)
            .exp()
        )
        of_scores = (
            p
            * (upstream @ values.transpose(1, 2) - (upstream * made).sum(-1, keepdim=True))
            * scale
        )
        found[0][own] = (of_scores @ keys).transpose(0, 1)
        for whole, part in zip(
            found[1:],
            (of_scores.transpose(1, 2) @ queries, p.transpose(1, 2) @ upstream),
            strict=True,
        ):
            whole[theirs] = (
                part.transpose(0, 1).unflatten(1, (k.shape[1], -1)).sum(2)
            )  # over the heads that share it
    return tuple(t.to(q.dtype) for t in found)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    is_causal: bool,
    scale: float | None = None,
    window_size: Sequence[int] = (),
    enable_gqa: bool = False,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_attn::_varlen_attn, with what the flash kernel demands."""
    assert (list(window_size), enable_gqa) == ([-1, 0], q.shape[1] != k.shape[1])
    assert longest >= int(starts.diff().max())
    assert longest_keys >= int(key_starts.diff().max())
    return *_forward(q, k, v, starts, key_starts, scale, None), torch.zeros(2, dtype=torch.uint64)


def _attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    *_: object,
) -> tuple[Tensor, ...]:
    return _backward(gradient, q, k, v, out, sums, starts, key_starts, scale, None)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward, which takes either `is_causal` or a window."""
    assert (is_causal, window_size_right, dropout) == (window_size_left < 0, 0, 0)
    none = torch.zeros(0)
    return (
        *_forward(q, k, v, starts, key_starts, scale, window_size_left),
        torch.zeros(2),
        none,
        none,
    )


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    *_: object,
    scale: float | None = None,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    return _backward(gradient, q, k, v, out, sums, starts, key_starts, scale, window_size_left)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    assert q.shape[1] == k.shape[1], "the memory-efficient kernel lacks grouped queries"
    assert mask is None or mask.stride(-2) % 8 == 0, "its mask's rows are aligned"
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (
        scores.masked_fill(unseen, -torch.inf)
        if is_causal
        else scores + (0 if mask is None else mask)
    )


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    with_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_efficient_attention, which pads log-sum-exps to a
    multiple of 32.
    """
    scores = _scores(q, k, mask, is_causal, scale)
    sums = torch.nn.functional.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32))
    return scores.softmax(-1) @ v, sums, torch.zeros(()), torch.zeros(())


def _efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    needed: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    assert list(needed) == [True, True, True, False]
    p = (_scores(q, k, mask, is_causal, scale) - sums[..., : q.shape[2], None]).exp()
    of_scores = p * (gradient @ v.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True))
    of_scores = of_scores * (scale or q.shape[-1] ** -0.5)
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ gradient, None


def _into(into: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(into + a.to(dtype) @ b.to(dtype))


def _product_of_bytes(a: Tensor, b: Tensor) -> Tensor:
    """aten::_int_mm of int8, with what a GPU demands: the checks of _int_mm_out_cuda
    (aten/src/ATen/native/cuda/Blas.cpp), and what cuBLASLt's documentation of
    cublasLtMatmul demands for "IMMA kernels": the layout TN, addresses and leading
    dimensions that are multiples of 4. It computes the transposed product, so its first
    operand is `b`.
    """
    demands = {
        "two matrices of int8": a.dim() == b.dim() == 2 and a.dtype == b.dtype == torch.int8,
        "more than 16 rows": a.shape[0] > 16,
        "a first operand whose columns are a multiple of 8": a.shape[1] % 8 == 0 < a.shape[1],
        "a second operand whose columns are a multiple of 8": b.shape[1] % 8 == 0 < b.shape[1],
        "a first operand whose rows are contiguous": a.stride(1) == 1,
        "a second operand whose columns are contiguous": b.stride(0) == 1,
        "leading dimensions that are multiples of 4": a.stride(0) % 4 == b.stride(1) % 4 == 0,
        "addresses that are multiples of 4": a.data_ptr() % 4 == b.data_ptr() % 4 == 0,
    }
    missing = [what for what, met in demands.items() if not met]
    if missing:
        raise RuntimeError(f"CUDA error: CUBLAS_STATUS_NOT_SUPPORTED: a GPU needs {missing[0]}")
    return aten._int_mm.default(a, b)


ONLY_CUDA: dict[Any, Callable[..., Any]] = {
    aten._pin_memory.default: lambda values, device=None: values.clone(),
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.addmm.dtype_out: _into,
    aten._flash_attention_forward.default: _flash,
    aten._flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
STRICTER_THERE: dict[Any, Callable[..., Any]] = {aten._int_mm.default: _product_of_bytes}
"""Operations that CPUs have, too, which on a GPU demand more."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What does not come down to operations, or on another way than CUDA's."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        if name == "cuda":
            return first.to(GPU)
        if name == "tolist" and on_gpu(first):
            return first.in_truth.tolist()
        if name == "type" and on_gpu(first) and len(args) == 1:
            return first.in_truth.type().replace("torch.", "torch.cuda.")
        if func == Tensor.data.__set__ and on_gpu(args[1]) and not isinstance(first, OnGpu):
            func(*args)
            first.in_truth = args[1].in_truth
            return None
        if func == Tensor.data.__get__ and on_gpu(first):
            return first.detach()
        if func is torch.tensor:  # of scalars on the GPU
            args = (_mapped(lambda x: x.in_truth.item() if on_gpu(x) else x, first), *args[1:])
        if func is torch.nn.functional.scaled_dot_product_attention and on_gpu(first):
            return _dense_attention(*args[:3], **kwargs)
        return func(*args, **kwargs)


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """scaled_dot_product_attention by the kernels in models.attention.FUSED."""
    assert is_causal
    if enable_gqa:
        assert q.dtype in (
            torch.bfloat16,
            torch.float16,
        ), "the memory-efficient kernel lacks grouped queries"
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * (scale or q.shape[-1] ** -0.5)
    behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(behind, -torch.inf).softmax(-1).to(v.dtype) @ v


def _by_plain_form(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: computed(function, args, {})


@contextmanager
def plain_operations() -> Iterator[None]:
    """Compute on the stand-in, without attention and the head, whose imports take
    seconds.
    """
    with _Operations(), _Functions():
        yield


@contextmanager
def on_stand_in_gpu() -> Iterator[None]:
    """Compute on the stand-in. After `install` and the import of megarl's learner."""
    from torch.nn.attention import varlen  # noqa: F401  defines the operations

    from megarl.core.models.head import kernels, passes

    ONLY_CUDA[torch.ops.torch_attn._varlen_attn.default] = _attention
    ONLY_CUDA[torch.ops.torch_attn._varlen_attn_backward.default] = _attention_backward
    for name in ("reduce", "gradient"):
        setattr(kernels, name, _by_plain_form(getattr(passes, name)))
    with plain_operations():
        yield

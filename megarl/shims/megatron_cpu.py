"""Run megatron-core on CPU processes over gloo.

    run_on_cpu()              before the first import of megatron: redirects the
                              torch.cuda names that it uses to the CPU
    import megatron.core
    after_megatron_import()   once after it: its own tensors are made on the CPU, and
                              its optimiser accepts torch's Adam state

With a GPU, only six things are corrected: the import of DeepEP, AdamW's state before
its first step, the memory of an offloaded AdamW, the support for torch's AdamW,
routers' logits, and norms that are recomputed without Transformer Engine. The changes
are global to the process, so a server never shares one with a learner. The comment on
each change says what failed when it was left out.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

if TYPE_CHECKING:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

CPU = torch.device("cpu")
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3  # of malloc.h


def run_on_cpu() -> None:
    """Redirect the torch.cuda names that megatron-core uses to the CPU. Idempotent."""
    # With a GPU, too. megatron expects at most an ImportError of it, but in the GPU
    # stack's (sgl-deep-ep 0.1.2.post1, deep_ep/__init__.py) an assertion fails where
    # there is no CUDA toolkit (find_cuda_home) or NCCL is not that of its wheel
    # (check_nccl_so). Even imported it is of no use: megatron asks for
    # deep_ep.utils.EventOverlap, which it has elsewhere.
    sys.modules.setdefault("deep_ep", None)  # type: ignore[arg-type]
    if torch.cuda.is_available() or isinstance(torch.cuda.default_generators, _Generators):
        return
    # glibc maps new memory for each large tensor, and every page faults: 7 % of a
    # step's CPU time. Now 1 GiB is kept for reuse.
    libc = ctypes.CDLL(None)
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        libc.mallopt(option, 1 << 30)
    # Transformer Engine's AdamW and norms, which megatron uses if they are installed,
    # need a GPU ("no NVIDIA driver").
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    # This package is in the GPU stack. Without a driver it raises an OSError, where
    # megatron expects at most an ImportError.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    # megatron hands small functions (fused activations, routing) to torch.compile: on a
    # CPU a run of the C++ compiler in every process, and a failure where there is none.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # The CUDA generator is the CPU's: megatron saves, forks and restores it around
    # tensor-parallel regions.
    torch.cuda.default_generators = _Generators()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    # Without these two nothing fails: states and seeds are queued for the start of a
    # GPU, never set, and the queue grows.
    torch.cuda._lazy_call = lambda callback, **_: callback()
    torch.cuda.manual_seed = _seed
    # For the constructors of all layers; without: "no NVIDIA driver", or TypeError.
    torch.cuda.current_device = lambda: CPU
    # For the pipeline schedules' barriers and the checkpoint writer.
    torch.cuda.synchronize = lambda *_, **__: None
    # Gradient reduction asks for its stream. CPU work is synchronous: there is one
    # stream, and nothing to wait for.
    stream = _Stream()
    torch.cuda.current_stream = lambda *_, **__: stream
    # The dispatcher of tokens to experts copies token counts from the GPU on a stream
    # of its own.
    torch.cuda.Stream = _Stream
    torch.Tensor.cuda = lambda self, *_, **__: self
    # The distributed optimiser tells parameters apart by the text
    # 'torch.cuda.FloatTensor'.
    torch.Tensor.type = _naming_both_types(torch.Tensor.type)
    # Even disabled, torch.compile imports the whole compiler when megatron uses it as a
    # decorator: 2 CPU-seconds per process.
    compiler = torch.compile
    torch.compile = _not_compiled
    import megatron.core.jit  # noqa: F401

    torch.compile = compiler


@functools.cache
def after_megatron_import() -> None:
    """Make megatron's own tensors on the CPU, make its distributed optimiser work with
    torch.optim.AdamW (which it uses if no fused Adam is installed), and correct its
    routers' logits. Idempotent.
    """
    from megatron.core import utils
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, clip_grads, grad_scaler, optimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import router, token_dispatcher

    router.router_gating_linear = _logits_by(router.router_gating_linear)
    _state_before_first_step(DistributedOptimizer)
    _copies_of_shards_only(HybridDeviceOptimizer)
    HybridDeviceOptimizer._move_new_state_to_right_device = _to_their_parameters
    if not random.HAVE_TE:
        _recomputed_without_transformer_engine(random.CheckpointWithoutOutput)
    cuda = torch.cuda.is_available()
    if not cuda or USING_PYTORCH_OPTIMIZER:
        _own_step_for_each_parameter(DistributedOptimizer)
    if cuda:
        return
    # These modules build tensors with device="cuda". Only they get the changed
    # factories: transformers, which compares torch's factories by identity while it
    # loads a model, would otherwise silently leave rotary frequencies uninitialised.
    on_cpu = _Overlay(
        torch,
        tensor=_made_on_cpu(torch.tensor),
        zeros=_made_on_cpu(torch.zeros),
        empty_like=_made_on_cpu(torch.empty_like),
    )
    for module in (
        clip_grads,
        grad_scaler,
        optimizer,
        schedules,
        param_and_grad_buffer,
        utils,
        exchange_utils,
    ):
        module.torch = on_cpu
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, _unless_alone(getattr(param_and_grad_buffer, name)))
    # Loading a checkpoint makes room for others' parts.
    ShardedTensor.init_data.__defaults__ = (_made_on_cpu(torch.empty),)
    token_dispatcher.maybe_move_tensor_to_cpu = _already_on_cpu
    random._get_share_storage = lambda: _copy_storage
    # If expert tensor parallelism divides experts, each rank has another number of
    # tokens, but gloo requires equal numbers ("invalid tensor size").
    mappings.torch = _Overlay(
        torch, distributed=_Overlay(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    )


def _unless_alone(collective: Callable[..., object]) -> Callable[..., object]:
    """Return a collective over gradients or weights that does nothing on a rank whose
    part is the whole. gloo would copy all of it and back: 4 bytes a parameter for
    gradients, and the weight's type for weights. One that is to be waited for is left.
    """

    @functools.wraps(collective)
    def among_several(
        output: torch.Tensor, part: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        """Communicate, unless `part` is the whole `output`."""
        is_same_memory = output.data_ptr() == part.data_ptr() and output.numel() == part.numel()
        if is_same_memory and not kwargs.get("async_op"):
            return None
        return collective(output, part, *args, **kwargs)

    return among_several


def _logits_by(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a replacement for megatron's router_gating_linear, which passes two kinds
    of input to Transformer Engine 2.20 that Transformer Engine silently computes
    wrongly:

    a bias            has the model's type, but cuBLASLt reads it in the output's,
                      float32: Transformer Engine sets the bias's type only for FP8 and
                      FP4. Two bf16 numbers are read as one, and other experts are
                      chosen.
    float32 factors   are rounded to TF32, which keeps 10 of 23 bits of mantissa.
    """

    def router_gating_linear(
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        router_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return a router's logits [tokens, experts] in `router_dtype`. inp [tokens,
        hidden], weight [experts, hidden], bias [experts].
        """
        if inp.dtype == router_dtype:
            return F.linear(inp, weight, bias)
        logits = product(inp, weight, None, router_dtype)
        if bias is None:
            return logits
        return logits + bias.to(router_dtype)

    return router_gating_linear


def _own_step_for_each_parameter(optimizer_class: "type[DistributedOptimizer]") -> None:
    """Make loading restore a separate `step` for each parameter.

    A fused Adam keeps `step` in the parameter group, torch's in each parameter's state,
    and megatron restores the former. Without this, loading an optimiser fails
    (KeyError: 'step'). If only the key is added, resuming is silently wrong: all
    parameters share ONE `step` tensor, which AdamW increments once for each of them.
    """
    original = optimizer_class._set_main_param_and_optimizer_states

    @torch.no_grad()
    def restore(
        self: "DistributedOptimizer", model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Load a parameter's tensors, with `step` in a tensor of its own."""
        group, index = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][index]
        state = self.optimizer.state[parameter]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    optimizer_class._set_main_param_and_optimizer_states = restore


def _state_before_first_step(optimizer_class: "type[DistributedOptimizer]") -> None:
    """Make the state that an Adam lacks before its first step. Without: loading fails
    (AssertionError) and, with a fused Adam, so does even the checkpoint of a run that
    has only skipped steps (KeyError: 'exp_avg').

    torch's Adam counts steps for each parameter, a fused one in its group. An offloaded
    optimiser consists of several, and keeps a copy of their state together with the
    FP32 weights.
    """
    original = optimizer_class.state_dict

    def state_dict(self: "DistributedOptimizer") -> object:
        make_moments(self)
        return original(self)

    optimizer_class.state_dict = state_dict


def make_moments(optimizer: "DistributedOptimizer") -> None:
    """Make AdamW's state, all zeros, if it has none yet."""
    if optimizer.is_stub_optimizer or optimizer.optimizer.state:
        return
    parts = getattr(optimizer.optimizer, "sub_optimizers", None)
    for part in parts or [optimizer.optimizer]:
        for group in part.param_groups:
            for parameter in group["params"]:
                part.state[parameter] = _initial_moments(part, group, parameter)
    if parts:
        optimizer.optimizer._sync_sub_optimizers_state_to_hdo()


def _initial_moments(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a parameter's state before the first step, in the order of torch's."""
    state = {}
    if isinstance(optimizer, torch.optim.AdamW):
        device = parameter.device if group.get("fused") else CPU
        state["step"] = torch.zeros((), device=device)
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def _copies_of_shards_only(optimizer_class: "type[HybridDeviceOptimizer]") -> None:
    """Make an offloaded optimiser copy only what it will update: this rank's shards,
    never whole parameters. megatron makes it twice, first with whole parameters, and
    reads only that one's settings. Without: each rank also has FP32 copies of its whole
    stage, on the host for the offloaded share and on the GPU for the rest, until Python
    collects a cycle.
    """
    original = optimizer_class._init_sub_optimizers

    def make_parts(self: "HybridDeviceOptimizer") -> None:
        """Make the optimisers of its parts, but none for whole parameters."""
        for group in self.param_groups:
            if any(isinstance(p, torch.nn.Parameter) for p in group["params"]):
                return
        original(self)

    optimizer_class._init_sub_optimizers = make_parts


def _recomputed_without_transformer_engine(
    checkpoint_class: "type[CheckpointWithoutOutput]",
) -> None:
    """Make megatron's recomputation of a single output (learner.recompute=light) do
    without Transformer Engine, which is not installed. megatron takes its own default,
    `fp8=False`, for a wish for FP8. Without this change: NameError.
    """
    original = checkpoint_class.__init__

    def make(self: "CheckpointWithoutOutput", fp8: object = False) -> None:
        """Make the checkpoint as megatron does, but without FP8."""
        original(self, fp8)
        self.fp8 = False

    checkpoint_class.__init__ = make


def _copy_storage(emptied: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fill the storage of a tensor whose memory was given back, and so all views of it.
    megatron lets it share the other's by C++, which each process compiles in its first
    backward pass: a minute on a CPU.
    """
    storage = emptied.untyped_storage()
    storage.resize_(recomputed.untyped_storage().nbytes())
    storage.copy_(recomputed.untyped_storage())


def _to_their_parameters(hybrid: "HybridDeviceOptimizer") -> None:
    """Replace HybridDeviceOptimizer._move_new_state_to_right_device, which moves what
    was loaded, but does not copy what is there already, and recognises offloaded
    optimisers by a class other than torch's. Without: a resumed rank keeps the moments
    of its whole stage in host memory, since its own are views of them. With torch's
    AdamW, if only a share is offloaded, the rest's moments are loaded into host memory,
    and its step fails.
    """
    for optimizer in hybrid.sub_optimizers:
        for parameter, state in optimizer.state.items():
            state["master_param"] = parameter
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value is not parameter:
                    state[name] = value.to(parameter.device, copy=True)


def _already_on_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Replace maybe_move_tensor_to_cpu, which converts only tensors that it moves, so
    none here. Without: the exchange of tokens between expert-parallel ranks gets
    tensors as sizes (TypeError).
    """
    if as_numpy and isinstance(tensor, torch.Tensor):
        return tensor.numpy()
    return tensor


def _all_gather(
    pieces: Sequence[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Gather pieces of different lengths, padded to the longest in transit."""
    longest = max(len(piece) for piece in pieces)
    padding = mine.new_zeros(longest - len(mine), *mine.shape[1:])
    padded = torch.cat([mine, padding])
    padded_pieces = [torch.empty_like(padded) for _ in pieces]
    dist.all_gather(padded_pieces, padded, group=group)
    for piece, padded_piece in zip(pieces, padded_pieces, strict=True):
        piece.copy_(padded_piece[: len(piece)])


def _reduce_scatter(
    mine: torch.Tensor, pieces: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Sum pieces of different lengths over ranks, all pieces together, and keep this
    rank's.
    """
    lengths = [len(piece) for piece in pieces]
    total = torch.cat(list(pieces))
    dist.all_reduce(total, group=group)
    mine.copy_(total.split(lengths)[group.rank()])


class _Overlay:
    """A view of a module with some names replaced; the module itself is not changed."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


class _Stream:
    """Stands in for a stream of a GPU: on a CPU there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record_event(self, *_: object) -> "_Stream":
        return self

    def wait_stream(self, _: "_Stream") -> None: ...
    def synchronize(self) -> None: ...


class _Generators:
    """Stands in for the list of GPUs' generators: each is the CPU's."""

    def __getitem__(self, _: int) -> torch.Generator:
        return torch.default_generator


class _TypeName(str):
    """'torch.FloatTensor', which also equals 'torch.cuda.FloatTensor'."""

    def __eq__(self, value: object) -> bool:
        cuda_name = "torch.cuda." + self.removeprefix("torch.")
        return str.__eq__(self, value) is True or cuda_name == value

    def __ne__(self, value: object) -> bool:
        return not self == value

    __hash__ = str.__hash__


def _naming_both_types(name_or_cast: Callable[..., object]) -> Callable[..., object]:
    """Return Tensor.type with `_TypeName` as the name that it returns."""

    def type_of(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        """Cast the tensor or, without arguments, return the name of its type."""
        if args or kwargs:
            return name_or_cast(self, *args, **kwargs)
        return _TypeName(name_or_cast(self))

    return type_of


def _seed(seed: int) -> None:
    """Seed the CPU's generator in place of a GPU's."""
    torch.manual_seed(int(seed))


def _not_compiled(
    function: Callable[..., object] | None = None, **_: object
) -> Callable[..., object]:
    """Act as torch.compile, which is called with a function or as `@compile(...)`, and
    return the function as it is.
    """
    return _not_compiled if function is None else function


def _made_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a factory of tensors that makes on the CPU what is asked for on a GPU."""

    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        """Make the tensor, with the CPU as the device if that would be a GPU."""
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make

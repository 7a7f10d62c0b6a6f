"""Causal attention over a packed row: which of this rank's queries attend to which
keys, and kernels that use this instead of a mask.

    the row     |0 ───────── a sequence ───────── n|0 ────── the next ────── m|
    a segment         start ────── at ━━━━━ to

A segment has the queries [at, to) and the keys [start, to); each query attends to keys
up to itself.

A segment is a whole sequence, or its part within an attention chunk. Under context
parallelism its queries are one of this rank's pieces, with the keys before them: of a
sequence's 2 CP pieces, rank r has the r-th from either end.

Llama 4 rotates at true positions, so attention within its chunks is causal attention
over shorter sequences: the row's boundaries are subdivided at multiples of the chunk.
gpt-oss has a sink in each head, an extra score that takes probability but has no value
(arXiv 2309.17453), and in every second layer a window: a query attends to a limited
number of positions up to its own. If a kernel does not support windows, segments are
cut into pieces with a window's length of queries, so that one mask with the width of
two windows fits all.

The kernels materialise neither a mask nor all scores of a sequence:

    Flash            bf16 or fp16 on a GPU: torch's flash kernel, given the segment
                     boundaries
    PaddedSegments   otherwise: unpack ─► [segments, heads, longest, head_dim]
                     ─► causal SDPA ─► pack

Everything that depends only on lengths is computed once per micro-batch and shared by
all layers with the same segments. Under context parallelism keys and values are
gathered from all ranks, in rank order.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel


class Segments(NamedTuple):
    """Segments of a row. start, at, to [segments] int64: positions in the row. This
    rank's tokens are the queries, in order.
    """

    start: Tensor
    at: Tensor
    to: Tensor

    @property
    def queries(self) -> Tensor:
        """Position of each query in the row, [queries]."""
        return ranges(self.at, self.to)


def segments(
    boundaries: Sequence[int],
    chunk: int | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    window: int | None = None,
) -> Segments:
    """Return one rank's segments of sequences [boundaries[i], boundaries[i+1]), cut at
    multiples of `chunk`. window: cut them into this many queries each, with all keys
    that windows of this length reach; only without chunks.
    """
    parts: list[tuple[int, int, int]] = []
    for start, end in itertools.pairwise(boundaries):
        step = chunk or max(end - start, 1)
        for at, to in query_ranges(start, end, cp_size, cp_rank):
            if window is not None:
                parts += _window_segments(start, at, to, window)
            else:
                parts += _chunk_segments(start, at, to, step)
    table = torch.tensor(parts, dtype=torch.int64).view(-1, 3)
    return Segments(*table.unbind(1))


def query_ranges(start: int, end: int, cp_size: int, cp_rank: int) -> list[tuple[int, int]]:
    """Return the queries of the sequence [start, end) that this context-parallel rank
    has: one piece from either end.
    """
    if cp_size == 1:
        return [(start, end)]
    pieces = 2 * cp_size
    length = (end - start) // pieces
    first = start + cp_rank * length
    second = start + (pieces - 1 - cp_rank) * length
    return [(first, first + length), (second, second + length)]


def _window_segments(start: int, at: int, to: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Yield segments of at most `window` queries, from the first query on."""
    for cut in range(at, to, window):
        first_key = max(start, cut - window + 1)
        end = min(to, cut + window)
        yield first_key, cut, end


def _chunk_segments(start: int, at: int, to: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield segments within chunks, which begin at multiples of their length in the
    sequence that begins at `start`.
    """
    into_chunk = (at - start) % chunk
    for cut in range(at - into_chunk, to, chunk):
        first_query = max(at, cut)
        end = min(to, cut + chunk)
        yield cut, first_query, end


def ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """Return starts[0] … ends[0]-1, starts[1] … ends[1]-1, and so on."""
    lengths = ends - starts
    preceding = lengths.cumsum(0) - lengths
    shifts = torch.repeat_interleave(starts - preceding, lengths)
    return torch.arange(int(lengths.sum())) + shifts


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends. None: without."""

    rotary: bool = True  # rotate q and k
    chunk: int | None = None  # attend only within chunks of this length
    l2_epsilon: float | None = None  # normalise q and k after rotation
    temperature: tuple[int, float] | None = None  # (floor, scale), see `temperatures`
    sinks: bool = False  # each head has one
    # Attend only to this many positions up to a query's own; only with sinks.
    window: int | None = None


def positions_of(boundaries: Sequence[int]) -> Tensor:
    """Return 0 … n-1 for each sequence of n tokens, end to end."""
    lengths = torch.tensor(boundaries).diff()
    return ranges(torch.zeros_like(lengths), lengths)


def rms_norm(
    x: Tensor,
    epsilon: float,
    weight: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    centered: bool = False,
) -> Tensor:
    """Return x / rms(x) over the last dimension, computed in float32, times weight [h]
    (as transformers' LlamaRMSNorm). group: the ranks that have equal parts of the
    dimension, and of the weight; None: this one has all of it. centered: times 1 +
    weight, in float32 as well (as its Qwen3_5RMSNorm).
    """
    return _ScaledNorm.apply(x, epsilon, weight, group, centered)


class _ScaledNorm(torch.autograd.Function):
    """RMS norm: the output is x * i * f, with i = 1 / rms(x) and a factor f, weight or
    1 + weight. Let g be its gradient and m = g * f. Then the gradient of x is i * m -
    i^3 * x * mean(m * x), and that of the weight is the sum of g * x * i over rows.
    Both means are over all ranks of the group.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        epsilon: float,
        weight: Tensor | None,
        group: dist.ProcessGroup | None,
        centered: bool,
    ) -> Tensor:
        x_fp32 = x.float()
        mean_square = _mean_over(group, x_fp32.pow(2).mean(-1, keepdim=True))
        inverse = torch.rsqrt(mean_square + epsilon)
        ctx.save_for_backward(x, inverse, weight)
        ctx.group = group
        ctx.centered = centered
        normal = x_fp32 * inverse
        if weight is None:
            return normal.to(x.dtype)
        if centered:
            return normal.mul_(1.0 + weight.float()).to(x.dtype)
        return normal.to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight [h] from the output's, like x."""
        x, inverse, weight = ctx.saved_tensors
        gradient_fp32 = gradient.float()
        of_weight = None
        product = gradient_fp32 * x
        if weight is None:
            mean = product.mean(-1, keepdim=True)
            of_x = gradient_fp32 * inverse
        else:
            rows = product.flatten(0, -2)
            of_weight = rows.t() @ inverse.flatten()
            of_weight = of_weight.to(weight.dtype)
            factor = weight.float()
            if ctx.centered:
                factor = 1.0 + factor
            mean = (product @ factor).div_(len(weight))
            mean = mean[..., None]
            of_x = (gradient_fp32 * factor).mul_(inverse)
        mean = _mean_over(ctx.group, mean)
        of_x.addcmul_(x, mean * inverse.pow(3), value=-1)
        return of_x.to(x.dtype), None, of_weight, None, None


def _mean_over(group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """Return the mean of all ranks' x, which it overwrites; x if there is no group."""
    if group is None or group.size() == 1:
        return x
    dist.all_reduce(x, group=group)
    return x.div_(group.size())


def temperatures(positions: Tensor, floor: int, scale: float) -> Tensor:
    """Return 1 + scale * log(1 + floor((position + 1) / floor)) float32: 1 at the first
    positions (arXiv 2501.19399).
    """
    multiples = torch.floor((positions.float() + 1.0) / floor)
    return torch.log1p(multiples) * scale + 1.0


FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Torch's GPU kernels, except the one that materialises every score."""


SHORT_ON_CPU = 512
"""Up to so many positions a CPU computes attention of half precision in FP32. Torch's
bf16 kernel prepares oneDNN anew for each of its small products: 48 sequences of 42
tokens take 105 ms in bf16 and 35 ms in FP32, one of 2,048 203 and 217 ms.
"""


def flash_takes(query: Tensor) -> bool:
    """Return whether torch's flash kernel takes queries like these."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    head_dim = query.shape[-1]
    return query.is_cuda and is_half and head_dim <= 256 and head_dim % 8 == 0


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend causally, from and to [batch, positions, heads, head_dim], with grouped
    queries. sinks [heads]
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if sinks is not None:
        return _causal_with_sinks(q, k, v, scale, sinks, window).transpose(1, 2)
    if q.is_cuda and not flash_takes(q):  # this kernel lacks grouped queries
        k, v = _repeated_for_queries(q, k, v)
    dtype = q.dtype
    is_half = dtype.itemsize == 2
    if is_half and not q.is_cuda and q.shape[2] <= SHORT_ON_CPU:
        q, k, v = (t.float() for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(FUSED) if q.is_cuda else nullcontext():
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    return output.to(dtype).transpose(1, 2)


def _causal_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor, window: int | None
) -> Tensor:
    """Attend as `causal` does, from and to [batch, heads, positions, head_dim]."""
    k, v = _repeated_for_queries(q, k, v)  # these kernels lack grouped queries
    mask = None if window is None else band(q, window)
    kernel = _efficient(scale, mask) if q.is_cuda else _cpu(scale, mask)
    return _WithSinks.apply(q, k, v, sinks, kernel)


def _repeated_for_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v [batch, groups, ..] with as many heads as q."""
    queries_per_group = q.shape[1] // k.shape[1]
    if queries_per_group == 1:
        return k, v
    k = k.repeat_interleave(queries_per_group, 1)
    v = v.repeat_interleave(queries_per_group, 1)
    return k, v


def flash(q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> Tensor:
    """Call torch's varlen_attn. Before torch 2.12 grouped queries were implicit; since
    then they must be enabled.
    """
    varlen_attn, has_enable_gqa = _varlen_attn()
    if has_enable_gqa:
        arguments["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, **arguments)


@cache
def _varlen_attn() -> tuple[Callable[..., Tensor], bool]:
    """Return varlen_attn, and whether it has `enable_gqa`. Imported late, since it
    takes seconds, for torch's compiler.
    """
    from torch.nn.attention.varlen import varlen_attn

    has_enable_gqa = "enable_gqa" in signature(varlen_attn).parameters
    return varlen_attn, has_enable_gqa


def band(q: Tensor, window: int) -> Tensor:
    """Return the mask to add to the scores of q [.., .., positions, ..]: 0 for the last
    `window` keys up to a query, else -infinity. [1, 1, positions, positions], with rows
    aligned as the memory-efficient kernel requires.
    """
    length = q.shape[2]
    aligned_length = -(-length // 8) * 8
    ones = q.new_ones(length, aligned_length, dtype=torch.bool)
    visible = ones.tril().triu(1 - window)
    mask = q.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    return mask[None, None, :, :length]


class _Kernel(NamedTuple):
    """A kernel whose backward pass can be given another output than its own."""

    forward: Callable[..., tuple[Tensor, ...]]
    """q, k, v ─► the output, the log-sum-exp of each query's scores
    [.., heads, queries], and more for backward.
    """
    backward: Callable[..., tuple[Tensor, ...]]
    """The output's gradient, q, k, v and all results of forward ─► the gradients of q,
    k and v.
    """


def _cpu(scale: float | None, mask: Tensor | None) -> _Kernel:
    """Return torch's flash kernel for CPUs: [batch, heads, positions, head_dim]. mask:
    see `band`; None: causal.
    """
    options = {"dropout_p": 0.0, "is_causal": mask is None, "attn_mask": mask, "scale": scale}
    return _Kernel(
        partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, **options),
        partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, **options),
    )


def _efficient(scale: float | None, mask: Tensor | None) -> _Kernel:
    """Return torch's memory-efficient kernel for GPUs, like `_cpu`. It pads
    log-sum-exps to a multiple of 32.
    """
    options = {"dropout_p": 0.0, "is_causal": mask is None, "scale": scale}
    wanted_gradients = [True, True, True, False]  # not the mask's
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    differentiate = torch.ops.aten._scaled_dot_product_efficient_attention_backward

    def mask_of(q: Tensor) -> Tensor | None:
        if mask is None:
            return None
        batch, heads, _, _ = q.shape
        return mask.expand(batch, heads, -1, -1)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, mask_of(q), compute_log_sumexp=True, **options)

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        gradients = differentiate(
            gradient, q, k, v, mask_of(q), *saved, grad_input_mask=wanted_gradients, **options
        )
        return gradients[:3]

    return _Kernel(forward, backward)


def _varlen(scale: float | None, arguments: Mapping[str, Any]) -> _Kernel:
    """Return torch's flash kernel for GPUs: [tokens, heads, head_dim]. arguments: as
    Flash has them.
    """
    window_left, window_right = arguments["window_size"]
    lengths = [arguments[key] for key in ("cu_seq_q", "cu_seq_k", "max_q", "max_k")]
    dropout = 0.0
    is_causal = window_left == -1
    positional = (*lengths, dropout, is_causal)
    options = {
        "scale": scale,
        "window_size_left": window_left,
        "window_size_right": window_right,
    }
    attend = torch.ops.aten._flash_attention_forward
    differentiate = torch.ops.aten._flash_attention_backward

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, *positional, return_debug_mask=False, **options)[:4]

    def backward(gradient: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        inputs_and_output = saved[:5]
        random_state = saved[5:]
        return differentiate(gradient, *inputs_and_output, *positional, *random_state, **options)

    return _Kernel(forward, backward)


class _WithSinks(torch.autograd.Function):
    """Adds sinks to a kernel's attention, without access to its scores. The kernel
    returns the output o and l, the log-sum-exp of a query's scores. With the sink s, l'
    = log(exp l + exp s) and o' = o exp(l - l'). The gradient of a score is its
    probability exp(score - l') times g (value - o'), with g the output's gradient: a
    kernel's backward pass is right if it gets o' and l'. The sink's value is 0, so its
    gradient is -exp(s - l') g o', summed over queries.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: _Kernel
    ) -> Tensor:
        """Attend with sinks [heads]: from q, k and v, as the kernel takes them, to an
        output like q.
        """
        output, scores, *saved = kernel.forward(q, k, v)
        sink_scores = sinks.float()[:, None]
        with_sink = torch.logaddexp(scores, sink_scores)
        share_without_sink = torch.exp(scores - with_sink)
        output = output * _by_query(share_without_sink, output)
        output = output.to(q.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(sinks, q, k, v, output, with_sink, *saved)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks from the output's."""
        sinks, *saved = ctx.saved_tensors
        output, with_sink = saved[3:5]
        sink_scores = sinks.float()[:, None]
        probability = _by_query(torch.exp(sink_scores - with_sink), output)
        by_head = -(probability * gradient * output).sum(-1)
        all_but_heads = [dimension for dimension in range(by_head.dim()) if dimension != 1]
        of_inputs = ctx.kernel.backward(gradient.contiguous(), *saved)
        of_sinks = by_head.sum(all_but_heads).to(sinks.dtype)
        return *of_inputs, of_sinks, None


def _by_query(scores: Tensor, output: Tensor) -> Tensor:
    """Reshape [.., heads, queries] for multiplication with the output [tokens, heads,
    ..] or [.., heads, queries, ..].
    """
    if output.dim() == 3:
        return scores.t()[..., None]
    return scores[..., : output.shape[2], None]


class Flash:
    """Attention by torch's flash kernel, varlen_attn, which needs no block mask,
    compiler or conversion, unlike FlexAttention and jagged tensors. If a segment has
    more keys than queries, the causal mask is aligned to the last of both.
    """

    def __init__(
        self, parts: Segments, keys: Tensor | None, device: torch.device, window: int | None = None
    ) -> None:
        """Prepare for these segments. keys: positions of their keys among the gathered
        keys, segment by segment; None: the same as the queries. window: number of keys
        up to a query; None: all.
        """
        self.keys = None if keys is None else keys.to(device)
        queries_each = parts.to - parts.at
        keys_each = parts.to - parts.start
        window_left = -1 if window is None else window - 1
        self.arguments = {
            "cu_seq_q": _boundaries(queries_each).to(device),
            "cu_seq_k": _boundaries(keys_each).to(device),
            "max_q": int(queries_each.max()),
            "max_k": int(keys_each.max()),
            "window_size": (window_left, 0),
        }

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend, from and to [tokens, heads, head_dim] of queries. sinks [heads]"""
        if self.keys is not None:
            k = k.index_select(0, self.keys)
            v = v.index_select(0, self.keys)
        if sinks is None:
            return flash(q, k, v, scale=scale, **self.arguments)
        return _WithSinks.apply(q, k, v, sinks, _varlen(scale, self.arguments))


def _boundaries(lengths: Tensor) -> Tensor:
    """Return where each segment begins, and the last one ends, [segments + 1] int32."""
    ends = lengths.cumsum(0)
    return F.pad(ends, (1, 0)).int()


class PaddedSegments:
    """Buckets of segments of similar length, padded to a bucket's longest, so that the
    cost is near the sum of squared lengths.

    shapes: (segments, longest) of each bucket. Slots are the places in all buckets, end
    to end. unpack [slots]: the query in each slot (0 where there is none). pack
    [tokens]: the slot of each query. padding: slots without a query. All three are None
    if slots and tokens coincide. keys [slots]: like `unpack`, for the gathered keys;
    None if they match the queries. In a segment with more keys than queries, the slots
    without a query come first. They get no gradient, so the backward pass of unpacking
    is packing: a gather, many times faster than autograd's scatter-add.
    """

    def __init__(
        self, parts: Segments, keys: Tensor | None, device: torch.device, window: int | None = None
    ) -> None:
        """Prepare for these segments, which must be cut by the window if there is one.
        keys: as in Flash.
        """
        self.window = window
        lengths = parts.to - parts.start
        self.shapes, first = _padded(lengths.tolist())
        self.sizes = [count * longest for count, longest in self.shapes]
        slots = sum(self.sizes)
        ends = first + lengths
        first_queries = first + parts.at - parts.start
        pack = ranges(first_queries, ends)
        self.unpack = self.pack = self.padding = self.keys = None
        if keys is not None:
            key_slots = ranges(first, ends)
            self.keys = _scattered(key_slots, keys, slots).to(device)
        if slots == len(pack) and torch.equal(pack, torch.arange(slots)):
            return
        tokens = torch.arange(len(pack))
        is_padding = torch.ones(slots, dtype=torch.bool)
        is_padding[pack] = False
        self.unpack = _scattered(pack, tokens, slots).to(device)
        self.pack = pack.to(device)
        self.padding = is_padding.nonzero().flatten().to(device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend, from and to [tokens, heads, head_dim] of queries. sinks [heads]"""
        if self.keys is not None:
            k = k.index_select(0, self.keys)
            v = v.index_select(0, self.keys)
        elif self.unpack is not None:
            k = _Gather.apply(k, self.unpack, self.pack, None)
            v = _Gather.apply(v, self.unpack, self.pack, None)
        if self.unpack is not None:
            q = _Gather.apply(q, self.unpack, self.pack, None)
        outputs = []
        buckets = (t.split(self.sizes) for t in (q, k, v))
        for shape, *bucket in zip(self.shapes, *buckets, strict=True):
            q, k, v = (t.unflatten(0, shape) for t in bucket)
            attended = causal(q, k, v, scale, sinks, self.window)
            outputs.append(attended.flatten(0, 1))
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if self.pack is None:
            return output
        return _Gather.apply(output, self.pack, self.unpack, self.padding)


type Kernels = Flash | PaddedSegments


def attention_of(
    boundaries: Sequence[int],
    chunk: int | None,
    cp_size: int,
    cp_rank: int,
    like: Tensor,
    window: int | None = None,
) -> Kernels:
    """Return attention over the sequences [boundaries[i], boundaries[i+1]) for this
    rank's queries, of the kind of `like`.
    """
    kernels = Flash if flash_takes(like) else PaddedSegments
    cut = window if kernels is PaddedSegments else None
    mine = segments(boundaries, chunk, cp_size, cp_rank, cut)
    keys = None
    if cp_size > 1 or cut:  # some keys occur twice, and others not at all
        positions = [segments(boundaries, None, cp_size, rank).queries for rank in range(cp_size)]
        order = torch.argsort(torch.cat(positions))
        keys = order[ranges(mine.start, mine.to)]
    return kernels(mine, keys, like.device, window)


def _padded(lengths: list[int]) -> tuple[list[tuple[int, int]], Tensor]:
    """Return the buckets' shapes and each segment's first slot. Longest first, one less
    than half as long begins a bucket.
    """
    buckets: list[tuple[int, int]] = []  # (segments, longest)
    first = torch.zeros(len(lengths), dtype=torch.int64)
    slots = 0
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    count = 0
    longest = 0
    for i in longest_first:
        length = lengths[i]
        if not buckets or 2 * length < longest:
            count = 0
            longest = length
            buckets.append((count, longest))
        count += 1
        buckets[-1] = (count, longest)
        first[i] = slots
        slots += longest
    return buckets, first


def _scattered(places: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [size]: `values` at their places, 0 elsewhere."""
    scattered = torch.zeros(size, dtype=torch.int64)
    return scattered.index_copy_(0, places, values)


class _Gather(torch.autograd.Function):
    """Maps x to x[index]. The gradient of x is the output's gradient, indexed by
    `back`, and 0 at `unused`.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, index: Tensor, back: Tensor, unused: Tensor | None
    ) -> Tensor:
        ctx.back = back
        ctx.unused = unused
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradient.index_select(0, ctx.back)
        if ctx.unused is not None:
            gradient.index_fill_(0, ctx.unused, 0)
        return gradient, None, None, None

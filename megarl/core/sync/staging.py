"""Weights that a server receives while it generates: into a copy of its parameters,
which is swapped in at the end.

    learner ──group──► bucket ──SGLang's load_weights──► the copy ──checksums──► learner
                       threads of the scheduler process     │
                       the scheduler, in a pause            └──swap──► the parameters,
                                                             labelled with the version

SGLang's own session (begin_weight_update, end_weight_update) does not suffice: it loads
each bucket into the live parameters, on the scheduler's thread, so nothing is generated
in that time, and loaded buckets cannot be undone.

The copy is in the host's memory (pinned if there is a GPU) and has this rank's part of
the model, with the same names, shapes and types. A copy that is not swapped in (a
broken group, a wrong checksum, a lost learner) is dropped by the next `open_version`.
Until a swap the server keeps its complete old version.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import msgspec
import torch
from torch.nn import Module

from megarl.core.sync.broadcast import BroadcastGroup, LaunchOrder, in_thread

DERIVED = ("w_kc", "w_vc", "gemma_weight")
"""Tensors that SGLang derives from a parameter, in place, when it is loaded, and
computes with: two from DeepSeek-V3's kv_b_proj, and 1 + weight from the weight of a
norm like Gemma's, which only a GPU's kernels take.
"""

IDLE_STREAMS: list[torch.cuda.Stream] = []


class BucketHead(msgspec.Struct):
    """Sent before the bytes of a bucket: describes its tensors, one after the other."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Unloadable(Exception):
    """The model cannot load a bucket: the server fails, not the group."""


class Staging:
    """One scheduler process's copy. All steps but `swap` run in threads (`job`)."""

    def __init__(self) -> None:
        self._version = ""  # being received, or the last one received
        self._complete_version = ""  # of the copy; "" while one is received
        self._has_checksums = False  # whether they were taken since the last bucket
        self._model: Module | None = None
        self._turns = LaunchOrder()  # of the publication whose tensors are loaded
        self._loading = threading.Lock()
        self._jobs: dict[str, Future[Any]] = {}

    def job(self, step: str, act: Callable[[], Any]) -> Future[Any]:
        """Start the step in a thread, unless it was started already; return its future.
        `ended` forgets it.
        """
        if step not in self._jobs:
            self._jobs[step] = in_thread(lambda: _run_on_own_stream(act))
        return self._jobs[step]

    def ended(self, step: str) -> None:
        """Forget the step, which has ended on all ranks."""
        self._jobs.pop(step, None)

    def open_version(self, live: Module, serves: str, version: str, base: str = "") -> None:
        """Drop what was staged before and open `version`. base: the tensors to come are
        deltas from this version. RuntimeError if the server `serves` another one, or if
        it computes with weights that SGLang derived when the model was loaded and that
        a swap would leave as they were.
        """
        with self._loading:
            self._turns = LaunchOrder()
            if base and serves != base:
                raise RuntimeError(
                    f"version {version} comes as differences from {base}, and this server has"
                    f" {serves}"
                )
            if self._model is None:
                check_derived(live)
                self._model = copy_of(live)
            elif base and self._complete_version != base:
                _copy(live, self._model)
            self._version = version
            self._complete_version = ""
            self._has_checksums = False

    def receive(self, group: BroadcastGroup) -> None:
        """Load all buckets of one pipeline stage into the copy, each while the next one
        arrives. RuntimeError if the group breaks, Unloadable if the model cannot load a
        bucket.
        """
        turns = self._turns
        loading = in_thread(lambda: None)
        try:
            while (bucket := group.receive(turns)) is not None:
                loading.result()
                loading = in_thread(
                    partial(_run_on_own_stream, partial(self._load, turns, *bucket))
                )
            loading.result()
        except Exception as error:
            turns.broken = str(error)
            group.close(str(error))
            raise

    def _load(self, turns: LaunchOrder, head_bytes: bytes, flat: torch.Tensor) -> None:
        """Load a bucket, `flat` [bytes] uint8, into the copy. head_bytes: its
        BucketHead in JSON. RuntimeError if a later publication than that of `turns` has
        begun, Unloadable if the model cannot load it.
        """
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        head = msgspec.json.decode(head_bytes, type=BucketHead)
        bucket = FlattenedTensorBucket.empty(head.names, head.dtypes, head.shapes, "meta")
        bucket.flattened_tensor = flat
        with self._loading:
            if turns is not self._turns:
                raise RuntimeError("another publication has begun")
            assert self._model is not None
            self._has_checksums = False
            try:
                self._model.load_weights(bucket.reconstruct_tensors())
            except Exception as error:
                raise Unloadable(f"{head.names[0]} …: {error}") from error

    def checksums(self) -> Any:
        """Return what /weights_checker would return for this rank's parameters after
        the swap.
        """
        from sglang.srt.utils.weight_checker import WeightChecker

        checksums = WeightChecker(get_model=lambda: self._model).handle("checksum", role="target")
        self._has_checksums = True
        return checksums

    def swap(self, live: Module, version: str) -> None:
        """Write the copy, whose checksums were taken, to the parameters. Only in a
        pause, on the scheduler's thread.
        """
        with self._loading:
            is_checked = version == self._version and self._has_checksums
            if self._model is None or not is_checked:
                raise RuntimeError(f"version {version} is not staged with its checksums")
            _copy(self._model, live)
            self._complete_version = version


def check_derived(model: Module) -> None:
    """Raise RuntimeError if SGLang refuses to update this model's weights. Its own
    updates ask the same before they load anything, and a swap goes past them. The
    answer never changes after the start (SGLang's weight_updater.py:
    "startup-determined and rank-uniform").
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    reason = weight_updater._unsupported_derived_weight_cache_error(model)
    if reason is not None:
        raise RuntimeError(reason)


def copy_of(model: Module) -> Module:
    """Return a copy of the model with its own parameters, buffers and derived tensors,
    with equal values, in host memory. SGLang's loaders, which are methods of the
    layers, become those of the copied layers: they write to the parameter that they are
    given, and derive tensors of their layer from it. All else is shared.
    """
    copier = _Copier()
    copy = copier.module(model)
    copier.bind_loaders()
    return copy


class _Copier:
    """Copies each module and tensor of a model once, however often it occurs there."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}  # by id of the original

    def module(self, original: Module) -> Module:
        """Return the copy of a module. Non-persistent buffers are shared, unless they
        are derived.
        """
        if id(original) in self._copies:
            return self._copies[id(original)]
        copy = original.__class__.__new__(original.__class__)
        content = copy.__dict__
        content.update(vars(original))
        content["_parameters"] = {
            name: self._tensor(tensor) for name, tensor in original._parameters.items()
        }
        content["_buffers"] = dict(original._buffers)
        shared = original._non_persistent_buffers_set.difference(DERIVED)
        for name in original._buffers.keys() - shared:
            content["_buffers"][name] = self._tensor(original._buffers[name])
        for name in DERIVED:
            if isinstance(vars(original).get(name), torch.Tensor):
                content[name] = self._tensor(vars(original)[name])
        content["_modules"] = {
            name: module if module is None else self.module(module)
            for name, module in original._modules.items()
        }
        self._copies[id(original)] = copy
        return copy

    def bind_loaders(self) -> None:
        """Make methods of a layer that belong to a parameter methods of the layer's
        copy, where they belong to the parameter's.
        """
        for copy in self._copies.values():
            if not isinstance(copy, torch.Tensor):
                continue
            for name, value in vars(copy).items():
                if isinstance(value, MethodType) and id(value.__self__) in self._copies:
                    vars(copy)[name] = MethodType(value.__func__, self._copies[id(value.__self__)])

    def _tensor(self, original: torch.Tensor | None) -> torch.Tensor | None:
        if original is None:
            return None
        if id(original) not in self._copies:
            self._copies[id(original)] = _copy_of_tensor(original)
        return self._copies[id(original)]


def _copy_of_tensor(original: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, of the same class and with the same attributes."""
    copy = torch.empty_like(
        original, device="cpu", pin_memory=original.is_cuda, requires_grad=False
    )
    copy.copy_(original)
    if isinstance(original, torch.nn.Parameter):
        copy = torch.Tensor._make_subclass(type(original), copy, False)
    copy.__dict__.update(vars(original))
    return copy


def _copy(source: Module, destination: Module) -> None:
    """Copy parameters, buffers and derived tensors, except shared ones."""
    targets = _tensors(destination)
    for name, tensor in _tensors(source).items():
        target = targets[name]
        if tensor is not target:
            target.data.copy_(tensor.data, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tensors(model: Module) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and derived tensors by name."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        for name in DERIVED:
            derived = vars(module).get(name)
            if isinstance(derived, torch.Tensor):
                tensors[f"{path}.{name}"] = derived
    return tensors


def _run_on_own_stream(act: Callable[[], Any]) -> Any:
    """Run `act` beside the scheduler: without gradients and, on a GPU, on a stream that
    nothing else uses at that time.
    """
    with torch.no_grad(), _own_stream() if torch.cuda.is_available() else nullcontext():
        return act()


@contextmanager
def _own_stream() -> Iterator[None]:
    """Run on an idle stream, or a new one: torch keeps freed memory for each. SGLang
    decodes on streams of other priority.
    """
    try:
        stream = IDLE_STREAMS.pop()
    except IndexError:
        stream = torch.cuda.Stream(priority=-1)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        IDLE_STREAMS.append(stream)

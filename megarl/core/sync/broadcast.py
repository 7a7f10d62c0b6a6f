"""A process group for weights: rank 0 is a rank of the learner, the others are servers.
Every wait has a time limit.

NCCL promises less than gloo. `Work.wait` returns before anything has arrived and never
raises; if a member dies, the others' kernels spin; forming a communicator, or
destroying one with work under way, can block for ever; and NCCL's watchdog kills its
own process. So members poll `is_completed`; the first that gives up writes this to a
store, which the others check while they wait; calls that may hang run in a thread that
can be abandoned; and a broken group is aborted.

Broadcasts of several groups may run at the same time on a GPU if all ranks launch them
in the same order (NCCL's guide, "Using multiple NCCL communicators concurrently"). In
opposite orders two ranks could wait for each other: kernels may not all fit on a GPU,
and CUDA may give memory only when all kernels have ended. So each send takes a `turn`
among all groups', when nothing is left that its broadcast waits for; rank 0 says in the
store which turn it is, and the others launch turn after turn.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
    _world,
)

from megarl.core.base.process import environment

log = logging.getLogger(__name__)

BROKEN = "broken"
FORM_LIMIT_S = 60.0
FORM_LIMIT_S_A_RANK = 0.5
"""Time limit for forming a group, and what each of its ranks adds (an estimate: NCCL's
first communicator is made by all of them together); unless the limit for waiting is
shorter.
"""
LOOK_S = 0.1
"""Interval at which a waiting member checks whether another has given up."""
ASK_S = 0.02
"""Longest pause between two questions to the store: hundreds of ranks may ask one."""
CLOSE_LIMIT_S = 20.0
GLOO_CLOSE_LIMIT_S = 1.0
"""Time limits for leaving a group. An aborted NCCL group must release the GPU; leftover
gloo threads sleep and do no harm.
"""
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""A group reads these when it is made. With other values it would end its process when
a peer is lost.
"""


def form_limit_s(world: int, limit_s: float) -> float:
    """Return the seconds in which `world` ranks must have formed a group. limit_s: the
    limit for waiting.
    """
    return min(FORM_LIMIT_S + FORM_LIMIT_S_A_RANK * world, limit_s)


class LaunchOrder:
    """Which turn this rank launches next, shared by all groups through which it
    receives. broken: why no other will come.
    """

    def __init__(self) -> None:
        self.next = 1
        self.broken = ""


class BroadcastGroup:
    """One member of the group. Its methods raise RuntimeError when the group is broken
    or the time limit has passed.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        backend: str,
        address: tuple[str, int],
        limit_s: float,
        store: dist.TCPStore | None = None,
    ) -> None:
        """Meet the others at `address`, where rank 0 serves `store`, and form the
        communicator.
        """
        self.name = name
        self._backend = backend
        self._limit_s = limit_s
        limit = timedelta(seconds=form_limit_s(world, limit_s))
        self._store = store or dist.TCPStore(*address, world, False, limit)
        # A second connection: a store's client handles one call at a time, and the
        # first blocks while it waits for the others.
        self._line = PrefixStore(f"{name}/line", dist.TCPStore(*address, world, False, limit))
        self._group: ProcessGroup | None = None
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._landings = [torch.empty(0, dtype=torch.uint8, device=self._device)] * 2
        self._buckets = 0
        self._forgotten = 0  # sent or received; those of which the store keeps no word

        def form() -> None:
            """Make the process group and, by a first broadcast, its communicator."""
            with environment(NO_WATCHDOG):
                # Like sglang.srt.utils.init_custom_process_group, which would import
                # all of SGLang into the learner.
                group, _ = _new_process_group_helper(
                    world,
                    rank,
                    [],
                    Backend(backend),
                    PrefixStore(name, self._store),
                    group_name=name,
                    timeout=timedelta(seconds=limit_s),
                )
            self._group = group
            _world.pg_group_ranks[group] = {r: r for r in range(world)}
            self.wait(
                self.broadcast(torch.zeros(1, device=self._device))
            )  # the first one makes NCCL's communicator

        formed = in_thread(form)
        try:
            self._until(formed.done, "formed", limit.total_seconds())
            formed.result()
        except RuntimeError as error:
            self.close(str(error))
            raise

    def broadcast(self, flat: Tensor) -> dist.Work:
        """Start the broadcast of rank 0's `flat`, into `flat` on the others."""
        assert self._group is not None
        return dist.broadcast(flat, group_src=0, group=self._group, async_op=True)

    def send(
        self, turn: Callable[[], int], head: bytes = b"", flat: Tensor | None = None
    ) -> list[tuple[dist.Work, Tensor]]:
        """On rank 0, start sending a head and bytes, or without them the end, to the
        others' `receive`; wait for each. turn: takes the next turn, from 1 on.
        """
        if flat is None:
            self._say(0, 0, 0)
            return []
        tensors = [torch.frombuffer(bytearray(head), dtype=torch.uint8).to(self._device), flat]
        if self._device.type == "cuda":  # what makes `flat` may wait for another sender
            torch.cuda.current_stream().synchronize()
        self._say(turn(), len(head), len(flat))
        return [(self.broadcast(tensor), tensor) for tensor in tensors]

    def _say(self, *sizes: int) -> None:
        self._line.set(str(self._buckets), " ".join(map(str, sizes)))
        self._buckets += 1

    def forget(self) -> None:
        """On rank 0, once all others have received the end: remove from the store what
        it said to them.
        """
        for n in range(self._forgotten, self._buckets):
            self._line.delete_key(str(n))
        self._forgotten = self._buckets

    def receive(self, turns: LaunchOrder) -> tuple[bytes, Tensor] | None:
        """Return the head and bytes that rank 0 sends next; None at the end. The bytes
        stay valid during one more call.
        """
        bucket = str(self._buckets)

        def broken() -> str:
            return turns.broken

        self._until(
            lambda: self._line.check([bucket]), "told of a bucket", self._limit_s, broken, ASK_S
        )
        turn, head_bytes, size = map(int, self._line.get(bucket).split())
        self._buckets += 1
        if not turn:
            return None
        head = torch.empty(head_bytes, dtype=torch.uint8, device=self._device)
        landing = self._landings.pop(0)
        if len(landing) < size:  # new memory costs more than the broadcast
            landing = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._landings.append(landing)
        flat = landing[:size]
        self._until(lambda: turns.next == turn, "given its turn", self._limit_s, broken)
        works = [self.broadcast(head), self.broadcast(flat)]
        turns.next += 1
        for work in works:
            self.wait(work, broken)
        return head.cpu().numpy().tobytes(), flat

    def wait(self, work: dist.Work, failed: Callable[[], str] = str) -> None:
        """Wait until `work` is done on this rank and its bytes can be read. failed:
        returns a reason to give up, or "".
        """
        self._until(work.is_completed, "done with a broadcast", self._limit_s, failed)
        # gloo raises its error; NCCL makes this stream wait for NCCL's and raises
        # nothing
        work.wait()
        if self._backend != "gloo" and (error := work.exception()):
            raise RuntimeError(str(error))

    def close(self, broken: str = "") -> None:
        """Leave the group. broken: why it can no longer be used; the other members, who
        may be waiting in it, are told.
        """
        if broken:
            try:
                if not self._line.check([BROKEN]):
                    self._line.set(BROKEN, broken.splitlines()[0])
            except RuntimeError as error:  # the store has gone with rank 0
                log.info(
                    "group %s: cannot tell the other members that it is broken: %s",
                    self.name,
                    error,
                )
        if self._group is None:
            return
        only_reference = [self._group]
        self._group = None

        def leave() -> None:
            # Freed in this thread: gloo's destructor waits for work under way, for up
            # to limit_s.
            group = only_reference.pop()
            if broken:
                group.abort()
            dist.destroy_process_group(group)

        limit_s = CLOSE_LIMIT_S if self._backend != "gloo" else GLOO_CLOSE_LIMIT_S
        if wait([in_thread(leave)], limit_s).not_done:
            log.warning(
                "group %s was not destroyed within %g s; it is left as it is", self.name, limit_s
            )

    def _until(
        self,
        done: Callable[[], bool],
        expected: str,
        limit_s: float,
        failed: Callable[[], str] = str,
        pause_s: float = 0.0005,
    ) -> None:
        """Wait until `done()`. RuntimeError after limit_s, saying that the group was
        not `expected`, or as soon as `failed()` or another member gives a reason.
        """
        started = time.monotonic()
        next_look = started + LOOK_S
        while not done():
            time_now = time.monotonic()
            if time_now > started + limit_s:
                raise RuntimeError(
                    f"the process group was not {expected} within {limit_s:g} s (weights.timeout_s)"
                )
            if time_now > next_look:
                next_look = time_now + LOOK_S
                if reason := failed():
                    raise RuntimeError(reason)
                if self._line.check([BROKEN]):
                    raise RuntimeError(
                        f"the process group is broken: {self._line.get(BROKEN).decode()}"
                    )
            # Shorter at first: the head of a bucket arrives soon.
            time.sleep(min(pause_s, (time_now - started) / 8))


def in_thread[T](act: Callable[[], T]) -> Future[T]:
    """Run `act` in a daemon thread on the same GPU; the caller may abandon it."""
    done: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return done

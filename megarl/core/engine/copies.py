"""Copies of the attention in a server (serving.attention_copies), which is SGLang's
data-parallel attention.

                         ┌──► scheduler of copy 0 ──┐
    HTTP ──► distributor ┤                          ├─ take every step together:
                         └──► scheduler of copy 1 ──┘ attention apart, experts together

A scheduler has requests, a KV cache and a prefix cache of its own. All requests of a
group go to one copy, whose cache has their prompt; a new group goes to the copy with
the fewest requests. A call that controls the server (a pause, a step of staging, an
abort) reaches the first scheduler, which passes it on to all in the same turn
(request_receiver.py in SGLang), so they change their weights between the same two
steps. Each of them answers.

SGLang would connect these processes by TCP ports without a key. Here, as in a server
without copies, they are sockets in the file system that only this user may open
(launch.py sets the umask). That takes one machine.
"""

import itertools
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from megarl.core.base.process import die_with_parent

RECENT_GROUPS = 8192
"""Groups whose copy is remembered; a server has at most some hundreds at once."""
SEED_STEP = 1_000_003
"""Between the seeds of copies: more than between those of a run's servers (launch.py),
and less than the 32 bits that torch uses of a seed on a CPU.
"""
SLEEP_MS = 10
"""How long an idle scheduler on a CPU waits for a message of its own. Only the first
one hears calls, and the others go on when it does.
"""


def own_answers() -> None:
    """In the process that handles HTTP: make one answer of those that the schedulers
    give to a call.
    """
    from sglang.srt.managers.communicator import FanOutCommunicator

    call = FanOutCommunicator.__call__

    async def call_and_agree(self: Any, request: Any) -> list[Any]:
        return [agreed(await call(self, request))]

    FanOutCommunicator.__call__ = call_and_agree


def agreed(answers: list[Any]) -> Any:
    """Return the answer of all schedulers: the first failure, and a failure if they
    differ.
    """
    from msgspec import structs

    first = answers[0]
    for answer in answers:
        if not getattr(answer, "success", True):
            return answer
    if any(answer != first for answer in answers) and hasattr(first, "success"):
        return structs.replace(
            first, success=False, message="the copies of the attention gave different answers"
        )
    return first


def own_sockets() -> None:
    """In the process that handles HTTP: connect it to the others by sockets in the file
    system, as SGLang does for a server without copies.
    """
    from sglang.srt import server_args

    server_args.attn_dp_enabled_of = lambda _: False


def distribute(server_args: Any, port_args: Any, **options: Any) -> None:
    """Distribute requests to the copies, in a process of its own. Its sockets are
    beside the one from which it receives them.
    """
    from sglang.srt.managers import data_parallel_controller as theirs

    die_with_parent()
    numbers = itertools.count()

    def bound(context: Any, kind: int, **_: object) -> tuple[str, Any]:
        """Return the name of a new socket, in place of a port, and the socket."""
        name = f"{port_args.scheduler_input_ipc_name}-{next(numbers)}"
        return name, theirs.get_zmq_socket(context, kind, name, True)

    theirs.get_zmq_socket_on_host = bound
    theirs.PortArgs.init_new = staticmethod(
        lambda _, copy, names: replace(port_args, scheduler_input_ipc_name=names[copy])
    )
    kind = theirs.DataParallelController
    kind._broadcast_worker_ports = lambda _self, _arguments, names: names  # to no other node
    kind.event_loop = pass_on
    homes = Homes()
    kind.total_requests_scheduler = lambda self, request: homes.send(self, request)
    theirs.run_data_parallel_controller_process(server_args, port_args, **options)


def pass_on(distributor: Any) -> None:
    """Pass requests on as they come. SGLang would ask for the next one all the time."""
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        distributor._request_dispatcher(sock_recv(distributor.recv_from_tokenizer))


class Homes:
    """The copies to which the groups' requests go."""

    def __init__(self) -> None:
        self._copies: OrderedDict[str, int] = OrderedDict()

    def send(self, distributor: Any, request: Any) -> None:
        """Send a request to the copy of its group (`routing_key`); one of a new group,
        or of none, to the copy with the fewest requests.
        """
        from sglang.srt.managers.data_parallel_controller import LoadBalanceMethod, sock_send

        group = request.routing_key
        copy = self._copies.pop(group, None)
        if copy is None:
            copy = distributor.dp_budget.dispatch(LoadBalanceMethod.TOTAL_REQUESTS)
        else:
            distributor.dp_budget.total_requests[copy] += 1
        if group is not None:
            self._copies[group] = copy
            if len(self._copies) > RECENT_GROUPS:
                self._copies.popitem(last=False)
        sock_send(distributor.workers[copy], request)


def own_draws() -> None:
    """In a scheduler: let each copy draw other random numbers. SGLang gives all ranks
    the same seed, which those of one copy need.
    """
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_parallel

    make = Scheduler.__init__

    def make_and_seed(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        torch.manual_seed(self.random_seed + get_parallel().attn_dp_rank * SEED_STEP)

    Scheduler.__init__ = make_and_seed


def own_sleep() -> None:
    """In a scheduler: let an idle one wait for messages of its own only shortly."""
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    IdleSleeper.maybe_sleep = lambda self: self.poller.poll(SLEEP_MS)

"""The copy in which a server stages weights, beside a model on a GPU: pinned, filled on
a stream of its own, complete at the swap.
"""

import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from megarl.core.sync.staging import _copy, _run_on_own_stream, copy_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
DEVICE = torch.device("cuda", 0)
WIDTH = 4096


class Model(torch.nn.Module):
    """Two layers, loaded as SGLang loads: by `copy_` into the parameter, also of what
    is turned first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device=DEVICE)
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device=DEVICE)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor.t())


def test_what_is_loaded_on_other_streams_is_in_the_model_after_the_swap() -> None:
    model = Model()
    copy = copy_of(model)
    assert {parameter.device.type for parameter in copy.parameters()} == {"cpu"}
    assert all(parameter.is_pinned() for parameter in copy.parameters())
    for value in range(20):
        new = {
            name: torch.full((WIDTH, WIDTH), value + i, device=DEVICE)
            for i, name in enumerate(("first", "second"))
        }
        torch.cuda.synchronize()
        named = [(f"{name}.weight", tensor) for name, tensor in new.items()]
        loading = threading.Thread(
            target=_run_on_own_stream, args=(lambda named=named: copy.load_weights(named),)
        )
        loading.start()
        loading.join()
        _copy(copy, model)
        for i, parameter in enumerate(model.parameters()):
            assert parameter.eq(value + i).all()

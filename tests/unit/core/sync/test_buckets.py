"""Buckets: nothing lost, aligned, of the size asked for."""

import torch

from megarl.core.sync.transport import Bucket, buckets, with_last


def taken_apart(bucket: Bucket) -> dict[str, torch.Tensor]:
    """As SGLang does it: offsets follow from dtypes and shapes, and each must be a
    multiple of the element size.
    """
    out = {}
    offset = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        assert offset % kind.itemsize == 0
        out[name] = bucket.flat[offset : offset + size].view(kind).reshape(shape)
        offset += size
    assert offset == len(bucket.flat)
    return out


def test_tensors_of_mixed_types_come_back() -> None:
    tensors = {
        "a": torch.randn(3, dtype=torch.bfloat16),
        "b": torch.randn(2, 3),
        "c": torch.randn(5, dtype=torch.float16),
        "d": torch.randn(4, 4).T,
    }
    (bucket,) = buckets(tensors.items(), 1 << 20)
    for name, tensor in taken_apart(bucket).items():
        assert torch.equal(tensor, tensors[name])


def test_sizes() -> None:
    tensors = [(str(n), torch.zeros(n)) for n in (10, 10, 10, 100, 5)]
    made = list(buckets(tensors, 80))
    assert [b.names for b in made] == [["10", "10"], ["10"], ["100"], ["5"]]
    assert list(buckets([], 80)) == []


def test_a_large_tensor_is_not_copied() -> None:
    """It may overtake smaller ones. One that is not contiguous must be copied."""
    tensors = {
        "a": torch.zeros(2),
        "b": torch.randn(8),
        "c": torch.zeros(3),
        "d": torch.randn(4, 2).T,
    }
    large, turned, small = buckets(tensors.items(), 80, single=32)
    assert [large.names, turned.names, small.names] == [["b"], ["d"], ["a", "c"]]
    assert large.flat.data_ptr() == tensors["b"].data_ptr()
    assert torch.equal(taken_apart(turned)["d"], tensors["d"])


def test_only_the_last_one_is_marked() -> None:
    made = list(buckets([(str(n), torch.zeros(10)) for n in range(3)], 40))
    assert [last for _, last in with_last(made)] == [False, False, True]
    assert list(with_last([])) == []

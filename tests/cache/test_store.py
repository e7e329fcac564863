"""The store against the formula, at every length and head_dim that the formats must hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kveval.cache.store import CPU_NUMBERS, Store
from kveval.errors import KvevalError
from kveval.formats.registry import STORAGES
from kveval.formats.side import Side
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import Geometry
from kveval.memory.predict import stream_bytes, token_bytes

LENGTHS = (1, 31, 32, 33, 4096, 131_072)
HEAD_DIMS = (64, 80, 96, 128, 256)
REFUSED = {  # head_dim -> storages whose blocks do not divide it
    64: (),
    80: ("int4-g32", "int4-g64", "int4-g32-sym", "int4-g64-sym", "int2-g32", "kivi4", "kivi2", "q8_0", "q5_1", "q4_0"),
    96: ("int4-g64", "int4-g64-sym"),
    128: (),
    256: (),
}


def sides(name: str, head_dim: int) -> list[Side]:
    """Keys and values with scales for standard normal numbers."""
    amax = torch.full((1, head_dim), 5.0)
    return [side.with_codec(side.codec.calibrated(amax)) for side in KVFormat(name, name).sides]


@pytest.fixture(scope="module", params=HEAD_DIMS)
def numbers(request: pytest.FixtureRequest) -> torch.Tensor:
    """(1 head, 131,072 tokens, head_dim)."""
    return torch.randn(1, LENGTHS[-1], request.param, generator=torch.Generator().manual_seed(request.param))


@pytest.mark.parametrize("name", list(STORAGES))
def test_stored_bytes_are_the_formula(numbers: torch.Tensor, name: str) -> None:
    head_dim = numbers.shape[2]
    geometry = Geometry(("full",), kv_heads=1, head_dim=head_dim, positions=LENGTHS[-1])
    fmt = KVFormat(name, name)
    if name in REFUSED[head_dim]:
        with pytest.raises(KvevalError, match=rf"{name}: .*head_dim of {head_dim}"):
            token_bytes(geometry, fmt)
        return
    stores = [Store(side, 0) for side in sides(name, head_dim)]
    constants = sum(part.numel() * part.element_size() for store in stores for part in store.side.codec.constants)
    for before, length in zip((0, *LENGTHS), LENGTHS, strict=False):
        for store in stores:
            store.append(numbers[:, before:length])
        assert constants + sum(store.stored_bytes for store in stores) == stream_bytes(geometry, fmt, length)
        assert all(store.stored_bytes <= store.reserved_bytes for store in stores)


@pytest.mark.parametrize("name", list(STORAGES))
def test_what_is_stored_does_not_depend_on_how_it_came(name: str) -> None:
    """In pieces or whole, across the slabs that a codec is given: the same bytes, each encoded once."""
    tokens = 2 * CPU_NUMBERS // 64 + 7
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(1))
    for side in sides(name, 64):
        whole, pieces = Store(side, tokens), Store(side, 0)
        whole.append(x)
        cuts = (0, 1, 40, 41, 1000, tokens - 3, tokens)
        for first, last in pairwise(cuts):
            before = [part.clone() for part in pieces.parts()]
            pieces.append(x[:, first:last])
            for old, new in zip(before, pieces.parts(), strict=False):
                assert torch.equal(old.view(torch.uint8), new[:, : old.shape[1]].contiguous().view(torch.uint8))
        for one, other in zip(whole.parts(), pieces.parts(), strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        outs = [torch.full((1, tokens, 64), torch.nan) for _ in range(2)]
        for store, out in zip((whole, pieces), outs, strict=True):
            store.decode(out)
        assert torch.equal(outs[0], outs[1])
        assert torch.isfinite(outs[0]).all()


def test_an_evicted_store_keeps_the_rest_bit_for_bit() -> None:
    for name in ("bf16", "fp8", "int4-g32", "nvfp4", "q4_0"):
        side = sides(name, 64)[0]
        store, x = Store(side, 0), torch.randn(2, 50, 64)
        store.append(x)
        before = [part.clone() for part in store.parts()]
        store.keep(4, 10)
        assert store.tokens == 14
        for old, new in zip(before, store.parts(), strict=True):
            kept = torch.cat([old[:, :4], old[:, 40:]], dim=1)
            assert torch.equal(kept.view(torch.uint8), new.contiguous().view(torch.uint8))

"""fp8: one byte a number, E4M3 under five choices of scale, and E5M2 (OCP 8-bit floating point specification 1.0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.formats.codec import Codec, StaticScale

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0  # largest finite E4M3 number (table 2 of the specification)
E5M2_MAX = 57344.0  # likewise E5M2
TOKEN_HEAD_FLOOR = 1e-6  # vLLM's smallest dynamic scale


@dataclass(frozen=True)
class Fp8(Codec):
    """float8 E4M3. Saturates at 448 times the scale, as serving kernels do, whatever torch's own cast does beyond it.

    Without ``static_scale`` the scale is the constant 1.0: what servers do for ``--kv-cache-dtype fp8`` when a checkpoint
    brings no scales. With it, one float32 scale amax / 448 per tensor, KV head or (KV head, channel) is fixed on a
    calibration text before the first token is stored: ``calibrated`` gives the codec that has them.
    """

    static_scale: StaticScale | None = None

    def block_bytes(self, head_dim: int) -> int:
        """1 byte a number; static scales are ``constant_bytes``."""
        return head_dim

    def calibrated(self, amax: torch.Tensor) -> Codec:
        """The codec with scales for the magnitudes ``amax`` (heads, head_dim) of a calibration text."""
        if self.static_scale is None:
            return self
        assert amax.ndim == 2, f"amax is (heads, head_dim), not {tuple(amax.shape)}"
        dims = {"tensor": (0, 1), "head": (1,), "channel": ()}[self.static_scale]
        largest = amax.float().amax(dim=dims, keepdim=True) if dims else amax.float()
        return CalibratedFp8(_nonzero(largest / E4M3_MAX).unsqueeze(1), self.static_scale)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(heads, tokens, head_dim) float8_e4m3fn."""
        assert self.static_scale is None, "static scales come from calibrated()"
        return (_to_e4m3(x.float()),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in bfloat16 and float32."""
        assert self.static_scale is None, "static scales come from calibrated()"
        _from_e4m3(parts[0], None, out)


@dataclass(frozen=True, eq=False)  # its scales are a measurement: it equals itself alone
class CalibratedFp8(Codec):
    """E4M3 with its static scales: float32 (1, 1, 1), (heads, 1, 1) or (heads, 1, head_dim)."""

    scales: torch.Tensor
    static_scale: StaticScale | None

    def block_bytes(self, head_dim: int) -> int:
        """1 byte a number."""
        return head_dim

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The scales."""
        return (self.scales,)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x / scale as (heads, tokens, head_dim) float8_e4m3fn; beyond the calibrated range it saturates."""
        return (_to_e4m3(x.float() / self.scales),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Stored number times scale, in float32, then in ``out``'s dtype."""
        _from_e4m3(parts[0], self.scales, out)


@dataclass(frozen=True)
class Fp8TokenHead(Codec):
    """E4M3 with a dynamic float32 scale for each token and KV head: vLLM's ``fp8_per_token_head``.

    scale = max(amax / 448, 1e-6) and q = clamp(x * (1 / scale), -448, 448), computed in float32: the kernel
    ``_reshape_cache_per_token_head`` in vllm/v1/attention/ops/triton_reshape_and_cache_flash.py. A vector of zeros
    has the floor for its scale.
    """

    def block_bytes(self, head_dim: int) -> int:
        """1 byte a number and 4 bytes for the scale."""
        return head_dim + 4

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """float8_e4m3fn (heads, tokens, head_dim) and float32 scales (heads, tokens, 1)."""
        x = x.float()
        scales = x.abs().amax(dim=-1, keepdim=True).div_(E4M3_MAX).clamp_(min=TOKEN_HEAD_FLOOR)
        return _to_e4m3(x * scales.reciprocal()), scales

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Stored number times scale, in float32, then in ``out``'s dtype."""
        stored, scales = parts
        _from_e4m3(stored, scales, out)


@dataclass(frozen=True)
class Fp8E5m2(Codec):
    """float8 E5M2 with scale 1.0: binary16 without its last 8 bits of fraction. Saturates at 57,344 and never stores infinity."""

    def block_bytes(self, head_dim: int) -> int:
        """1 byte a number."""
        return head_dim

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(heads, tokens, head_dim) float8_e5m2."""
        import torch

        return (x.float().clamp_(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in bfloat16 and float32."""
        import torch

        (stored,) = parts
        if stored.device.type != "cpu":
            out.copy_(stored)
            return
        bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(8)  # the byte is the high byte of binary16
        _widen(bits.view(torch.float16), None, out)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """What was all zeros (or nothing in float32) on the calibration text is stored under scale 1.0 if it comes after all."""
    import torch

    return torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 to the nearest E4M3 number, ties to even; torch's cast alone makes NaN beyond 464."""
    import torch

    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _from_e4m3(stored: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write ``stored`` times ``scales`` (1.0 when None; broadcast over ``stored``) into ``out``."""
    import torch

    if stored.device.type != "cpu":
        out.copy_(stored if scales is None else stored.float() * scales)
        return
    # torch's CPU cast is scalar code. The same bits, moved to where binary16 has its exponent, are the number / 256:
    # eight times as fast, subnormals included, and the factor goes into the scale.
    bits = stored.view(torch.int8).to(torch.int16)  # the sign fills the high byte
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    _widen(bits.view(torch.float16), 256.0 if scales is None else scales * 256.0, out)


def _widen(x: torch.Tensor, factor: torch.Tensor | float | None, out: torch.Tensor) -> None:
    """Write ``x`` float16 times ``factor`` into ``out``, through float32 where ``out`` is narrower."""
    import torch

    # torch's cast from half to bfloat16 is scalar code as well: two vectorised casts are faster.
    wide = out if out.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    wide.copy_(x)
    if factor is not None:
        wide.mul_(factor)
    if wide is not out:
        out.copy_(wide)

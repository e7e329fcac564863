"""One side of a cache, the keys or the values: a codec, and the newest tokens that it does not reach yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kveval.errors import KvevalError
from kveval.formats.codec import Codec

RESIDUAL_NUMBER_BYTES = 2  # the newest tokens wait in BF16


@dataclass(frozen=True)
class Side:
    """``residual`` > 0: the newest tokens are kept in BF16 (KIVI's residual, Liu et al. 2024, arXiv 2402.02750).

    A codec that encodes tokens alone takes each token when ``residual`` newer ones have come. One that encodes blocks
    takes ``residual`` tokens at a time, when as many are waiting. A step attends before it hands tokens to the codec.
    """

    codec: Codec
    residual: int = 0

    def __post_init__(self) -> None:
        block = self.codec.block_tokens
        if block > 1 and (self.residual < block or self.residual % block):
            raise KvevalError(
                f"residual={self.residual}: keys are encoded in blocks of {block} tokens, so the residual must be "
                f"{block} or a multiple of it"
            )

    def encoded(self, tokens: int) -> int:
        """Of ``tokens`` written, how many (the oldest) the codec has; the others wait in BF16."""
        if self.residual == 0:
            return tokens
        if self.codec.block_tokens > 1:
            return tokens // self.residual * self.residual
        return max(0, tokens - self.residual)

    def read_encoded(self, position: int) -> int:
        """Of the keys (or values) that the token at ``position`` reads, how many (the oldest) come from the codec."""
        return position + 1 if self.residual == 0 else self.encoded(position)

    def token_bytes(self, head_dim: int) -> float:
        """Bytes that a token of one KV head takes in the long run."""
        return self.codec.block_bytes(head_dim) / self.codec.block_tokens

    def stored_bytes(self, tokens: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of ``tokens`` tokens of ``kv_heads`` KV heads, static scales included."""
        encoded = self.encoded(tokens)
        blocks = encoded // self.codec.block_tokens
        waiting = RESIDUAL_NUMBER_BYTES * head_dim * (tokens - encoded)
        each = blocks * self.codec.block_bytes(head_dim) + waiting
        return kv_heads * each + self.codec.constant_bytes(kv_heads, head_dim)

    def with_codec(self, codec: Codec) -> Side:
        """The same with ``codec``."""
        return replace(self, codec=codec)

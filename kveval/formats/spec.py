"""A KV format as people name it: ``fp8``, ``kivi4,residual=32``, ``window:4k,store=fp8``, ``snapkv:0.5``.

Grammar: ``name[:arg][,key=value ...]``. The name is a storage format (which numbers are stored) or a way to keep fewer
tokens (``window:N``, ``swa:N``, ``snapkv:F``, ``tova:F``, ``knorm:F``, ``streaming:F``; these take ``store=``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kveval.errors import KvevalError
from kveval.formats.pruning import Pruning
from kveval.formats.registry import STORAGES
from kveval.formats.side import Side
from kveval.formats.window import Window

BASELINES = ("bf16", "fp16")


@dataclass(frozen=True)
class KVFormat:
    """How a stream's keys and values are kept: which numbers are stored, and which tokens.

    ``keys`` and ``values`` are names in ``registry.STORAGES``. ``residual`` (tokens) where the storage has one; None: its
    usual. ``rotate``: both are turned by a Hadamard matrix before they are stored. The first and last ``skip_layers``
    layers store BF16.
    Raises KvevalError for parts that do not go together.
    """

    keys: str = "bf16"
    values: str = "bf16"
    window: Window | None = None
    pruning: Pruning | None = None
    residual: int | None = None
    rotate: bool = False
    skip_layers: int = 0

    def __post_init__(self) -> None:
        usual = max(STORAGES[self.keys].keys.residual, STORAGES[self.values].values.residual)
        if self.residual is not None and not usual:
            raise KvevalError(f"'{self.name}': {self._storage} keeps no newest tokens apart, so it takes no residual=")
        if self.residual == usual:
            object.__setattr__(self, "residual", None)  # one format, one value
        key_side, _ = self.sides  # refuses a residual that blocks do not divide
        if key_side.residual and (self.window or self.pruning):
            raise KvevalError(
                f"'{self.name}': tokens cannot leave {self._storage}, whose keys are encoded in blocks of "
                f"{key_side.codec.block_tokens} tokens; use a store= that encodes tokens alone, for instance int4-g32"
            )
        for option, given in (("rotate=hadamard", self.rotate), ("skip_layers=", self.skip_layers)):
            if given and not self.quantised:
                raise KvevalError(f"'{self.name}': {option} means nothing where {self._storage} is stored")

    @property
    def sides(self) -> tuple[Side, Side]:
        """How the keys and the values of a layer that is not skipped are stored."""
        sides = STORAGES[self.keys].keys, STORAGES[self.values].values
        if self.residual is None:
            return sides
        return tuple(replace(side, residual=self.residual) if side.residual else side for side in sides)  # type: ignore[return-value]

    @property
    def quantised(self) -> bool:
        """Whether a BF16 number can come back changed."""
        return any(side.codec.lossy for side in (STORAGES[self.keys].keys, STORAGES[self.values].values))

    @property
    def lossy(self) -> bool:
        """Whether the cache can differ from what the model wrote."""
        return self.quantised or self.window is not None or self.pruning is not None

    @property
    def calibrated(self) -> bool:
        """Whether scales must be found on a calibration text before the first token is stored."""
        return any(side.codec.static_scale for side in self.sides)

    @property
    def _storage(self) -> str:
        return self.keys + ("" if self.keys == self.values else f",values={self.values}")

    @property
    def name(self) -> str:
        """Canonical name; ``parse_format(f.name) == f``."""
        kept = self.window or self.pruning
        stored = [] if self._storage == "bf16" else [f"store={self._storage}"]
        parts = [self._storage] if kept is None else [kept.name, *stored]
        parts += [] if self.residual is None else [f"residual={self.residual}"]
        parts += ["rotate=hadamard"] if self.rotate else []
        parts += [f"skip_layers={self.skip_layers}"] if self.skip_layers else []
        return ",".join(parts)

    def kept(self, tokens: int) -> int:
        """Tokens that a question sees after ``tokens`` were read."""
        kept = self.window or self.pruning
        return tokens if kept is None else kept.kept(tokens)

    def of_layer(self, layer: int, layers: int) -> KVFormat:
        """The format of one layer: the first and last ``skip_layers`` store BF16; which tokens stay is the same in all.

        Raises KvevalError when no layer is left.
        """
        if self.skip_layers and 2 * self.skip_layers >= layers:
            raise KvevalError(
                f"{self.name}: skipping {self.skip_layers} layers at either end leaves none of the model's {layers}"
            )
        if self.skip_layers <= layer < layers - self.skip_layers:
            return replace(self, skip_layers=0) if self.skip_layers else self
        return KVFormat(window=self.window, pruning=self.pruning)

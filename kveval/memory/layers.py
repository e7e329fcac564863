"""What each layer of a model keeps in a KV format: its storage, and the window that tokens leave it by."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kveval.errors import KvevalError
from kveval.formats.spec import KVFormat
from kveval.formats.window import Window
from kveval.memory.geometry import Geometry


@dataclass(frozen=True)
class LayerFormat:
    """One layer. ``window``: the format's, or the layer's own sliding one."""

    fmt: KVFormat
    window: Window | None

    def kept(self, tokens: int) -> int:
        """Tokens that a question sees after ``tokens`` were read."""
        return self.fmt.kept(tokens) if self.window is None else self.window.kept(tokens)


def layer_formats(geometry: Geometry, fmt: KVFormat) -> tuple[LayerFormat, ...]:
    """The format of each layer. Layers that slide keep their own window; a window or a pruning is for the others.

    Raises KvevalError where the model leaves the format nothing to do, or tokens would have to leave one that cannot
    let them go.
    """
    own = geometry.sliding_window
    _refuse(geometry, fmt)
    layers = []
    for layer, kind in enumerate(geometry.kinds):
        of_layer = fmt.of_layer(layer, geometry.layers)
        if kind == "sliding":
            assert own is not None
            layers.append(LayerFormat(replace(of_layer, window=None, pruning=None), Window(own, sinks=0)))
        else:
            layers.append(LayerFormat(of_layer, of_layer.window))
    return tuple(layers)


def _refuse(geometry: Geometry, fmt: KVFormat) -> None:
    own = geometry.sliding_window
    if own is None:
        return
    if fmt.sides[0].residual or fmt.sides[1].residual:
        raise KvevalError(
            f"{fmt.name}: layers of this model slide (over {own} tokens), and tokens cannot leave a format that encodes "
            f"keys in blocks of tokens; use one that encodes tokens alone, for instance int4-g32"
        )
    if (fmt.window or fmt.pruning) and "full" not in geometry.kinds:
        raise KvevalError(f"{fmt.name} has nothing to do: all layers of this model slide (over {own} tokens) already")
    if fmt.window and fmt.window.size < own:
        raise KvevalError(
            f"{fmt.name} is smaller than the model's own sliding window of {own} tokens: give at least that"
        )

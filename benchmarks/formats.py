"""What each storage format costs: encode and decode beside a plain copy, and a decode step beside BF16's. Ratios of one process.

    .venv/bin/python benchmarks/formats.py                    # every storage at 32,768 tokens of the probe
    .venv/bin/python benchmarks/formats.py --kv kivi4 --ctx 8k

The cache is filled with random numbers of the probe's shape (2 layers, 4 KV heads, head_dim 64, where weights cost next
to nothing: a larger model hides more of a format's decode). Steps of the format and of BF16 take turns.
GB/s counts the float32 numbers that go in or come out. Bar: a decode step of at most 4 x BF16's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from kveval.cache.attention import NAME, register
from kveval.cache.calibration import Scales
from kveval.cache.store import Store
from kveval.engines.stream import Stream
from kveval.engines.transformers import Loaded, prepare
from kveval.formats.parse import parse_format
from kveval.formats.registry import STORAGES
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import from_config
from kveval.memory.predict import token_bytes
from kveval.models.catalogue import resolve
from kveval.models.load import load_model, load_tokenizer
from kveval.runs.plan import device_name
from kveval.units import parse_tokens

DEFAULT = [*STORAGES, "int4-g32,rotate=hadamard", "window:4k", "snapkv:0.5"]
ROUNDS = 9  # of each format's step and BF16's, in turn
BAR = 4.0


def main() -> None:
    """Print a table: a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctx", default="32k", type=parse_tokens)
    parser.add_argument("--kv", action="append", default=[])
    options = parser.parse_args()
    register()
    source = resolve("probe")
    loaded = prepare(load_model(source, attn_implementation=NAME), load_tokenizer(source))
    geometry = from_config(loaded.model.config.to_dict())
    print(f"probe, {options.ctx:,} tokens, {torch.get_num_threads()} threads, {device_name('cpu')}")
    print(
        f"{'format':<26} {'B/token':>8} {'copy GB/s':>9} {'encode GB/s':>11} {'decode GB/s':>11} {'step ms':>8} {'x BF16':>7}"
    )
    with torch.inference_mode():
        baseline = filled(loaded, KVFormat(), options.ctx)
        for name in options.kv or DEFAULT:
            fmt = parse_format(name)
            copy, encode, decode = codec_speed(fmt, options.ctx)
            step, ratio = step_speed(baseline, filled(loaded, fmt, options.ctx))
            over = "" if ratio <= BAR else "  over the bar"
            print(
                f"{name:<26} {token_bytes(geometry, fmt):>8,.0f} {copy:>9.1f} {encode:>11.2f} {decode:>11.2f} "
                f"{1e3 * step:>8.1f} {ratio:>7.2f}{over}",
                flush=True,
            )


def random_states(tokens: int) -> torch.Tensor:
    """Keys or values (1, 4, tokens, 64) of one layer."""
    return torch.randn(1, 4, tokens, 64, generator=torch.Generator().manual_seed(tokens))


def ones(layers: int) -> Scales:
    """Static scales for random numbers."""
    amax = torch.full((4, 64), 5.0)
    return [(amax, amax)] * layers


def codec_speed(fmt: KVFormat, tokens: int) -> tuple[float, float, float]:
    """GB/s of a plain copy of keys, of storing them, and of reading them back: the best of a few, in turn."""
    side = fmt.sides[0]
    side = side.with_codec(side.codec.calibrated(ones(1)[0][0]))
    x = random_states(tokens)[0]
    out = torch.empty_like(x)

    def store() -> Store:
        made = Store(side, tokens)
        made.append(x)
        return made

    written = store()
    best = [min(seconds(work) for _ in range(5)) for work in (lambda: out.copy_(x), store, lambda: written.decode(out))]
    gigabytes = 4 * x.numel() / 1e9
    return gigabytes / best[0], gigabytes / best[1], gigabytes / best[2]


def seconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def filled(loaded: Loaded, fmt: KVFormat, tokens: int) -> Stream:
    """A stream whose cache holds ``tokens`` random tokens in ``fmt``."""
    ids = np.zeros(tokens, dtype=np.int64)
    stream = Stream(
        loaded.model,
        loaded.tokenizer,
        loaded.head,
        fmt,
        ids,
        chunk_tokens=tokens,
        scales=ones(2) if fmt.calibrated else None,
    )
    stream.cache.read(torch.arange(tokens))
    for layer in stream.cache.layers:
        layer.update(random_states(tokens), random_states(tokens), layer.index)
        if fmt.pruning:
            layer.observe(random_states(tokens)[:, :, -64:], 0.125)
    stream.time_decode(1)  # warms up; prunes
    return stream


def step_speed(baseline: Stream, stream: Stream) -> tuple[float, float]:
    """Seconds of a decode step, and the median of its ratio to BF16's, taken in turn."""
    steps, ratios = [], []
    for _ in range(ROUNDS):
        pair = []
        for one in (baseline, stream):
            one.time_decode(1)
            pair.append(one.spans[-1].seconds)
        steps.append(pair[1])
        ratios.append(pair[1] / pair[0])
    return median(steps), median(ratios)


if __name__ == "__main__":
    main()

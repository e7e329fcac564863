"""What a reading costs beside the attention kernels alone, and what asking together saves. Ratios of one process.

    .venv/bin/python benchmarks/reading.py                     # the probe at 131,072 tokens, every stored format
    .venv/bin/python benchmarks/reading.py --ctx 16k --kv fp8

Bars: reading <= 1.4 x the bare kernels; 32 questions together <= 1/5 of one by one, with the same answers; peak
memory of the process over its start <= predicted cache + 1.5 GiB (weights are loaded before the start).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch

from kveval.cache.attention import NAME, flash, register
from kveval.engines.base import Prompt
from kveval.engines.stream import Stream
from kveval.engines.transformers import Loaded, prepare
from kveval.formats.parse import parse_format
from kveval.formats.spec import KVFormat
from kveval.measure.divergence import Recorder, sample_positions
from kveval.measure.memory import PeakMemory
from kveval.memory.geometry import from_config
from kveval.memory.predict import stream_bytes
from kveval.models.catalogue import resolve
from kveval.models.load import load_model, load_tokenizer
from kveval.runs.plan import device_name
from kveval.units import GIB, parse_tokens

QUESTIONS, ANSWER_TOKENS = 32, 8


class Bare:
    """The attention kernels alone, on random tensors: what a reading cannot do without."""

    def __init__(self, loaded: Loaded, tokens: int, chunk: int) -> None:
        config = loaded.model.config
        self.layers, self.scale = config.num_hidden_layers, config.head_dim**-0.5
        self.kv_heads, heads, width = config.num_key_value_heads, config.num_attention_heads, config.head_dim
        self.group = heads // self.kv_heads
        self.keys, self.values = torch.randn(2, 1, self.kv_heads, tokens, width)
        self.query, self.own = torch.randn(2, 1, heads, chunk, width)

    def seconds(self, start: int, rows: int) -> float:
        """All layers' attention of ``rows`` tokens after ``start``: over the prefix, and over themselves causally."""
        query, own = self.query[:, :, :rows], self.own[:, :, :rows]
        begun = time.perf_counter()
        for _ in range(self.layers):
            flash(query, own, own, self.scale, causal=True)
            if start:
                folded = query.reshape(1, self.kv_heads, self.group * rows, -1)
                flash(folded, self.keys[:, :, :start], self.values[:, :, :start], self.scale, causal=False)
        return time.perf_counter() - begun


@dataclass(frozen=True)
class Measured:
    """One format: seconds of the reading, of the bare kernels beside it, of the recording; asking together / one by one."""

    reading_s: float
    bare_s: float
    record_s: float
    ask_ratio: float
    over_bytes: int  # peak of the process over its start, less the predicted cache


def main() -> None:
    """Print a table: a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="probe")
    parser.add_argument("--ctx", default="128k", type=parse_tokens)
    parser.add_argument("--chunk", default=4096, type=int)
    parser.add_argument("--kv", action="append", default=[])
    options = parser.parse_args()
    register()
    source = resolve(options.model)
    loaded = prepare(load_model(source, attn_implementation=NAME), load_tokenizer(source))
    ids = np.random.default_rng(0).integers(0, loaded.head.vocabulary, options.ctx)
    cpu = device_name("cpu")
    print(
        f"{source.name}, {options.ctx:,} tokens, chunks of {options.chunk:,}, {torch.get_num_threads()} threads, {cpu}"
    )
    print(
        f"{'format':<10} {'reading s':>9} {'bare s':>7} {'ratio':>6} {'recording s':>11} {'peak - cache GiB':>16} {'ask ratio':>9}"
    )
    bare = Bare(loaded, options.ctx, options.chunk)
    for name in options.kv or ["bf16", "fp8", "int4-g32"]:
        m = measure(loaded, parse_format(name), ids, options.chunk, bare)
        print(
            f"{name:<10} {m.reading_s:>9.1f} {m.bare_s:>7.1f} {m.reading_s / m.bare_s:>6.2f} {m.record_s:>11.1f} "
            f"{m.over_bytes / GIB:>16.2f} {m.ask_ratio:>9.3f}",
            flush=True,
        )


def measure(loaded: Loaded, fmt: KVFormat, ids: np.ndarray, chunk: int, bare: Bare) -> Measured:
    """Read ``ids`` once; after each chunk the bare kernels do the same products, so that both meet the same machine."""
    recorder = Recorder(loaded.head, ids, sample_positions(len(ids), 512, 0, 0))
    bare_s, done = 0.0, 0
    with (
        PeakMemory(loaded.model.device) as memory,
        Stream(loaded.model, loaded.tokenizer, loaded.head, fmt, ids, chunk_tokens=chunk) as stream,
        torch.inference_mode(),
    ):
        for tokens in stream.read_to(len(ids), recorder):
            bare_s += bare.seconds(done, tokens)
            done += tokens
        ask_ratio = ask_together_or_alone(stream, loaded.head.vocabulary)
    seconds = {phase: sum(s.seconds for s in stream.spans if s.phase == phase) for phase in ("prefill", "record")}
    predicted = stream_bytes(from_config(loaded.model.config.to_dict()), fmt, len(ids))
    over = memory.peak_bytes - memory.start_bytes - predicted
    return Measured(seconds["prefill"], bare_s, seconds["record"], ask_ratio, over)


def ask_together_or_alone(stream: Stream, vocabulary: int) -> float:
    """Seconds of 32 questions asked together / one by one; the answers must be the same."""
    tails = np.random.default_rng(1).integers(0, vocabulary, (QUESTIONS, 20))
    prompts = [Prompt(stream.ids.tolist(), len(stream.ids), tuple(map(int, tail)), (), ANSWER_TOKENS) for tail in tails]
    begun = time.perf_counter()
    together = stream.ask(prompts)
    middle = time.perf_counter()
    alone = [stream.ask([prompt])[0] for prompt in prompts]
    ended = time.perf_counter()
    assert together == alone, "asked together and one by one, the answers differ"
    return (middle - begun) / (ended - middle)


if __name__ == "__main__":
    main()

"""The transformers engine: an lm-eval LM whose model reads and writes a KV cache in one format.

A context is read once, chunk by chunk; the questions about its first L tokens are asked together when L tokens
have been read, and dropped from the cache; reading goes on. Tasks whose documents do not share contexts go through
the same code, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kveval.cache.attention import NAME as ATTENTION
from kveval.cache.calibration import Scales, observe
from kveval.engines.base import Answer, Answers, Memory, Prompt, guard
from kveval.engines.head import Head
from kveval.engines.stream import Span, Stream, make_cache, packs
from kveval.errors import EngineError, KvevalError
from kveval.formats.spec import KVFormat
from kveval.measure.memory import PeakMemory

CHUNK_TOKENS = 4096
DECODE_STEPS = 8  # measured at the end of a reading, one stream

Recorder = Callable[[int, torch.Tensor], None]


class Watch(Protocol):
    """Told how the work goes on."""

    def read(self, tokens: int) -> None:
        """``tokens`` more of the context were read."""

    def asked(self, questions: int) -> None:
        """``questions`` more were answered."""


class Unwatched:
    """Nobody looks."""

    def read(self, tokens: int) -> None:
        """Nothing to tell."""

    def asked(self, questions: int) -> None:
        """Nothing to tell."""


@dataclass(frozen=True)
class Reading:
    """What one reading of a context cost. Bytes are of the whole cache, when the last token had been read."""

    tokens: int
    stored_bytes: int
    reserved_bytes: int
    weights_bytes: int
    start_bytes: int
    peak_bytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Loaded:
    """A model ready to read, shared by the arms of a run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    head: Head

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as loaded; tied ones count once."""
        tensors = {tensor.data_ptr(): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Check on a few tokens that this model reads kveval's cache and that its log-probabilities are understood.

    Raises KvevalError naming what this architecture does that kveval does not know.
    """
    used = model.config._attn_implementation
    if used != ATTENTION:
        raise KvevalError(f"the model was loaded with attention '{used}', but kveval's cache is read by '{ATTENTION}'")
    head = Head(model)
    ids = np.arange(8) % head.vocabulary
    hidden: list[torch.Tensor] = []
    with Stream(model, tokenizer, head, KVFormat(), ids, chunk_tokens=8) as stream, torch.inference_mode():
        hook = model.base_model.register_forward_hook(lambda _m, _a, out: hidden.append(out.last_hidden_state[0]))
        try:
            stream.cache.read(torch.arange(8, device=stream.ids.device))
            logits = model(
                input_ids=stream.ids[None], stream=stream.cache, use_cache=True, **stream.cache_option()
            ).logits[0]
        finally:
            hook.remove()
        if stream.cache.seen != len(ids):
            raise KvevalError(
                f"{type(model).__name__} does not write its keys and values through the cache it is given"
            )
        head.verify(hidden[0], logits)
    return Loaded(model, tokenizer, head)


@torch.inference_mode()
def calibrate(loaded: Loaded, fmt: KVFormat, ids: np.ndarray | None) -> Scales | None:
    """Static scales of ``fmt`` from the largest keys and values that ``ids`` (tokens,) bring about; None where it has none."""
    if not fmt.calibrated or ids is None:
        return None
    with Stream(loaded.model, loaded.tokenizer, loaded.head, KVFormat(), ids, chunk_tokens=CHUNK_TOKENS) as stream:
        for _ in stream.read_to(len(ids)):
            pass
        return observe(stream.cache.layers, rotated=fmt.rotate)


class TransformersLM(LM):
    """lm-eval LM over one arm: ``loaded`` reading a cache in ``fmt``.

    ``locate`` tells, for a request whose document belongs to a shared context, the Prompt in it; where it says
    None the request's own text is the prompt. ``answers`` keeps answers between calls (and, as a run's journal,
    between processes). ``scales``: from ``calibrate``, for formats with static scales.
    """

    def __init__(
        self,
        loaded: Loaded,
        fmt: KVFormat,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        answers: Answers | None = None,
        locate: Callable[[Instance], Prompt | None] = lambda _: None,
        scales: Scales | None = None,
    ) -> None:
        super().__init__()
        self.loaded, self.fmt, self.chunk_tokens, self.scales = loaded, fmt, chunk_tokens, scales
        self.answers: Answers = answers if answers is not None else Memory()
        self._locate = locate
        make_cache(loaded.model, fmt, 1, scales)  # refuses what this model cannot be stored in, before anything is read

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return int(self.loaded.model.config.get_text_config().max_position_embeddings)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's fingerprints."""
        return str(self.loaded.tokenizer.name_or_path)

    def read(
        self,
        ids: np.ndarray,
        prompts: Iterable[Prompt],
        *,
        stops: Iterable[int] = (),
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        decode_steps: int = 0,
        look_on: int = 0,
    ) -> Reading:
        """Read ``ids`` (tokens,) once; ask ``prompts`` on the way; keep their answers as they come.

        With a recorder the whole context is read, else as far as the longest prompt. ``stops``: where reading
        pauses even if nothing is asked there, so that a run that continues reads in the very chunks of one that
        was never stopped. ``look_on``: where the format prunes after the prompt, the recorder hears of the last
        ``look_on`` tokens only, each computed over what pruning leaves of those before them all. Raises KvevalError for a prompt
        that does not fit and EngineError when memory runs out.
        """
        ordered = sorted(prompts, key=lambda prompt: prompt.prefix)
        guard(ordered, self.max_length)
        end = len(ids) if recorder is not None else max((prompt.prefix for prompt in ordered), default=0)
        watch = watch or Unwatched()
        spans: list[Span] = []
        device = self.loaded.model.device
        with _memory_errors(self.fmt, end), PeakMemory(device) as memory, self._stream(ids[:end], spans) as stream:
            asked = {prefix: list(group) for prefix, group in groupby(ordered, key=lambda prompt: prompt.prefix)}
            pruned = self.fmt.pruning is not None and recorder is not None
            last = end - look_on if pruned else end
            for stop in sorted({*asked, *(stop for stop in stops if stop <= end), last, end}):
                for tokens in stream.read_to(stop, None if pruned else recorder):
                    watch.read(tokens)
                if pruned and stop == last:
                    assert recorder is not None
                    stream.look_on(end, recorder)
                for pack in packs(asked.get(stop, [])):
                    self.answers.put(stream.ask(pack))
                    watch.asked(len(pack))
            stream.cache.prune()
            stored, reserved = stream.cache.stored_bytes, stream.cache.reserved_bytes
            if decode_steps:
                stream.time_decode(decode_steps)
        return Reading(
            end, stored, reserved, self.loaded.weights_bytes, memory.start_bytes, memory.peak_bytes, tuple(spans)
        )

    def _stream(self, ids: np.ndarray, spans: list[Span] | None = None) -> Stream:
        return Stream(
            self.loaded.model,
            self.loaded.tokenizer,
            self.loaded.head,
            self.fmt,
            ids,
            chunk_tokens=self.chunk_tokens,
            spans=spans,
            scales=self.scales,
        )

    def prompt(self, request: Instance) -> Prompt:
        """The request as token ids: within its shared context, or its own text, read up to its last token."""
        located = self._locate(request)
        if located is not None:
            return located
        text, options = request.args
        ids = self.loaded.tokenizer.encode(text)
        until = options.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        return Prompt(ids, len(ids) - 1, (ids[-1],), stops, int(options.get("max_gen_toks", 256)))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, in the order of ``requests``. Prompts that share a context cost one reading of it.

        Raises KvevalError for sampled decoding and for prompts that do not fit.
        """
        if any(request.args[1].get("do_sample") for request in requests):
            raise KvevalError("kveval answers greedily: set do_sample: false in the task")
        prompts = [self.prompt(request) for request in requests]
        guard(prompts, self.max_length)
        missing = [prompt for prompt in prompts if self.answers.get(prompt.sha256) is None]
        for group in _by_context(missing):
            self.read(np.asarray(group[0].context), group)
        return [self._answer(prompt).text for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Answer:
        answer = self.answers.get(prompt.sha256)
        assert answer is not None
        return answer

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding gives it, read back through the cache."""
        out = []
        for request in requests:
            context, continuation = request.args
            tokenizer = self.loaded.tokenizer
            if context:
                whole, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
            else:  # after one start token, whether or not the tokenizer adds one by itself
                whole, start = [self._start_token(), *tokenizer.encode(continuation, add_special_tokens=False)], 1
            log_probs, greedy = self._score(whole, start)
            out.append((float(log_probs.sum()), bool(greedy.all())))
        return out

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in disjoint windows of ``max_length`` tokens as lm-eval defines them."""
        out = []
        for request in requests:
            ids = self.loaded.tokenizer.encode(request.args[0], add_special_tokens=False)
            total = 0.0
            for window in get_rolling_token_windows(ids, self._start_token(), self.max_length, 1):
                context, continuation = make_disjoint_window(window)
                total += float(self._score([*context, *continuation], len(context))[0].sum())
            out.append(total)
        return out

    def _score(self, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and greedy matches, each (tokens - start,), of ``ids`` from position ``start`` on."""
        if self.fmt.pruning is not None:
            raise KvevalError(
                f"{self.fmt.name} prunes after the prompt, so a text has no log-probability under it: use generation tasks"
            )
        if len(ids) > self.max_length:
            raise KvevalError(f"a text of {len(ids)} tokens does not fit: the model has {self.max_length} positions")
        target = torch.tensor(ids)
        log_probs, greedy = torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.bool)

        def record(first: int, hidden: torch.Tensor) -> None:
            for at in range(0, len(hidden), self.loaded.head.rows):
                logits = self.loaded.head(hidden[at : at + self.loaded.head.rows]).cpu()
                rows = slice(first + at + 1, min(first + at + 1 + len(logits), len(ids)))
                logits = logits[: rows.stop - rows.start].log_softmax(dim=-1)
                log_probs[rows] = logits.gather(1, target[rows, None])[:, 0]
                greedy[rows] = logits.argmax(dim=-1) == target[rows]

        with _memory_errors(self.fmt, len(ids)), self._stream(np.asarray(ids)) as stream:
            for _ in stream.read_to(len(ids), record):
                pass
        return log_probs[start:], greedy[start:]

    def _start_token(self) -> int:
        tokenizer = self.loaded.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if token is None:
            raise KvevalError("this tokenizer has neither a BOS nor an EOS token to score the first token after")
        return int(token)


def _by_context(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts that share a context object, together, in order of first appearance."""
    groups: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(id(prompt.context), []).append(prompt)
    yield from groups.values()


@contextmanager
def _memory_errors(fmt: KVFormat, tokens: int) -> Iterator[None]:
    """Out of memory, on CUDA or in the CPU's allocator, as one sentence."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineError(
            f"out of memory while reading {tokens:,} tokens in {fmt.name}: give less context or more memory"
        ) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise EngineError(
            f"out of memory while reading {tokens:,} tokens in {fmt.name}: give less context or more memory"
        ) from error


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere: on a CPU without AMX or AVX512-BF16 it is hundreds of times
    slower, and only the cache's dtype is under test."""
    if device != "cpu":
        return torch.bfloat16
    fast: Any = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if fast() else torch.float32

"""Next-token log-probabilities, recorded while a context is read; a candidate against the baseline at the same positions.

Every position keeps the NLL of its true token. At sampled positions the baseline's whole distribution waits in a
file for the candidates of that context, so memory does not grow with context length x vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from kveval.engines.head import Head
from kveval.errors import EngineError

SAME_NLL = (
    1e-3  # nats; the same reading again gives the same to float32's rounding, another context differs by whole nats
)


def sample_positions(tokens: int, count: int, seed: int, context: int, *, look_on: int = 0) -> np.ndarray:
    """Positions (int64, ascending) in 1..tokens-1: at most ``count``, one in each of ``count`` equal strata of depth.

    With ``look_on`` (tokens), half as many again among the last ``look_on`` positions, which alone are recorded under
    formats that prune after the prompt.
    """
    random = Random(f"{seed}:divergence:{context}")
    chosen = _stratified(random, 1, tokens, count)
    if look_on:
        chosen = sorted({*chosen, *_stratified(random, tokens - look_on + 1, tokens, count // 2)})
    return np.array(chosen, dtype=np.int64)


def _stratified(random: Random, first: int, end: int, count: int) -> list[int]:
    count = min(count, end - first)
    edges = [first + i * (end - first) // max(1, count) for i in range(count + 1)]
    return [random.randrange(edges[i], edges[i + 1]) for i in range(count)]


@dataclass(frozen=True)
class Recording:
    """What one arm's reading said about its context. ``kl`` and ``top1_agree`` are empty for the baseline.

    Positions that a recorder with a ``first`` never heard of are NaN in all three.
    """

    nll: np.ndarray  # (tokens - 1,) float32, nats: of the true token at positions 1..tokens-1
    kl: np.ndarray  # (sampled,) float32, nats
    top1_agree: np.ndarray  # (sampled,) float32, 1.0 or 0.0


class Recorder:
    """Takes last hidden states as they come (``Stream.read_to``'s record) and keeps what the measurement needs.

    ``baseline``: the file of log-probabilities (sampled, vocabulary) float32 that the baseline's recorder wrote,
    to compare with it; None for the baseline itself, which writes ``output``. ``first``: the hidden states of the
    positions before it do not come.
    """

    def __init__(
        self,
        head: Head,
        ids: np.ndarray,
        sampled: np.ndarray,
        *,
        baseline: Path | None = None,
        output: Path | None = None,
        first: int = 0,
    ) -> None:
        self._head, self._sampled, self._output, self._first = head, sampled, output, first
        self._ids = torch.as_tensor(np.asarray(ids), dtype=torch.int64)
        self._nll = np.full(len(ids) - 1, np.nan, dtype=np.float32)
        self._kl = np.full(len(sampled) if baseline else 0, np.nan, dtype=np.float32)
        self._agree = np.full(len(sampled) if baseline else 0, np.nan, dtype=np.float32)
        shape = (len(sampled), head.vocabulary)
        self._reference = np.memmap(baseline, dtype=np.float32, mode="r", shape=shape) if baseline else None
        self._partial = output.with_suffix(".partial") if output else None
        self._kept = np.memmap(self._partial, dtype=np.float32, mode="w+", shape=shape) if self._partial else None

    @torch.inference_mode()
    def __call__(self, first: int, hidden: torch.Tensor) -> None:
        """``hidden`` (tokens, hidden size) of positions ``first``...; each predicts the position after it.

        Raises EngineError, naming the position, when a log-probability is NaN.
        """
        last = len(self._ids) - 1  # the last token predicts nothing that is known
        for start in range(0, hidden.shape[0], self._head.rows):
            at = first + start
            rows = hidden[start : min(start + self._head.rows, last - first)]
            if len(rows):
                self._slice(at, self._head(rows))

    def _slice(self, at: int, logits: torch.Tensor) -> None:
        """``logits`` (rows, vocabulary) float32 that predict positions at + 1 ..."""
        rows = len(logits)
        normaliser = logits.logsumexp(dim=-1)
        true = self._ids[at + 1 : at + 1 + rows].to(logits.device)
        nll = (normaliser - logits.gather(1, true[:, None])[:, 0]).cpu().numpy()
        if not np.isfinite(nll).all():
            raise EngineError(
                f"the model's log-probability is not finite at position {at + 1 + int((~np.isfinite(nll)).argmax())}"
            )
        self._nll[at : at + rows] = nll
        low, high = np.searchsorted(self._sampled, (at + 1, at + 1 + rows))
        if low == high:
            return
        chosen = torch.as_tensor(self._sampled[low:high] - at - 1, device=logits.device)
        log_probs = logits[chosen] - normaliser[chosen, None]
        if self._kept is not None:
            self._kept[low:high] = log_probs.cpu().numpy()
        if self._reference is not None:
            reference = torch.as_tensor(np.array(self._reference[low:high]), device=logits.device)
            self._kl[low:high] = divergence(reference, log_probs).cpu().numpy()
            self._agree[low:high] = (reference.argmax(-1) == log_probs.argmax(-1)).float().cpu().numpy()

    def finish(self) -> Recording:
        """The recording. The baseline's file appears under its name only now, whole."""
        unread = int(np.isnan(self._nll[self._first :]).sum())
        if unread:
            raise EngineError(f"{unread} positions of the context were never read")
        if self._kept is not None:
            assert self._partial is not None
            assert self._output is not None
            self._kept.flush()
            os.replace(self._partial, self._output)
        return Recording(self._nll, self._kl, self._agree)


def is_reference(file: Path, vocabulary: int, ids: np.ndarray, sampled: np.ndarray, nll: np.ndarray) -> bool:
    """Whether ``file`` is the whole reference of this very context, and not one cut short or another's.

    At each of the ``sampled`` positions it must give the true token of ``ids`` (tokens,) the log-probability that the
    baseline's reading told: ``nll`` (tokens - 1,), as in its Recording.
    """
    if not file.is_file() or file.stat().st_size != 4 * len(sampled) * vocabulary:
        return False
    reference = np.memmap(file, dtype=np.float32, mode="r", shape=(len(sampled), vocabulary))
    told = -reference[np.arange(len(sampled)), np.asarray(ids)[sampled]]
    return bool(np.allclose(told, nll[sampled - 1], rtol=0, atol=SAME_NLL))


def divergence(baseline: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """KL(baseline || candidate) in nats, (rows,) float32, of log-probabilities (rows, vocabulary), over the whole vocabulary.

    sum_i p_i (log p_i - log q_i); a token that the baseline rules out (p = 0) adds nothing. Summed in float64:
    differences of nearly equal distributions are smaller than float32's rounding of the sum.
    """
    p = baseline.double()
    terms = p.exp() * (p - candidate.double())
    return terms.masked_fill(torch.isneginf(p), 0.0).sum(dim=-1).float()

"""Carry out a plan: each context is read once by each arm, everything told is journaled, rows are written at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval.runs.directory import JOURNAL, MANIFEST, claim, is_whole, write_json
from kveval.runs.evidence import SCHEMA_VERSION
from kveval.runs.journal import Journal
from kveval.runs.plan import Plan
from kveval.runs.progress import Progress, Work
from kveval.runs.texts import Text, prompts_of

if TYPE_CHECKING:
    from kveval.engines.base import Prompt
    from kveval.engines.transformers import TransformersLM


def run(plan: Plan, directory: Path, progress: Progress) -> Path:
    """Carry out ``plan`` in ``directory``, continuing what an earlier process began there; returns the directory.

    Raises KvevalError for a directory that cannot be used, EngineError when the engine or the machine fails; what was
    answered by then stays in the journal.
    """
    from kveval.runs.directory import check_foreign

    check_foreign(directory, plan.document)
    if is_whole(directory):
        progress.note("this run is finished already: nothing was asked again")
        return directory
    with claim(directory, plan.document) as work, Journal(directory / JOURNAL) as journal:
        prompts = {context.context: prompts_of(context) for context in plan.contexts}
        if _left(plan, journal, prompts):
            _read_all(plan, journal, prompts, work, progress)
        _finish(plan, journal, prompts, directory, progress)
    return directory


def _left(plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]]) -> list[tuple[str, int]]:
    """(arm, context) that are not wholly read and answered yet."""
    return [
        (arm.name, context)
        for context, asked in prompts.items()
        for arm in plan.arms
        if not journal.has_reading(arm.name, context) or _missing(journal, arm.name, asked)
    ]


def _missing(journal: Journal, arm: str, prompts: list[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if journal.get(arm, prompt.sha256) is None]


def _read_all(plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]], work: Path, progress: Progress) -> None:
    with _loaded_arms(plan, journal, progress) as arms:
        left = _left(plan, journal, prompts)
        works = [_work(plan, arm, context, prompts, journal) for arm, context in left]
        with progress.over(works):
            for context in plan.contexts:
                reference = work / f"baseline-{context.context}.f32"
                for arm in plan.arms:
                    if (arm.name, context.context) in left:
                        _read(plan, journal, arms, arm.name, context, prompts[context.context], reference, progress)
                reference.unlink(missing_ok=True)


def _read(
    plan: Plan,
    journal: Journal,
    arms: dict[str, TransformersLM],
    name: str,
    context: Text,
    prompts: list[Prompt],
    reference: Path,
    progress: Progress,
) -> None:
    """One arm reads one context. A candidate needs the baseline's distributions: read them again should they be gone or wrong."""
    from kveval.engines.transformers import DECODE_STEPS
    from kveval.measure.divergence import Recorder, is_reference
    from kveval.runs.rows import first_recorded, look_on, sampled_positions

    baseline, arm = plan.arms[0].name, plan.arm(name)
    head = arms[name].loaded.head
    sampled = sampled_positions(plan, context)
    stops = {prompt.prefix for prompt in prompts}
    if name != baseline and not is_reference(
        reference, head.vocabulary, context.ids, sampled, journal.nll(baseline, context.context)
    ):
        again = Recorder(head, context.ids, sampled, output=reference)
        arms[baseline].read(context.ids, [], stops=stops, recorder=again)
        again.finish()
    recorder = Recorder(
        head,
        context.ids,
        sampled,
        baseline=None if name == baseline else reference,
        output=reference if name == baseline else None,
        first=first_recorded(plan, arm, len(context.ids)),
    )
    missing = _missing(journal, name, prompts)
    with progress.reading(name, context.context) as watch:
        reading = arms[name].read(
            context.ids,
            missing,
            stops=stops,
            recorder=recorder,
            watch=watch,
            decode_steps=DECODE_STEPS,
            look_on=look_on(plan, len(context.ids)),
        )
    recording = recorder.finish()
    if journal.has_reading(name, context.context):
        return
    sizes = {
        "tokens": reading.tokens,
        "predicted_bytes": _predicted(plan, name, reading.tokens),
        "stored_bytes": reading.stored_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "weights_bytes": reading.weights_bytes,
        "start_bytes": reading.start_bytes,
        "peak_bytes": reading.peak_bytes,
    }
    series = {"nll": recording.nll, "kl": recording.kl, "top1_agree": recording.top1_agree}
    spans = [(span.phase, span.length, span.tokens, span.seconds) for span in reading.spans]
    journal.put_reading(name, context.context, sizes, series, spans)


def _predicted(plan: Plan, name: str, tokens: int) -> int:
    from kveval.memory.predict import stream_bytes

    return stream_bytes(plan.geometry, plan.arm(name).fmt, tokens)


@contextmanager
def _loaded_arms(plan: Plan, journal: Journal, progress: Progress) -> Iterator[dict[str, TransformersLM]]:
    """An LM for each arm over one loaded model; gone afterwards."""
    import torch

    from kveval.cache.attention import NAME, register
    from kveval.engines.transformers import TransformersLM, calibrate, prepare
    from kveval.models.load import load_model

    settings = plan.experiment["engine"]
    torch.set_num_threads(settings["threads"])
    progress.note(f"loading {plan.source.name} ({settings['compute_dtype']} arithmetic on {settings['device']})")
    register()
    model = load_model(
        plan.source, dtype=settings["compute_dtype"], device=settings["device"], attn_implementation=NAME
    )
    loaded = prepare(model, plan.tokenizer)
    try:
        yield {
            arm.name: TransformersLM(
                loaded,
                arm.fmt,
                chunk_tokens=settings["chunk_tokens"],
                answers=journal.arm(arm.name),
                scales=calibrate(loaded, arm.fmt, plan.calibration),
            )
            for arm in plan.arms
        }
    finally:
        del model, loaded
        if settings["device"] == "cuda":
            torch.cuda.empty_cache()


def _work(plan: Plan, arm: str, context: int, prompts: dict[int, list[Prompt]], journal: Journal) -> Work:
    fmt = plan.arm(arm).fmt
    tokens = len(next(one.ids for one in plan.contexts if one.context == context))
    return Work(
        arm=arm,
        context=context,
        tokens=tokens,
        questions=len(_missing(journal, arm, prompts[context])),
        window=fmt.window.size if fmt.window else None,
    )


def _finish(
    plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]], directory: Path, progress: Progress
) -> None:
    """Rows, checks and lm-eval's own results; the manifest last."""
    from kveval.measure.checks import run_checks
    from kveval.runs.rows import build_rows, write_tables
    from kveval.runs.scored import lm_eval_results

    progress.note("scoring with lm-eval and writing rows")
    tables = build_rows(plan, journal, prompts)
    tables["checks"] = run_checks(plan.experiment, tables)
    write_json(directory / "lm_eval.json", lm_eval_results(plan, journal, prompts))
    hashes = write_tables(directory, tables)
    manifest: dict[str, Any] = {"schema": SCHEMA_VERSION, "plan": plan.hash, "tables": hashes}
    write_json(directory / MANIFEST, manifest)

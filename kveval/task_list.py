"""The lm-eval tasks that come with kveval, as ``kveval tasks`` lists them."""

from __future__ import annotations

from kveval import lmtasks, perplexity_tasks, ruler_tasks, shared_tasks
from kveval.samples.ruler.registry import FAMILIES, OFFLINE


def listing() -> str:
    """Every group and task with its lengths and its number of questions by default."""
    lengths, samples = " ".join(ruler_tasks.LENGTHS), ruler_tasks.SAMPLES
    each = len(OFFLINE) * samples
    return "\n".join(
        [
            "shared protocol: many questions about each context; lengths in --metadata, 4k by default",
            _row(lmtasks.TASK, _grid_questions(), "at each length, in each context (kveval run --tasks needles)"),
            _row("kveval_shared", sum(map(shared_tasks.questions, OFFLINE)), "all of RULER (kveval run --tasks ruler)"),
            *(_row(shared_tasks.PREFIX + name, shared_tasks.questions(name)) for name in shared_tasks.TASKS),
            "",
            f"{ruler_tasks.PROTOCOL} protocol: one question in each prompt, as in RULER's tables",
            f"lengths: {lengths}",
            "groups",
            _row("kveval_ruler", len(ruler_tasks.LENGTHS) * each, "all lengths"),
            _row("kveval_ruler_LENGTH", each, "one length: kveval_ruler_32k"),
            _row("kveval_ruler_at_length", each, "any length, in --metadata"),
            _row("kveval_ruler13...", each, "the same with SQuAD and HotpotQA, which you bring, for qa_1 and qa_2"),
            "tasks; with _LENGTH one of these lengths (kveval_ruler_vt_32k), without any length, in --metadata",
            *(_row(f"{ruler_tasks.task_name(name)}[_LENGTH]", samples) for name in FAMILIES),
            "",
            "perplexity of long texts, through the cache; lengths as above",
            _row("kveval_perplexity[_LENGTH]", perplexity_tasks.SAMPLES, "(texts)"),
        ]
    )


def _grid_questions() -> int:
    grid = lmtasks.Settings()
    return len(grid.depths) * grid.needles_per_cell


def _row(name: str, questions: int, remark: str = "") -> str:
    return f"  {name:<40}{questions:>5,} questions  {remark}".rstrip()

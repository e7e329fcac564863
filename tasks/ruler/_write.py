"""Write the YAMLs of this folder: lm-eval knows a task by its own file only, and there is one for each family and length.

python tasks/ruler/_write.py
"""

from __future__ import annotations

from pathlib import Path

from kveval.ruler_tasks import LENGTHS, groups, task_name
from kveval.samples.ruler.registry import FAMILIES

FAMILY = """\
include: ../_strict
task: {task}
task_alias: {task} (strict)
dataset_kwargs: {{family: {family}}}
generation_kwargs: {{until: [], max_gen_toks: {budget}, do_sample: false}}
"""
AT_LENGTH = """\
include: {task}.yaml
task: {task}_{length}
task_alias: {task}_{length} (strict)
dataset_kwargs: {{family: {family}, at: {length}}}
"""
GROUP = """\
group: {group}
group_alias: {group} (strict)
task:
{members}
aggregate_metric_list:
  - {{metric: score, weight_by_size: false}}
metadata: {{version: 1.0, protocol: strict}}
"""


def files() -> dict[str, str]:
    """Path in this folder -> content."""
    found = {}
    for name, family in FAMILIES.items():
        task = task_name(name)
        found[f"{name}/{task}.yaml"] = FAMILY.format(task=task, family=name, budget=family.budget_tokens)
        for length in LENGTHS:
            found[f"{name}/{task}_{length}.yaml"] = AT_LENGTH.format(task=task, family=name, length=length)
    for group, members in groups().items():
        listed = "\n".join(f"  - {member}" for member in members)
        found[f"{group}.yaml"] = GROUP.format(group=group, members=listed)
    return found


if __name__ == "__main__":
    root = Path(__file__).parent
    for stale in root.rglob("*.yaml"):
        stale.unlink()
    for path, content in files().items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(content, encoding="utf-8")

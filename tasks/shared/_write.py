"""Write the YAMLs of this folder: one for each task, and the group of RULER's thirteen.

python tasks/shared/_write.py
"""

from __future__ import annotations

from pathlib import Path

from kveval.samples.ruler.registry import OFFLINE
from kveval.shared_tasks import PREFIX, TASKS

TASK = """\
include: _shared
task: {task}
task_alias: {task} (shared)
dataset_kwargs: {{family: {family}}}
"""
GROUP = """\
group: kveval_shared
group_alias: kveval_shared (shared)
task:
{members}
aggregate_metric_list:
  - {{metric: score, weight_by_size: false}}
metadata: {{version: 1.0, protocol: shared}}
"""


def files() -> dict[str, str]:
    """Name of a file -> its content."""
    found = {f"{PREFIX}{name}.yaml": TASK.format(task=PREFIX + name, family=name) for name in TASKS}
    members = "\n".join(f"  - {PREFIX}{name}" for name in OFFLINE)
    return found | {"kveval_shared.yaml": GROUP.format(members=members)}


if __name__ == "__main__":
    for path, content in files().items():
        (Path(__file__).parent / path).write_text(content, encoding="utf-8")

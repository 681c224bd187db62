"""An lm-eval task over local files, so that no network is needed."""

from __future__ import annotations

import json
from pathlib import Path

import yaml


def choice_task(folder: Path, name: str = "tiny_sums", label: int = 0) -> Path:
    """A multiple-choice task in folder/tasks over a local jsonl file: eight questions, two choices each.

    Args:
        folder: where its files go.
        name: of the task.
        label: which choice counts as right; 0 is the short one, which an untrained model takes.
    """
    rows = [{"q": f"{a} plus {b} is", "choices": [str(a + b), "a very long wrong answer"], "label": label}
            for a in range(4) for b in (1, 2)]  # fmt: skip
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
        "metadata": {"version": 1.0},
    }
    (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return tasks

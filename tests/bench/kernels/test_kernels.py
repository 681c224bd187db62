"""The kernel and optimizer benches at toy size: every op and part is measured and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench._timing import CEILING, Case, extra_peak, find, interleave, last_level_cache
from bench.kernels import ops, ops_adamw, ops_cases
from bench.kernels.ops_cases import OPS, cases
from bench.kernels.ops_setting import Setting

CPU = torch.device("cpu")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two runs of the kernel bench keep: they append, they do not overwrite."""
    path = tmp_path_factory.mktemp("ops") / "ops.jsonl"
    size = ["--rows", "64", "--cols", "136", "--repeats", "2", "--no-compile", "--jsonl", str(path)]
    for _ in range(2):
        ops.main([*size, "--dtypes", "float32", "bfloat16"])
    return lines(path)


class TestOps:
    def test_every_op_has_a_kernel_and_a_ceiling_in_both_dtypes(self, rows: list[dict[str, Any]]) -> None:
        assert {row["op"] for row in rows} == set(OPS)
        kernel = Setting(64, 136, CPU, compiled=False).kernel
        for op in set(OPS):
            for dtype in ("float32", "bfloat16"):
                own = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
                assert {CEILING, kernel} <= {row["implementation"] for row in own}, (op, dtype)
                assert all(row["samples"] == 2 and row["median_ms"] > 0 for row in own)
                assert all(row["traffic"] > 0 and row["size"] == [64, 136] for row in own)
        keys = [(row["op"], row["dtype"], row["variant"], row["implementation"]) for row in rows]
        assert len(keys) == 2 * len(set(keys)), "no case twice in a run"

    def test_every_case_is_compared_with_its_ceiling_and_a_copy(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        size = ["--rows", "16", "--cols", "8", "--repeats", "1", "--no-compile", "--jsonl", str(tmp_path / "ops.jsonl")]
        ops.main([*size, "--dtypes", "float32", "bfloat16"])
        lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"][2:]
        assert {op for op, *_ in lines} == set(OPS)
        for _, _, _, implementation, *_, share, copied in lines:
            assert (share == "-") == (implementation == CEILING)
            assert copied.endswith("%")
        (copy,) = [line for line in lines if line[:3] == ["perturb", "float32", "a plain copy"]]
        assert copy[-1] == "100%"

    def test_only_the_chosen_ops_and_dtypes(self, tmp_path: Path) -> None:
        path = tmp_path / "ops.jsonl"
        ops.main(
            ["--rows", "16", "--cols", "8", "--repeats", "1", "--no-compile", "--jsonl", str(path), "--ops", "perturb",
             "--dtypes", "float16"]
        )  # fmt: skip
        assert {(row["op"], row["dtype"]) for row in lines(path)} == {("perturb", "float16")}

    def test_a_wrong_kernel_is_not_timed(self) -> None:
        setting = Setting(16, 8, CPU, compiled=False)
        if setting.kernel == "python":
            pytest.skip("needs the C++ kernels")

        def broken(x: torch.Tensor) -> torch.Tensor:
            return x * (1 if x.dtype == torch.float64 else 1.001)

        with pytest.raises(SystemExit, match="disagrees"):
            setting.check("broken", "float32", broken)

    def test_an_op_that_disagrees_leaves_the_others_to_be_timed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refusing(setting: Setting, op: str, dtypes: list[str]) -> list[Case]:
            if op == "perturb":
                raise SystemExit("perturb disagrees")
            return cases(setting, op, dtypes)

        monkeypatch.setattr(ops, "cases", refusing)
        path = tmp_path / "ops.jsonl"
        size = ["--rows", "16", "--cols", "8", "--repeats", "1", "--no-compile", "--jsonl", str(path)]
        with pytest.raises(SystemExit, match="perturb disagrees"):
            ops.main([*size, "--ops", "perturb", "slice_gather", "--dtypes", "float32"])
        assert {row["op"] for row in lines(path)} == {"slice_gather"}
        assert "| slice_gather |" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("name", "broken_when"),
        [
            ("moreau_step", lambda args, options: args[4] == 0),
            ("add_group_penalty_", lambda args, options: args[2].diff().min() == 4),
            ("group_penalty", lambda args, options: True),
            ("group_importance", lambda args, options: args[3] > 1),
            ("slice_gather", lambda args, options: options["scale"] == 1 and options["rows"] is None),
            ("slice_gather", lambda args, options: options["scale"] == 1 and options["columns"] is None),
            ("regularised_adamw", lambda args, options: options["penalties"] == [None]),
            ("regularised_adamw", lambda args, options: options.get("stochastic", False)),
            ("regularised_adamw", lambda args, options: args[2][0].first.dtype == torch.uint8),
        ],
        ids=["plain step", "spread columns", "value only", "heads", "columns", "rows", "plain", "stochastic", "8 bit"],
    )  # fmt: skip
    def test_no_mode_is_timed_that_disagrees(
        self, name: str, broken_when: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kernel that is wrong in this mode alone."""
        setting = Setting(16, 16, CPU, compiled=False)
        if setting.kernel == "python":
            pytest.skip("needs the C++ kernels")
        module = ops_adamw if name == "regularised_adamw" else ops_cases
        op = getattr(module, name)
        hit = []

        def broken(*args: Any, **options: Any) -> Any:
            result = op(*args, **options)
            if os.environ["PYPRUNE_BACKEND"] == "python" or not broken_when(args, options):
                return result
            hit.append(options)
            in_place = {"add_group_penalty_": args[0], "moreau_step": args[0], "regularised_adamw": args[0][0]}
            changed = in_place.get(name, result)
            changed.copy_(changed * 1.05)
            return result

        monkeypatch.setattr(module, name, broken)
        own = {"add_group_penalty_": "group_penalty"}.get(name, name)
        with pytest.raises(SystemExit, match="disagrees"):
            cases(setting, own, ["bfloat16"])
        assert hit

    def test_all_cases_of_selected_groups_start_from_the_same_cache(self) -> None:
        setting = Setting(16, 16, CPU, compiled=False, cache=1 << 20)
        for op in ("group_penalty", "group_soft_threshold"):
            own = cases(setting, op, ["float32", "bfloat16"])
            assert {case.prepare for case in own} == {setting.cold}
        (buffer,) = setting.cold.args  # type: ignore[union-attr]
        assert buffer.nbytes == 2 << 20, "twice the cache"
        assert buffer.unique().tolist() == [1.0], "written, so that every page of it exists"
        assert Setting(16, 16, CPU, compiled=False).cold is None
        assert last_level_cache() >= 1 << 16

    @pytest.mark.parametrize("op", ["group_penalty", "group_soft_threshold"])
    def test_any_share_of_16_bit_columns_can_be_probed(self, op: str) -> None:
        """A fifth of 64 columns are 13, of which no 32-bit words can be made."""
        setting = Setting(16, 64, CPU, compiled=False, selected=0.2)
        own = cases(setting, op, ["bfloat16"])
        interleave(own, 1, CPU)
        (ceiling,) = [c for c in own if (c.variant, c.implementation) == ("columns", CEILING)]
        arrays = 3 if op == "group_penalty" else 2
        assert ceiling.traffic == arrays * 16 * 12 * 2
        kernel = [c for c in own if c.variant.startswith("columns") and c.implementation == setting.kernel]
        selected = {tuple(a.shape) for c in kernel for a in _arrays(c) if a.dtype == torch.int64}
        assert selected == {(12,)}, "kernel and ceiling work on the same columns"

    @pytest.mark.parametrize("op", OPS)
    def test_the_arrays_stay_what_they_are(self, op: str) -> None:
        """Hundreds of calls must not drive values to zero, into subnormals or to NaN, which time differently."""
        setting = Setting(16, 16, CPU, compiled=False)
        own = cases(setting, op, ["float32"])
        interleave(own, 60, CPU)
        seen = 0
        for case in own:
            for array in _arrays(case):
                if array.dtype == torch.float32 and array.numel() >= 64 and case.implementation != CEILING:
                    assert array.isfinite().all(), case
                    seen += 1
                    assert ((array == 0) | (array.abs() > 1e-30)).all(), case
        assert seen

    def test_bad_sizes_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            ops.main(["--rows", "16", "--cols", "12"])
        assert "multiple" in capsys.readouterr().err


def _arrays(case: Case) -> list[torch.Tensor]:
    """Tensors that a case's call holds."""
    found: list[torch.Tensor] = []
    todo: list[Any] = [case.call]
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            found.append(item.detach())
        elif isinstance(item, (list, tuple)):
            todo += item
        elif hasattr(item, "func"):
            todo += [item.func, *item.args, *item.keywords.values()]
        elif getattr(item, "__closure__", None):
            todo += [cell.cell_contents for cell in item.__closure__]
    return found


def test_peaks_are_the_allocators() -> None:
    def work() -> None:
        kept = torch.empty(1_000_000)
        for _ in range(3):
            torch.empty(2_000_000)
        del kept

    assert extra_peak(work, CPU) == pytest.approx(12_000_000, rel=0.001)


def test_samples_are_interleaved_and_prepared() -> None:
    log: list[str] = []
    first = Case("op", "float32", "", "a", lambda: log.append("a"))
    second = Case("op", "float32", "", "b", lambda: log.append("b"), prepare=lambda: log.append("clean"))
    interleave([first, second], 2, CPU)
    assert log == ["a", "clean", "b"] * 3
    assert len(first.samples) == len(second.samples) == 2, "the first round is not kept"
    assert find([first, second], "op", "float32", "", "b") is second

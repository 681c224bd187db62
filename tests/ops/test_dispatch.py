from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable

import pytest
import torch

from pyprune.ops import (
    BackendError,
    OpError,
    add_group_penalty_,
    available_isas,
    backend_report,
    dispatch,
    group_importance,
    group_penalty,
    group_soft_threshold,
    moreau_step,
    perturb,
    slice_gather,
)


def test_the_extension_is_there_when_it_is_required() -> None:
    if os.environ.get("PYPRUNE_REQUIRE_EXT", "0") not in {"", "0"}:
        assert dispatch.extension() is not None


def test_auto_logs_its_reason_once(
    use_backend: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend("auto")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="pyprune.ops"):
        for _ in range(3):
            group_soft_threshold(torch.ones(2, 2), [0], 0, 0.5)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    expected = "cpp" if available_isas() else "python"
    assert messages[0].startswith(f"group_soft_threshold runs on {expected} (not triton: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_auto_does_not_choose_tritons_interpreter(
    use_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend("auto")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = dispatch.choose("an_op", {"triton": lambda: None, "cpp": lambda: None})
    assert chosen == "cpp"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("threshold", lambda w: group_soft_threshold(w, [0], 0, 1e39)),
        ("gamma", lambda w: moreau_step(w, w.clone(), 1e39, 1e39, 0.0, 0)),
        ("gamma * eta", lambda w: moreau_step(w, w.clone(), 1e20, 1e20, 1e20, 0)),
        ("penalty_weight", lambda w: add_group_penalty_(w.clone(), w, [0], 0, "l2", 1e39)),
        ("offset", lambda w: group_penalty(w, [0], 0, "l2", offset=-1e39)),
        ("offset", lambda w: group_importance(w, w, 0, offset=1e39)),
        ("sigma", lambda w: perturb(w, w, 1e39, 0)),
        ("scale", lambda w: slice_gather(w, None, scale=1e39)),
    ],
)
def test_scalars_that_float32_cannot_hold_are_refused_alike(
    backend: str, name: str, call: Callable[[torch.Tensor], object]
) -> None:
    w = torch.ones(2, 3)
    with pytest.raises(OpError, match=rf"{re.escape(name)} is -?1e\+\d\d, must be finite, and at most 3.4e38"):
        call(w)
    assert torch.equal(w, torch.ones(2, 3))


def test_float64_holds_scalars_that_float32_does_not() -> None:
    assert slice_gather(torch.ones(3).double(), None, scale=1e39).tolist() == [1e39] * 3


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPRUNE_BACKEND", "tritn")
    with pytest.raises(BackendError, match="Did you mean 'triton'"):
        group_soft_threshold(torch.ones(2, 2), [0], 0, 0.5)


def test_explicit_backend_that_an_op_does_not_have(use_backend: Callable[[str], None]) -> None:
    use_backend("cpp")
    with pytest.raises(BackendError, match="an_op cannot run on it: it has no such implementation"):
        dispatch.choose("an_op", {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the tensor would simply be on the wrong device")
def test_triton_without_gpu_or_interpreter(use_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        group_soft_threshold(torch.ones(2, 2), [0], 0, 0.5)


def test_cpp_without_the_extension(use_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "extension", lambda: None)
    use_backend("cpp")
    with pytest.raises(BackendError, match="not built"):
        group_soft_threshold(torch.ones(2, 2), [0], 0, 0.5)
    assert dispatch.available_isas() == []
    assert "not built" in backend_report()["cpp"]


def test_an_extension_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the wheel's OpenMP runtime was deleted: that is not a package without kernels."""

    def fails(name: str) -> None:
        raise ImportError("libgomp.so.1: cannot open shared object file")

    dispatch.load_extension.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(dispatch.importlib, "import_module", fails)
            assert backend_report()["cpp"] == (
                "the extension pyprune._C cannot be loaded: libgomp.so.1: cannot open shared object file"
            )
            assert available_isas() == []
    finally:
        dispatch.load_extension.cache_clear()


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_instruction_sets() -> None:
    module = dispatch.extension()
    assert module is not None
    on_arm = platform.machine() == "aarch64"
    assert (available_isas() == ["neon"]) if on_arm else (available_isas()[0] == "scalar")
    absent = "avx2" if on_arm else "neon"
    try:
        for isa in available_isas():
            module.set_isa(isa)
            assert module.active_isa() == isa
        with pytest.raises(ValueError, match=rf"'{absent}'.*auto, {available_isas()[0]}"):
            module.set_isa(absent)
    finally:
        module.set_isa("auto")
    assert module.active_isa() == available_isas()[-1]


@pytest.mark.parametrize("built", [True, False], ids=["with the extension", "without"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_are_checked(built: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the extension or by torch, with the same answers; strided tensors too."""
    if built and dispatch.extension() is None:
        pytest.skip("the extension is not built")
    if not built:
        monkeypatch.setattr(dispatch, "extension", lambda: None)
    like = torch.ones(1)

    def checked(values: list[int]) -> torch.Tensor:
        strided = torch.tensor([value for value in values for _ in range(2)], dtype=dtype)[::2]
        return dispatch.check_index(strided, 5, like)

    for good in ([], [4], [3, 0, 4], [0, 1, 2, 3, 4]):
        assert checked(good).tolist() == good
        assert checked(good).dtype == torch.int64
    for bad, reason in (
        ([0, 5], "runs from 0 to 5, allowed are 0 to 4"),
        ([2, -1], "runs from -1 to 2"),
        ([1, 4, 1], "more than once"),
    ):
        with pytest.raises(OpError, match=reason):
            checked(bad)

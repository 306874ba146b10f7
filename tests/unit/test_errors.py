"""The error classes as data, and the page generated from them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flowgpu.errors import (
    DUMPED_EXIT,
    CheckpointFailed,
    CriuFailed,
    FlowError,
    PidTaken,
    UnknownJob,
    all_errors,
)

ROOT = Path(__file__).resolve().parents[2]


def example(cls: type[FlowError]) -> FlowError:
    return cls(**{name: f"<{name}>" for name in cls.field_names()})


def test_exit_codes_are_unique_and_leave_the_reserved_one_alone() -> None:
    codes = [cls.exit_code for cls in all_errors()]
    assert len(codes) == len(set(codes)) > 20
    assert DUMPED_EXIT not in codes
    # Low ones are given by many programs, from 128 on they are those of signals.
    assert all(50 <= code < 128 for code in codes)


@pytest.mark.parametrize("cls", all_errors())
def test_message_is_one_sentence_with_every_field(cls: type[FlowError]) -> None:
    message = str(example(cls))
    assert all(f"<{name}>" in message for name in cls.field_names())
    assert message.endswith(".")
    assert "\n" not in message
    assert cls.hint.endswith(".")


@pytest.mark.parametrize("cls", all_errors())
def test_error_survives_a_socket_and_pickle(cls: type[FlowError]) -> None:
    error = example(cls)
    for copy in (FlowError.from_dict(error.as_dict()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert str(copy) == str(error)


def test_fields_are_taken_by_position_in_the_order_of_the_message() -> None:
    error = CheckpointFailed("checkpoint", "train", "STRIP", "a stream is stuck")
    assert str(error) == ("The checkpoint of job 'train' failed in phase STRIP: a stream is stuck.")
    assert error.fields["phase"] == "STRIP"
    assert error.exit_code == 73


@pytest.mark.parametrize(
    "make",
    [
        lambda: UnknownJob(),
        lambda: UnknownJob("a", "b"),
        lambda: UnknownJob("a", job="a"),
        lambda: UnknownJob(name="a"),
    ],
)
def test_wrong_fields_are_refused(make: object) -> None:
    with pytest.raises(TypeError, match="UnknownJob takes the fields"):
        make()  # type: ignore[operator]


def test_unknown_class_from_the_wire_keeps_its_message() -> None:
    error = FlowError.from_dict({"error": "Newer", "message": "it broke", "fields": {"x": 1}})
    assert type(error) is FlowError
    assert "it broke" in str(error)


def test_errors_of_criu_are_caught_as_one() -> None:
    assert issubclass(PidTaken, CriuFailed)


def test_error_page_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import errorlist

    assert (ROOT / "docs" / "reference" / "errors.md").read_text() == errorlist.render()


def test_the_page_of_bad_input_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import badlist

    assert (ROOT / "docs" / "reference" / "bad-input.md").read_text() == badlist.render()

"""The table of trials and the page made of it, from outcomes that are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import summary
from tests.trials.__main__ import judge, table
from tests.trials.catalogue import all_cases, catalogue
from tests.trials.prelude import SAME, Program
from tools import programlist

CASES = [" ".join(case) for case in all_cases()]


def judged(program: Program, **changed: str) -> dict[str, dict[str, str]]:
    """Outcomes as they should be but for `changed`, by a case with `_` for its spaces."""
    found = {}
    for engine, mode in all_cases():
        case = f"{engine} {mode}"
        outcome = changed.get(case.replace(" ", "_"), program.outcome(engine, mode))
        found[case] = {"outcome": outcome, "details": ""}
    judge(program, found)
    return found


def program(pending: str = "") -> Program:
    by_case = {"": pending} if pending else {}
    return Program("one", "files", "about", lambda _: None, {}, by_case, "", ())


def test_the_table_names_what_deviates_and_where() -> None:
    lines = table({"one": judged(program(), native_restored="lost", replay_restored="lost")})
    assert lines[-1] == "DEVIATES: one: lost, not same (native restored, replay restored)"


def test_what_is_as_expected_has_no_remark() -> None:
    assert len(table({"one": judged(program())})) == 2


@pytest.mark.parametrize(
    ("outcome", "remark"),
    [
        ("lost", "pending (a fault): one: lost, not same"),
        (SAME, "pending no more: one: same"),
        ("refused: Unsupported", "pending no more: one: refused: Unsupported"),
        ("refused: CheckpointFailed", "pending (a fault): one: refused: CheckpointFailed"),
    ],
)
def test_a_pending_program_is_listed_until_it_comes_out_right(outcome: str, remark: str) -> None:
    lines = table({"one": judged(program("a fault"), native_restored=outcome)})
    assert any(line.startswith(remark) and "native restored" in line for line in lines)


def test_the_page_has_the_newest_outcome_of_each_program(
    tmp_path: Path,
) -> None:
    names = list(catalogue())[:2]
    for date, chosen, outcome in (("2026-01-02", names, "lost"), ("2026-01-03", names[:1], SAME)):
        document = {
            "kind": "trials",
            "lane": "emulated",
            "date": date,
            "command": "c",
            "commit": "d",
            "programs": {name: judged(catalogue()[name]) for name in chosen},
        }
        for found in document["programs"].values():
            found[CASES[0]]["outcome"] = outcome
        (tmp_path / "raw.json").write_text(json.dumps(document))
        summary.write(tmp_path / "raw.json", tmp_path)
    rows = {
        line.split("|")[1].strip(" `"): line for line in _page(tmp_path) if line.startswith("| `")
    }
    assert "**lost**" not in rows[names[0]]
    assert "**lost**" in rows[names[1]]
    assert rows.keys() == catalogue().keys()
    assert all("not run" in rows[name] for name in rows if name not in names)


def _page(results: Path) -> list[str]:
    return programlist.render(summary.kept("trials", results)).splitlines()

"""Runs Python statements that come as JSON strings, one a line, and answers each with one line."""

from __future__ import annotations

import ast
import json
import sys
import traceback
from typing import Any

from tests.emu import driver_lib


def run(source: str, names: dict[str, Any]) -> Any:
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<sent>", "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "<sent>", "eval"), names)


def main() -> None:
    names = dict(vars(driver_lib))
    for line in sys.stdin:
        try:
            answer = {"value": run(json.loads(line), names)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer, default=int), flush=True)


if __name__ == "__main__":
    main()

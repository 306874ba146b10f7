"""What a user has set for Python is for the job's programs, not for this command of ours.

Loaded before all else, so that no module of a folder in PYTHONPATH is taken for one of ours, of a
package that we need, or of the standard library.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress


def keep_out() -> None:
    """Look in the folders of PYTHONPATH last, and let no warning become an error."""
    with suppress(OSError):  # the working folder has been removed
        theirs = {os.path.abspath(path) for path in _folders()}
        sys.path.sort(key=lambda path: os.path.abspath(path) in theirs)
    if sys.warnoptions:
        warnings.simplefilter("ignore")


def _folders() -> list[str]:
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [path for path in named if os.path.abspath(path) != ours]


keep_out()

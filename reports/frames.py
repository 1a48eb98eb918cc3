"""Where a target broke: the innermost frame of its own code in a record's detail, a traceback or a dump of a dying process."""

from __future__ import annotations

import re

from reports.text import one_line, shorten

__all__ = ["innermost"]

_WIDTH = 100
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+),? in (.+)$', re.MULTILINE)  # faulthandler's frames have no comma
_CALLERS = re.compile(r"(?:^|[\\/])harness[\\/](?:execution|replay|worker)\.py$")  # they call into targets
_LIBRARIES = re.compile(r"^<|[\\/](?:site-packages|dist-packages|lib[\\/]python3\.\d+)[\\/]")


def innermost(detail: str) -> str:
    """`toy.py:54 in rewind`: of the code that the harness called, the last frame outside installed packages and the standard
    library, or inside of them where all are; empty where the detail has no such frame.
    """
    fatal, _, dump = detail.partition("Fatal Python error:")
    if dump:  # most recent call first, thread by thread
        _, _, current = dump.partition("Current thread ")
        frames = _FRAME.findall(current.split("\n\n")[0])[::-1]
    else:
        frames = _FRAME.findall(fatal)
    callers = [index for index, (file, _, _) in enumerate(frames) if _CALLERS.search(file)]
    called = frames[callers[-1] + 1 :] if callers else []
    if not called:
        return ""
    file, line, function = ([frame for frame in called if not _LIBRARIES.search(frame[0])] or called)[-1]
    name = re.split(r"[\\/]", file)[-1]
    return shorten(one_line(f"{name}:{line} in {function}"), _WIDTH)

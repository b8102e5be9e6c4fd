"""The one OpenVINO core of a process.

OpenVINO's CPU plugin gives the thread that makes it an alternate signal stack, and takes it back when its core is
destroyed. With two cores the second to go restores the stack of the first, which is gone: the next signal, a Ctrl-C,
ends the process with a segmentation fault (seen with 2026.4.1).
"""

from __future__ import annotations

from functools import cache

import openvino as ov


@cache
def openvino_core() -> ov.Core:
    """The core, made at the first call and kept until the process ends."""
    return ov.Core()

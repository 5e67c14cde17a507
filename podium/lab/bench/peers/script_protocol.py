"""The peer's end of `script.py`: a peer's script reads one JSON object per line and answers each with one.

Run by the peers' interpreter beside the script that imports it; imports nothing of Podium. The requests by `do`:

    setup (sizes of the tensors, workers, lr, period, folder)  ->  variants, unavailable (variant to reason)
    round (variant, seconds)                                   ->  round_trips, seconds
    tally (variant)                                            ->  pushed, server, pulled; all in units, see `work.py`
    end                                                        ->  nothing
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer_lines(make: Callable[..., Any]) -> None:
    """Answer requests until `end`. Only answers go to stdout; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contender: Any = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            do = request.pop("do")
            if do == "end":
                break
            if do == "setup":
                contender = make(**request)
                answer = {"variants": contender.variants, "unavailable": contender.unavailable}
            else:
                answer = getattr(contender, do)(**request)
            out.write(json.dumps(answer) + "\n")
    finally:  # also when the bench is gone
        if contender is not None:
            contender.end()
    out.write("{}\n")

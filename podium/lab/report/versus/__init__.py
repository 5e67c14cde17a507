"""Two sets of results side by side: yesterday's and today's, two machines, two versions.

    found = podium.compare_results("runs/monday", "runs/tuesday")
    print(found.answer, found.limits, sep="\\n")

Cells are matched by name, runs by seed. Every measure is tested in pairs of the same seed, Holm's correction runs over
all cells of a measure, and times and bytes are compared by their ratio, as everywhere else.

Why pairs for times, too: the same seed means the same samples and the same initial parameters, and with them the
same number of steps to a target, but not the same noise of the machine. Where a pair has nothing in common, the paired
test is still valid and only loses degrees of freedom; where it has, an unpaired test would be wrong. For times, Welch's
test is shown as a second opinion; it replaces the paired test where the two sets share fewer than two seeds.

No test here can know: all of one set was run before the other, so anything that lasted through one of them (load, heat,
another version) is in the difference, and seeds cannot tell one cause from another.
"""

from __future__ import annotations

from podium.lab.report.versus.base import Change, Difference, FromZero, Set, Side, Versus
from podium.lab.report.versus.changes import compare_results, compare_sets, read_set, welch
from podium.lab.report.versus.page import write_versus
from podium.lab.report.versus.prose import lines

__all__ = [
    "Change",
    "Difference",
    "FromZero",
    "Set",
    "Side",
    "Versus",
    "compare_results",
    "compare_sets",
    "lines",
    "read_set",
    "welch",
    "write_versus",
]

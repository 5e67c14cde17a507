"""A link that is cut while all processes live: nobody waits for ever, and the error says what to look at."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.engine.checkpoint import find_checkpoint
from podium.errors import Lost
from tests.integration.runs import FIELDS, pid_of, records_of
from tests.integration.shaping import CLUSTER, needs_root

pytestmark = [pytest.mark.root, needs_root]


def cut_link_of(rank: int) -> None:
    """Take down the one interface of this rank's namespace."""
    nsenter = ["nsenter", "--target", str(pid_of(rank)), "--net"]
    path = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    shown = subprocess.run([*nsenter, "ip", "-br", "link"], capture_output=True, text=True, check=True, env=path)
    (device,) = [line.split()[0].split("@")[0] for line in shown.stdout.splitlines() if not line.startswith("lo")]
    subprocess.run([*nsenter, "ip", "link", "set", device, "down"], check=True, env=path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nsenter") is None, reason="needs nsenter (util-linux)")
def test_a_cut_link_ends_the_run_with_a_clear_error_and_a_usable_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cut: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress" and event["step"] > 30 and not cut:
            cut.append(event["step"])
            cut_link_of(1)

    options = {**FIELDS, "deadline_s": 4.0, "launcher": "shaped", "cluster": str(tmp_path / "cluster.toml")}
    with pytest.raises(Lost, match="is a link between them cut"):
        podium.train(
            "digits-mlp",
            strategy="all-reduce",
            workers=3,
            epochs=200,
            checkpoint_every=20,
            run_dir=str(tmp_path / "run"),
            on_event=on_event,
            **options,
        )
    assert cut
    assert records_of(tmp_path / "run", "step")
    assert find_checkpoint(tmp_path / "run").step >= 20

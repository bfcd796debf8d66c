"""One scenario's report, to the last digit: what a change of the simulator changes is seen.

`KVIST_WRITE_GOLDEN=1` writes it anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvist.sim.des.scenario import load_scenario

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GOLDEN = Path(__file__).parent / "simulation_disaggregated.json"


def test_the_disaggregated_example_gives_the_report_that_is_kept() -> None:
    report = load_scenario(EXAMPLES / "disaggregated.yaml", {"trace.requests": 300}).run()
    text = json.dumps(report.to_dict(), indent=1)
    if os.environ.get("KVIST_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(text + "\n")
    assert GOLDEN.read_text() == text + "\n"

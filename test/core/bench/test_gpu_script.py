# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check without a GPU: what it calls of the engine is still there, so no GPU minute is lost to that."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / 'bench/gpu_check.py'
STEPS = 'packed,graphs,race,early,real'  # those of the kernels alone take longer and have tests of their own


def test_every_step_of_the_engine_runs_at_tiny_size(tmp_path):
    ran = subprocess.run([sys.executable, SCRIPT, '--dry-run', '--only', STEPS, '--out', tmp_path / 'found.json'],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = json.loads((tmp_path / 'found.json').read_text())['steps']
    assert {name.split()[0] for name in steps} == set(STEPS.split(','))
    assert all('failed' not in row for row in steps.values())

# SPDX-License-Identifier: Apache-2.0
"""How far actions move under other ways of reuse than the ones in use, at equal cost.

    python bench/reuse --checkpoint DIR --recording FILE.h5 [--json FILE]

A recording is what `rmuscle eval` leaves in out/eval/TASK/executions.h5. Each tested call has the references that a
policy would have had. Given are the share of tokens or neurons evaluated, and the mean difference to the dense actions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import neurons
import tokens
import torch
from calls import Bench

from rmuscle_core.bench.report import print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--checkpoint', type=Path, required=True)
    parser.add_argument('--recording', type=Path, required=True)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.checkpoint, args.recording)
    found = {part.__name__: part.measure(bench) for part in (tokens, neurons)}
    for name, rows in found.items():
        print_table(name, ['way', 'evaluated', 'mean error', '95th percentile'], rows)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main()

# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench``: the command line around the measurements."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rmuscle_core.bench import report
from rmuscle_core.bench.device import describe
from rmuscle_core.bench.sizes import CAMERAS, SIZES
from rmuscle_core.device import open_device
from rmuscle_core.errors import SettingsError
from rmuscle_core.model import load_config
from rmuscle_core.model.config import DTYPES
from rmuscle_core.options import output_file, whole
from rmuscle_core.settings import WEIGHT_DTYPES


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``bench`` to the command line; without one of its kinds it measures whole policy calls."""
    bench = subparsers.add_parser(
        'bench', help='measure policy calls, dense and cached',
        description='Measures whole policy calls, dense and with each cache, unless one of the first five options asks '
                    'for something else.')
    kind = bench.add_mutually_exclusive_group()
    kinds = {'layer': 'one real-size FFN layer of each kind', 'retrieval': 'look-up among 800 references',
             'reconstruct': 'policy calls with and without expansion of references between them',
             'roofline': 'least times of the full-size model on known devices, measuring nothing',
             'memory': 'bytes per reference on host and device'}
    for name, text in kinds.items():
        kind.add_argument(f'--{name}', dest='kind', action='store_const', const=name, help=text)
    model = bench.add_mutually_exclusive_group()
    model.add_argument('--size', '--random-weights', choices=tuple(SIZES), default='medium',
                       help='model with random weights (default: %(default)s)')
    model.add_argument('--checkpoint', type=Path, help='LeRobot or openpi checkpoint directory instead')
    bench.add_argument('--device', default='cpu', help='where to measure: cpu, cuda, cuda:1, ... (default: cpu)')
    bench.add_argument('--dtype', choices=tuple(DTYPES), help='type to compute in (default: float32 on a CPU, bfloat16 '
                       'elsewhere)')
    bench.add_argument('--weight-dtype', choices=WEIGHT_DTYPES, default='checkpoint',
                       help='how FFN weights of the model are held (default: %(default)s)')
    bench.add_argument('--views', type=whole(1, len(CAMERAS)), nargs='+', metavar='N', help="numbers of cameras to "
                       f"measure with, 1 to {len(CAMERAS)} (default: the model's)")
    bench.add_argument('--chunk', type=whole(1, 1000), nargs='+', metavar='N', help="numbers of actions in a chunk to "
                       "measure with (default: the model's)")
    bench.add_argument('--sketch', type=whole(0, 1024), metavar='WIDTH', help='compare tokens by sketches of this '
                       'width (default: whole)')
    bench.add_argument('--compile', action='store_true', help='add the eager dense call through torch.compile')
    bench.add_argument('--peers', action='store_true', help='add LeRobot and FlashRT, where installed, on --checkpoint')
    bench.add_argument('--rounds', type=whole(1, 10**6), metavar='N', help='rounds kept, after warm-up (default: by '
                       'kind; of whole calls as many as fit into 90 s)')
    bench.add_argument('--threads', type=whole(1, 1024), metavar='N', help='CPU threads (default: 1 with --layer, else '
                       'all)')
    bench.add_argument('--json', action='store_true', help='the last line of the output is the result as JSON')
    bench.add_argument('--out', type=output_file, metavar='FILE', help='also write the result to this JSON file')
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, then the JSON where it is asked for."""
    from rmuscle_core.bench import runs

    if args.checkpoint and (args.views or args.chunk):
        raise SettingsError('--views and --chunk change the model of --size; a checkpoint is measured as it is: leave '
                            'them out')
    if args.peers and not args.checkpoint:
        raise SettingsError('--peers read the checkpoint themselves; name it with --checkpoint')
    threads = args.threads or (1 if args.kind == 'layer' else None)
    if threads:
        torch.set_num_threads(threads)
    device = open_device(args.device)
    if args.checkpoint:
        load_config(args.checkpoint)
    args.dtype = args.dtype or ('float32' if device.type == 'cpu' else 'bfloat16')
    result = runs.RUNS[args.kind or 'calls'](args, device)
    report.finish({'kind': args.kind or 'calls', 'machine': describe(device), 'dtype': args.dtype,
                   'weight_dtype': args.weight_dtype, **result}, args.json, args.out)
    return 0

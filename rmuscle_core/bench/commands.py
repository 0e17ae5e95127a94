# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench``: the command line around the measurements."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rmuscle_core.bench import report
from rmuscle_core.bench.device import describe, open_device
from rmuscle_core.bench.sizes import SIZES
from rmuscle_core.model.config import DTYPES
from rmuscle_core.settings import WEIGHT_DTYPES


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``bench`` to the command line; without one of its kinds it measures whole policy calls."""
    bench = subparsers.add_parser('bench', help='measure policy calls, dense and cached')
    kind = bench.add_mutually_exclusive_group()
    kinds = {'layer': 'one real-size FFN layer of each kind', 'retrieval': 'look-up among 800 references',
             'reconstruct': 'policy calls with and without expansion of references between them',
             'roofline': 'least times of the full-size model on known devices, measuring nothing',
             'memory': 'bytes per reference on host and device'}
    for name, text in kinds.items():
        kind.add_argument(f'--{name}', dest='kind', action='store_const', const=name, help=text)
    model = bench.add_mutually_exclusive_group()
    model.add_argument('--size', '--random-weights', choices=tuple(SIZES), default='medium',
                       help='model with random weights (%(default)s)')
    model.add_argument('--checkpoint', type=Path, help='LeRobot checkpoint directory instead')
    bench.add_argument('--device', default='cpu', help='cpu, cuda, cuda:1, ... (%(default)s)')
    bench.add_argument('--dtype', choices=tuple(DTYPES), help='float32 on a CPU, bfloat16 elsewhere')
    bench.add_argument('--weight-dtype', choices=WEIGHT_DTYPES, default='checkpoint',
                       help='how FFN weights of the model are held (%(default)s)')
    bench.add_argument('--views', type=int, nargs='+', help='numbers of cameras to measure with')
    bench.add_argument('--chunk', type=int, nargs='+', help='chunk lengths to measure with')
    bench.add_argument('--sketch', type=int, help='compare tokens by sketches of this width')
    bench.add_argument('--compile', action='store_true', help='add the eager dense call through torch.compile')
    bench.add_argument('--peers', action='store_true', help='add LeRobot and FlashRT, where installed, on --checkpoint')
    bench.add_argument('--rounds', type=int, help='rounds kept, after warm-up')
    bench.add_argument('--threads', type=int, help='CPU threads (1 with --layer, else all)')
    bench.add_argument('--json', action='store_true', help='the last line of the output is the result as JSON')
    bench.add_argument('--out', type=Path, help='write the result to this file')
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, then the JSON where it is asked for."""
    from rmuscle_core.bench import runs

    threads = args.threads or (1 if args.kind == 'layer' else None)
    if threads:
        torch.set_num_threads(threads)
    device = open_device(args.device)
    args.dtype = args.dtype or ('float32' if device.type == 'cpu' else 'bfloat16')
    result = runs.RUNS[args.kind or 'calls'](args, device)
    report.finish({'kind': args.kind or 'calls', 'machine': describe(device), 'dtype': args.dtype,
                   'weight_dtype': args.weight_dtype, **result}, args.json, args.out)
    return 0

# SPDX-License-Identifier: Apache-2.0
"""``rmuscle doctor``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from rmuscle_core.device import open_device
from rmuscle_core.doctor import files, gpu, host, software
from rmuscle_core.doctor.finding import FAIL, OK, WARN, Finding, Host
from rmuscle_core.errors import SettingsError

HOST = (software.versions, gpu.gpu, gpu.ptxas, host.memory, host.clocks, host.socket_buffers, software.ros)
ROS = (host.shared_memory, host.profile)
COLOURS = {OK: 32, WARN: 33, FAIL: 31}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``doctor`` to the command line."""
    parser = subparsers.add_parser('doctor', help='find what keeps a policy from running here, and how to put it right',
                                   description='Exit code 0: nothing must be put right; 1: something must.')
    parser.add_argument('--checkpoint', type=Path, help='also look at this checkpoint and its tokenizer')
    parser.add_argument('--library', type=Path, help='also look at this episode library')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='where the checkpoint has to fit: cpu, cuda, cuda:1, ... (default: the GPU, if there is '
                        'one)')
    parser.add_argument('--root', type=Path, default=Path('/'), help='folder that holds /proc, /sys and /dev, such as '
                        "the host's root mounted into a container (default: /)")
    parser.add_argument('--json', action='store_true', help='print one JSON object')
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Print one line per finding, with what to do below it; 1 when something must be put right."""
    if not args.root.is_dir():
        raise SettingsError(f'--root {args.root} is no folder; give one that holds proc, sys and dev')
    args.device = open_device(args.device)
    found = []
    for finding in examine(Host(args.root, ros=software.has_ros()), args):
        found.append(finding)
        if not args.json:
            show(finding)
    failed = any(finding.level == FAIL for finding in found)
    if args.json:
        print(json.dumps({'ok': not failed, 'findings': [asdict(finding) for finding in found]}, indent=2))
    return int(failed)


def examine(machine: Host, args: argparse.Namespace) -> Iterator[Finding]:
    """Every examination that applies."""
    for look in (*HOST, *(ROS if machine.ros else ())):
        yield from look(machine)
    if args.checkpoint:
        yield from files.checkpoint(args.checkpoint, args.device)
    if args.library:
        yield from files.library(args.library)


def show(finding: Finding) -> None:
    """One line, and the way out of it on the next."""
    level = f'{finding.level:<4}'
    if sys.stdout.isatty():
        level = f'\033[{COLOURS[finding.level]}m{level}\033[0m'
    print(f'{level} {finding.name}: {finding.text}')
    if finding.fix:
        print(f'     fix: {finding.fix}')

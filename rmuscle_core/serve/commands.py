# SPDX-License-Identifier: Apache-2.0
"""``rmuscle serve``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from rmuscle_core.errors import RMuscleError, SettingsError
from rmuscle_core.options import add_settings, check_library, given_settings, pairs
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.serve.request import RequestMap
from rmuscle_core.serve.server import PolicyServer
from rmuscle_core.settings import Settings


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``serve`` to the command line."""
    parser = subparsers.add_parser(
        'serve', help='answer openpi clients over a websocket',
        epilog='example: rmuscle serve --checkpoint DIR --library LIB --prompt "pick up the cup" '
               '--camera base=observation/image')
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot checkpoint directory')
    parser.add_argument('--library', type=Path, help='episode library made with this checkpoint')
    parser.add_argument('--device', default='cpu', help='torch device (default: cpu)')
    parser.add_argument('--host', default='127.0.0.1', help='address to listen on (default: this machine only; there '
                        'is no authentication)')
    parser.add_argument('--port', type=int, default=8000, help='TCP port, 0 for any free one (default: 8000)')
    parser.add_argument('--prompt', default='', help='instruction to prepare for, and for requests without one')
    parser.add_argument('--camera', action='append', default=[], metavar='CAMERA=KEY',
                        help='request key of a camera of the checkpoint; may be repeated')
    parser.add_argument('--masked-camera', action='append', default=[], metavar='CAMERA',
                        help='a camera of the checkpoint that the robot does not have; may be repeated')
    parser.add_argument('--state-key', nargs='+', default=[], metavar='KEY',
                        help='request key of the robot state; several are joined in this order')
    parser.add_argument('--control-rate-hz', type=float, default=25.0, help='actions the robot executes per second; '
                        'only until the time between its calls is measured (default: 25)')
    parser.add_argument('--execute-steps', type=int, help="actions of a chunk that the client executes before its next "
                        "call (default: the checkpoint's)")
    add_settings(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Load, warm up, and serve until SIGINT or SIGTERM."""
    logging.basicConfig(level=logging.INFO, format='%(levelname)s %(name)s: %(message)s')
    policy = open_policy(args, Settings().with_values(**given_settings(args)))
    try:
        requests = RequestMap.build(policy.cameras, pairs('--camera', args.camera), args.state_key, args.prompt)
        policy.warm_up(args.prompt)
        asyncio.run(_serve(policy, requests, args))
    finally:
        policy.close()
    return 0


def open_policy(args: argparse.Namespace, settings: Settings) -> MusclePolicy:
    """The policy of the options; SettingsError for an option that does not fit the checkpoint."""
    from rmuscle_core.model import load_config

    config = load_config(args.checkpoint)
    unknown = sorted(set(args.masked_camera) - set(config.cameras))
    if unknown:
        raise SettingsError(f'--masked-camera {unknown[0]} is not a camera of the checkpoint '
                            f'({", ".join(config.cameras)})')
    if args.execute_steps is not None and not 1 <= args.execute_steps <= config.chunk_size:
        raise SettingsError(f'--execute-steps is {args.execute_steps}, expected 1 to {config.chunk_size}, the steps of '
                            'a chunk')
    if not args.control_rate_hz > 0:
        raise SettingsError(f'--control-rate-hz is {args.control_rate_hz}, expected actions per second above 0')
    if not 0 <= args.port <= 65535:
        raise SettingsError(f'--port is {args.port}, expected 0 to 65535')
    check_library(args.library)
    cameras = [camera for camera in config.cameras if camera not in args.masked_camera]
    policy = MusclePolicy.load(args.checkpoint, settings, args.library, args.device, cameras=cameras)
    policy.execute_steps = args.execute_steps or policy.execute_steps
    return policy


async def _serve(policy: MusclePolicy, requests: RequestMap, args: argparse.Namespace) -> None:
    server = PolicyServer(policy, requests, policy.execute_steps / args.control_rate_hz)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    try:
        await server.run(args.host, args.port, lambda port: print(f'listening on {args.host}:{port}', flush=True))
    except OSError as error:
        raise RMuscleError(f'cannot listen on {args.host} port {args.port} ({error.strerror or error}); end the '
                           'program that does, or choose another --port') from error

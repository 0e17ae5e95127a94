# SPDX-License-Identifier: Apache-2.0
"""``rmuscle serve``."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
from pathlib import Path

from rmuscle_core.errors import RMuscleError, SettingsError
from rmuscle_core.options import add_device, add_settings, check_library, given_settings, pairs, positive, whole
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.serve.request import RequestMap
from rmuscle_core.serve.server import PolicyServer
from rmuscle_core.settings import Settings


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``serve`` to the command line."""
    parser = subparsers.add_parser(
        'serve', help='answer openpi clients over a websocket',
        description='Runs until SIGINT or SIGTERM. Prints the address when the policy is ready.',
        epilog='example: rmuscle serve --checkpoint DIR --library LIB --prompt "pick up the cup" '
               '--camera base=observation/image')
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    parser.add_argument('--library', type=Path, help='episode library made with this checkpoint '
                        '(default: none, only the call before is reused)')
    add_device(parser)
    parser.add_argument('--host', default='127.0.0.1', help='address to listen on (default: this machine only; there '
                        'is no authentication)')
    parser.add_argument('--port', type=whole(0, 65535), default=8000, help='TCP port, 0 for any free one (default: '
                        '8000)')
    parser.add_argument('--prompt', default='', help='instruction to prepare for, and for requests without one')
    parser.add_argument('--camera', action='append', default=[], metavar='CAMERA=KEY',
                        help='request key of a camera of the checkpoint; may be repeated (default: the names that '
                        'openpi and LeRobot use)')
    parser.add_argument('--masked-camera', action='append', default=[], metavar='CAMERA',
                        help='a camera of the checkpoint that the robot does not have; may be repeated')
    parser.add_argument('--state-key', nargs='+', default=[], metavar='KEY',
                        help='request key of the robot state; several are joined in this order (default: the '
                        'names that openpi and LeRobot use)')
    parser.add_argument('--control-rate-hz', type=positive, default=25.0, metavar='HZ', help='actions the robot '
                        'executes per second; only until the time between its calls is measured (default: 25)')
    parser.add_argument('--execute-steps', type=whole(1), metavar='N', help="actions of a chunk that the client "
                        "executes before its next call (default: the checkpoint's)")
    add_settings(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Load, warm up, and serve until SIGINT or SIGTERM."""
    logging.basicConfig(level=logging.INFO, format='%(levelname)s %(name)s: %(message)s')
    cameras = cameras_of(args)
    requests = RequestMap.build(cameras, pairs('--camera', args.camera), args.state_key, args.prompt)
    settings = Settings().with_values(**given_settings(args))
    policy = MusclePolicy.load(args.checkpoint, settings, args.library, args.device, cameras=cameras)
    policy.execute_steps = args.execute_steps or policy.execute_steps
    try:
        policy.warm_up(args.prompt)
        asyncio.run(_serve(policy, requests, args))
    finally:
        policy.close()
    return 0


def cameras_of(args: argparse.Namespace) -> list[str]:
    """The robot's cameras; SettingsError for an option that does not fit the checkpoint, before weights are read."""
    from rmuscle_core.model import load_config

    config = load_config(args.checkpoint)
    unknown = sorted(set(args.masked_camera) - set(config.cameras))
    if unknown:
        raise SettingsError(f'--masked-camera {unknown[0]} is not a camera of the checkpoint '
                            f'({", ".join(config.cameras)})')
    if args.execute_steps is not None and args.execute_steps > config.chunk_size:
        raise SettingsError(f'--execute-steps is {args.execute_steps}, expected 1 to {config.chunk_size}, the steps of '
                            'a chunk')
    check_library(args.library)
    cameras = [camera for camera in config.cameras if camera not in args.masked_camera]
    if not cameras:
        raise SettingsError('--masked-camera names every camera of the checkpoint; a policy needs at least one')
    return cameras


async def _serve(policy: MusclePolicy, requests: RequestMap, args: argparse.Namespace) -> None:
    server = PolicyServer(policy, requests, policy.execute_steps / args.control_rate_hz)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    try:
        await server.run(args.host, args.port, lambda port: print(f'listening on {args.host}:{port}', flush=True))
    except OSError as error:
        advice = ('end the program that does, or choose another --port' if error.errno == errno.EADDRINUSE else
                  'give an address of this machine with --host and a --port that this user may use')
        raise RMuscleError(f'cannot listen on {args.host} port {args.port} ({error.strerror or error}); {advice}'
                            ) from error

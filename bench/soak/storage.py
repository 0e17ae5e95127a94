# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk, and those that end the process: what was saved has to outlive them."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import time
from pathlib import Path

from faults import ENDING, changes, fault
from std_srvs.srv import SetBool, Trigger
from world import Violated, World

from rmuscle_core.errors import RMuscleError
from rmuscle_core.library import EpisodeLibrary, ReferenceId

FILE_LIMIT = 4096  # bytes; every file of the node that grows beyond meets a full disk


# The disk ---

@fault('library grows by another process')
def library_grows(world: World, rng: random.Random) -> None:
    """A whole episode, and things that are none."""
    library = EpisodeLibrary.open(world.library, set_aside=False)
    usable = [e for e in library.episodes if e.path not in world.damaged]
    if usable:
        source, name = rng.choice(usable), f'copy-{time.monotonic_ns()}'
        with contextlib.suppress(RMuscleError):  # the source was set aside meanwhile
            references = [library.load(ReferenceId(source.task, source.episode, call))
                          for call in range(len(source.keys))]
            world.saved.add(library.add_episode(source.task, references, True, name))
    (world.library / 'notes.txt').write_text('not an episode')
    stray = world.library / 'transfer-cube' / f'stray-{time.monotonic_ns()}.h5'
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(rng.randbytes(5000))
    world.advance(1.0)
    changes(world, 'deactivate', 'cleanup', 'configure', 'activate')


@fault('library file damaged')
def library_damaged(world: World, rng: random.Random) -> None:
    """Bytes of a stored episode change under the node, or its end is cut off."""
    files = sorted(path for path in world.saved if path.exists())
    if files:
        path = rng.choice(files)
        world.damaged.add(path)
        with path.open('r+b') as file:
            size = path.stat().st_size
            if rng.random() < 0.3:
                file.truncate(size // 2)
            for _ in range(50):
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(8))
    world.call(Trigger, 'reset_episode', Trigger.Request())
    world.advance(2.0)


@fault('library gone for a while')
def library_gone(world: World, rng: random.Random) -> None:
    """As when a disk is unmounted; saving must be refused meanwhile."""
    elsewhere = world.library.with_suffix('.elsewhere')
    world.library.rename(elsewhere)
    world.advance(1.0)
    answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
    world.advance(1.0)
    if world.library.exists():
        raise Violated(f'a library was made where the other had been: {answer.message}')
    elsewhere.rename(world.library)
    if answer.success:
        raise Violated(f'an episode was saved to a folder that is not there: {answer.message}')


@fault('library read-only')
def library_read_only(world: World, rng: random.Random) -> None:
    """What needs writing is refused, or done where permissions do not hold (root); nothing ends."""
    folders = [world.library, *(p for p in world.library.iterdir() if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    world.advance(1.0)
    answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
    for folder in folders:
        folder.chmod(0o755)
    if answer.success:
        world.saved.add(Path(answer.message))


@fault('disk full')
def disk_full(world: World, rng: random.Random) -> None:
    """No file of the process may grow: not the library's, not its log."""
    _, hard = resource.prlimit(world.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
    world.advance(2.0)
    answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
    world.advance(1.0)
    resource.prlimit(world.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    if answer.success:
        raise Violated(f'an episode was saved to a full disk: {answer.message}')


@fault('junk beside the library')
def junk(world: World, rng: random.Random) -> None:
    """Folders and names that no library has."""
    for name in ('a b', 'ümlaut', '.hidden', 'x' * 100):
        (world.library / name).mkdir(exist_ok=True)
        (world.library / name / 'y.h5').write_bytes(b'')
    world.call(Trigger, 'reset_episode', Trigger.Request())
    world.advance(1.0)
    for name in ('a b', 'ümlaut', '.hidden', 'x' * 100):
        shutil.rmtree(world.library / name)


# The process ---

@fault('killed', ENDING)
def killed(world: World, rng: random.Random) -> None:
    """SIGKILL in the middle of whatever it does, at times of saving."""
    if rng.random() < 0.5:
        world.ask(SetBool, 'save_episode', SetBool.Request(data=True))
        world.advance(rng.choice((0.0, 0.1, 0.5)))
    code = world.end_node(signal.SIGKILL, 10.0)
    if code != -signal.SIGKILL:
        raise Violated(f'killed, but the exit code is {code}')
    world.start_node()


@fault('terminated', ENDING)
def terminated(world: World, rng: random.Random) -> None:
    """SIGTERM or SIGINT: the robot is told to hold, the exit code is 0."""
    number, holds = rng.choice((signal.SIGTERM, signal.SIGINT)), world.robot.holds
    code = world.end_node(number, 15.0)
    world.tick()
    if code != 0:
        raise Violated(f'{number.name}: exit code {code}')
    if world.robot.holds == holds:
        raise Violated(f'{number.name}: no hold was sent')
    world.start_node()

# SPDX-License-Identifier: Apache-2.0
"""Which importer a path needs. Each importer's packages are imported only when it is the one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rmuscle_core.errors import EpisodeError, SettingsError
from rmuscle_core.importing.episodes import EpisodeSource, PendingEpisode, Wanted
from rmuscle_core.library.recording import Label, open_recording

RECORDINGS, BAG_FILES = ('.h5', '.hdf5'), ('.mcap', '.db3')


@dataclass(frozen=True)
class SourceOptions:
    """execute_steps: 0 for the robot's (bags) or the checkpoint's. tolerance_s: of a LeRobotDataset. The rest: bags."""

    execute_steps: int = 0
    tolerance_s: float = 1e-4
    parameters: Path | None = None
    topics: dict[str, str] = field(default_factory=dict)
    episodes_topic: str = ''


def open_source(path: Path, wanted: Wanted, options: SourceOptions) -> EpisodeSource:
    """Open a recording (HDF5 file), a LeRobotDataset (folder with meta/info.json), or bags (one, or a folder of them).

    Raises EpisodeError when the path is none of these, SettingsError for options that do not fit it.
    """
    wanted = replace(wanted, execute_steps=options.execute_steps or wanted.execute_steps)
    if path.is_file() and path.suffix in RECORDINGS:
        if wanted.renamed or wanted.masked or options.topics or options.episodes_topic:
            raise SettingsError(f'{path} is a recording, which has the names of the checkpoint: leave out --camera, '
                                '--masked-camera, --topic and --episodes-topic')
        return Recordings(path, wanted)
    if (path / 'meta' / 'info.json').is_file():
        from rmuscle_core.importing.lerobot import LeRobotDataset

        return LeRobotDataset(path, wanted, options.tolerance_s)
    bags = bags_in(path)
    if bags:
        from rmuscle_core.importing.bag import Bags
        from rmuscle_core.importing.bag_file import Topics
        from rmuscle_core.importing.robot import read_robot

        if options.parameters is None:
            raise SettingsError(f'{path} is a bag: give the parameter file of the policy node with --parameters, which '
                                'says which topics are the cameras and which joints the state')
        robot = read_robot(options.parameters)
        if robot.execute_steps and not options.execute_steps:
            wanted = replace(wanted, execute_steps=robot.execute_steps)
        return Bags(bags, wanted, robot, Topics(options.topics, episodes=options.episodes_topic))
    found = 'holds no episodes' if path.exists() else 'is not there'
    raise EpisodeError(f'{path} {found}; expected a recording (.h5), the folder of a LeRobotDataset (with '
                       'meta/info.json), a ROS 2 bag (a folder with metadata.yaml, .mcap, .db3) or a folder of bags')


def bags_in(path: Path) -> list[Path]:
    """The bag itself (a rosbag2 folder or a single file), or the bags of a folder in the order of their names."""
    def is_bag(path: Path) -> bool:
        return (path / 'metadata.yaml').is_file() if path.is_dir() else path.suffix in BAG_FILES

    if is_bag(path):
        return [path] if path.exists() else []
    return sorted(child for child in path.iterdir() if is_bag(child)) if path.is_dir() else []


class Recordings:
    """A recording file as an EpisodeSource; its names are the checkpoint's already."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._recording = open_recording(path)
        self._labels = {key: self._label(key) for key in self._recording.keys}
        self.cameras = next((label.cameras for label in self._labels.values() if label.cameras), ())
        self.joints, self.execute_steps = self._recording.joints, wanted.execute_steps

    def __enter__(self) -> Recordings:
        return self

    def __exit__(self, *_: object) -> None:
        self._recording.__exit__()

    def __iter__(self) -> Iterator[PendingEpisode]:
        for key, label in self._labels.items():
            yield PendingEpisode(label.name, label.prompt, partial(self._recording.read, key))

    def _label(self, key: str) -> Label:
        try:
            return self._recording.label(key)
        except EpisodeError:
            return Label(f'episode {key}', '', ())  # reading it says why

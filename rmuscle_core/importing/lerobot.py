# SPDX-License-Identifier: Apache-2.0
"""LeRobotDataset v3: a folder of parquet tables and videos, many episodes to a file.

    meta/                              see lerobot_metadata.py
    data/chunk-*/file-*.parquet        per frame: state, timestamp, indices, and pictures of dtype image
    videos/KEY/chunk-*/file-*.mp4      pictures of dtype video, the frames of many episodes one after the other
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rmuscle_core.errors import EpisodeError, reason
from rmuscle_core.importing.episodes import PendingEpisode, Wanted, file_name
from rmuscle_core.importing.lerobot_metadata import VERSION, read_metadata
from rmuscle_core.importing.video import read_frames
from rmuscle_core.library.recording import RecordedEpisode
from rmuscle_core.observation import Observation
from rmuscle_core.sensing.compressed import decode_compressed

CAMERA, STATE, SUCCESS = 'observation.images.', 'observation.state', 'next.success'
PICTURES = ('video', 'image')
TOLERANCE_S = 1e-4  # LeRobot's


class LeRobotDataset:
    """A dataset folder, as an EpisodeSource: every ``execute_steps`` actions one observation of each episode.

    Raises EpisodeError when the dataset as a whole cannot be used, SettingsError when its cameras do not fit.
    """

    def __init__(self, root: Path, wanted: Wanted, tolerance_s: float = TOLERANCE_S) -> None:
        self._meta = read_metadata(root)
        self._wanted, self._tolerance_s = wanted, tolerance_s
        features = self._meta.features
        shape = list(features.get(STATE, {}).get('shape', []))
        if shape != [wanted.state_dim]:
            raise EpisodeError(f'{STATE} of dataset {root} has shape {shape}, the checkpoint {[wanted.state_dim]}; use '
                               'a dataset of the robot that the checkpoint was trained for')
        found = {key.removeprefix(CAMERA): key for key in features if features[key].get('dtype') in PICTURES}
        names = wanted.camera_map(found, f'dataset {root}')
        self.cameras = tuple(names)
        self._keys = {camera: found[name] for camera, name in names.items()}
        named = features[STATE].get('names')  # a list, or one under a heading of its own
        named = next(iter(named.values()), []) if isinstance(named, Mapping) else named
        self.joints, self.execute_steps = tuple(map(str, named or ())), wanted.execute_steps
        rate = wanted.control_rate_hz or self._meta.fps
        self._stride = max(1, round(wanted.execute_steps * self._meta.fps / rate))

    def __enter__(self) -> LeRobotDataset:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: every episode opens its own files."""

    def __iter__(self) -> Iterator[PendingEpisode]:
        for row in self._meta.episodes:
            name = f'{file_name(self._meta.root.resolve().name)}-{row["episode_index"]:06d}'
            prompt = self._wanted.prompt or next(iter(row.get('tasks') or []), '')
            yield PendingEpisode(name, prompt, partial(self._read, name, row))

    def _read(self, name: str, row: Mapping[str, Any]) -> RecordedEpisode:
        label = f'episode {row["episode_index"]} of {self._meta.root}'
        try:
            table = self._table(row)
            times_s = self._times(table, row, label)
            picked = range(0, len(table), self._stride)
            states = np.array([table[STATE][i].as_py() for i in picked], np.float32)
            images = {camera: self._pictures(key, row, table, picked, times_s) for camera, key in self._keys.items()}
            prompts = [self._wanted.prompt or self._meta.tasks[table['task_index'][i].as_py()] for i in picked]
            success = SUCCESS not in table.column_names or any(np.ravel(table[SUCCESS].to_pylist()))
        except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
            raise EpisodeError(f'{label} is not as {VERSION} lays it out ({reason(error)}); fetch the '
                               'dataset again') from error
        return RecordedEpisode(name, success, [
            Observation({camera: pictures[n] for camera, pictures in images.items()}, states[n], prompts[n],
                        float(times_s[i])) for n, i in enumerate(picked)])

    def _table(self, row: Mapping[str, Any]) -> pa.Table:
        """The frames of an episode, in order, without the columns that nobody needs."""
        features = self._meta.features
        columns = [STATE, 'timestamp', 'frame_index', 'task_index', *([SUCCESS] if SUCCESS in features else []),
                   *(key for key in self._keys.values() if features[key]['dtype'] == 'image')]
        path = self._meta.data_file(row)
        missing = {*columns, 'episode_index'} - set(pq.read_schema(path).names)
        if missing:
            raise EpisodeError(f'{path} has no column {", ".join(sorted(missing))}, which {VERSION} has; fetch the '
                               'dataset again')
        of_episode = [('episode_index', '=', row['episode_index'])]
        return pq.read_table(path, columns=columns, filters=of_episode).sort_by('frame_index')

    def _times(self, table: pa.Table, row: Mapping[str, Any], label: str) -> np.ndarray:
        """Checked time of every frame, float64 [F], seconds from the start of the episode."""
        if not len(table) or len(table) != row['length']:
            raise EpisodeError(f'{label} has {len(table)} frames, its metadata says {row["length"]}; fetch it again')
        if table['frame_index'].to_pylist() != list(range(len(table))):
            raise EpisodeError(f'{label} has frames missing or twice: its frame_index is not 0 to {len(table) - 1}')
        times_s = table['timestamp'].to_numpy().astype(np.float64)
        due_s = np.arange(len(times_s)) / self._meta.fps
        wrong = np.flatnonzero(~(np.abs(times_s - due_s) <= self._tolerance_s))
        if wrong.size:
            raise EpisodeError(f'{label}: frame {wrong[0]} is stamped {times_s[wrong[0]]:.4f} s, expected '
                               f'{due_s[wrong[0]]:.4f} s at {self._meta.fps:g} frames per second within '
                               f'{self._tolerance_s:g} s; correct the stamps or raise --tolerance-s')
        return times_s

    def _pictures(self, key: str, row: Mapping[str, Any], table: pa.Table, picked: range,
                  times_s: np.ndarray) -> list[np.ndarray]:
        if key in table.column_names:
            return [self._decoded(table[key][i].as_py(), f'frame {i} of {key}') for i in picked]
        path, begins_s = self._meta.video_file(row, key)
        return read_frames(path, [begins_s + times_s[i] for i in picked], self._tolerance_s)

    def _decoded(self, stored: Mapping[str, Any], what: str) -> np.ndarray:
        """A picture as the datasets library stores it: the file's bytes, or where the file is."""
        content = stored['bytes'] or (self._meta.root / stored['path']).read_bytes()
        return decode_compressed(np.frombuffer(content, np.uint8), 'png or jpeg', what)

# SPDX-License-Identifier: Apache-2.0
"""What a LeRobotDataset v3 says of itself in ``meta/``: version, frame rate, features, tasks, where episodes are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmuscle_core.errors import EpisodeError, reason

INFO = Path('meta/info.json')
VERSION = 'v3.0'
DATA_PATH = 'data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet'
VIDEO_PATH = 'videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4'
_CONVERT = 'convert it with: python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=ID --root=FOLDER'


@dataclass(frozen=True)
class Metadata:
    """features: key -> {dtype, shape, ...}. tasks: task_index -> instruction. episodes: rows by episode_index."""

    root: Path
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[int, str]
    episodes: list[dict[str, Any]]
    data_path: str = DATA_PATH
    video_path: str = VIDEO_PATH

    def data_file(self, row: Mapping[str, Any]) -> Path:
        """The table that holds the frames of an episode, given by its row."""
        return self.root / self.data_path.format(chunk_index=row['data/chunk_index'], file_index=row['data/file_index'])

    def video_file(self, row: Mapping[str, Any], key: str) -> tuple[Path, float]:
        """The video that holds an episode as seen by a camera, and the second at which the episode begins in it."""
        place = {name: row[f'videos/{key}/{name}'] for name in ('chunk_index', 'file_index')}
        return self.root / self.video_path.format(video_key=key, **place), float(row[f'videos/{key}/from_timestamp'])


def read_metadata(root: Path) -> Metadata:
    """Raises EpisodeError naming the file; for older versions with LeRobot's converter."""
    path = root / INFO
    try:
        info = json.loads(path.read_text())
        version, fps = str(info['codebase_version']), float(info['fps'])
        features = {key: dict(feature) for key, feature in info['features'].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EpisodeError(f'{path} cannot be read ({reason(error)}); point to the folder of a '
                           'LeRobotDataset') from error
    if version != VERSION:
        advice = _CONVERT if version.startswith('v2') else 'write it again with a LeRobot of that version'
        raise EpisodeError(f'dataset {root} is of LeRobotDataset version {version}, expected {VERSION}; {advice}')
    if not 0 < fps < float('inf'):
        raise EpisodeError(f'{path}: fps is {fps}, expected frames per second above 0; correct it')
    paths = {name: info[name] for name in ('data_path', 'video_path') if isinstance(info.get(name), str)}
    return Metadata(root, fps, features, _read_tasks(root), _read_episodes(root), **paths)


def _read_tasks(root: Path) -> dict[int, str]:
    path = root / 'meta/tasks.parquet'
    try:
        table = pq.read_table(path)
        text = next(field.name for field in table.schema  # a pandas index, which may have lost its name
                    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type))
        return dict(zip(table['task_index'].to_pylist(), table[text].to_pylist(), strict=True))
    except (OSError, KeyError, ValueError, StopIteration, pa.ArrowException) as error:
        raise EpisodeError(f'{path} cannot be read ({reason(error)}); fetch the dataset again'
                           ) from error


def _read_episodes(root: Path) -> list[dict[str, Any]]:
    """One row per episode, without the statistics."""
    rows: list[dict[str, Any]] = []
    for path in sorted((root / 'meta/episodes').glob('*/*.parquet')):
        try:
            names = [name for name in pq.read_schema(path).names if not name.startswith('stats/')]
            rows += pq.read_table(path, columns=names).to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise EpisodeError(f'{path} cannot be read ({reason(error)}); fetch the dataset again') from error
    if not rows or not all(isinstance(row.get('episode_index'), int) for row in rows):
        raise EpisodeError(f'{root / "meta/episodes"} lists no episodes by episode_index; fetch the dataset again')
    return sorted(rows, key=lambda row: row['episode_index'])

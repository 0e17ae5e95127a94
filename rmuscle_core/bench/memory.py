# SPDX-License-Identifier: Apache-2.0
"""What references cost in memory, computed from the tensors that hold them."""

from __future__ import annotations

import numpy as np
import torch

from rmuscle_core.bench.report import print_table
from rmuscle_core.bench.sizes import PI05
from rmuscle_core.engine.plan import arena_shape
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.model import ModelConfig
from rmuscle_core.retrieval import make_key
from rmuscle_core.settings import Settings

HOST_BYTES = 32e9  # the host memory that the shares refer to
LIBRARIES = ((200, 8), (400, 16), (800, 32))  # (entries, episodes)
PUBLISHED_SHARES = {200: 0.037, 800: 0.149}  # of 32 GB, from the rMuscle paper


def host_bytes(reference: Reference) -> dict[str, int]:
    """Bytes of one compact reference by part."""
    parts = {'prefix': reference.prefix, 'neurons': reference.neurons, 'key': reference.key, 'states': reference.states,
             'token_ids': reference.token_ids, 'chunk': reference.chunk}
    return {name: part.nbytes for name, part in parts.items() if part is not None}


def device_bytes(config: ModelConfig, settings: Settings, views: int) -> dict[str, int]:
    """Bytes of one expanded reference by part, as the arena allocates them."""
    shape = arena_shape(settings, config, views * config.vision.tokens)
    return shape.bytes_per_slot(torch.empty(0, dtype=config.compute_dtype).element_size())


def example_reference(config: ModelConfig, settings: Settings, text: int = 50) -> Reference:
    """A reference of this model's real sizes, made of zeros."""
    tokens = len(config.cameras) * config.vision.tokens
    shape = arena_shape(settings, config, tokens)
    prefix = torch.zeros(tokens, config.prefix.width, dtype=torch.bfloat16)
    return Reference(
        ReferenceId('task', 'episode', 0), prefix, np.zeros(text, np.int32),
        np.zeros((settings.history, config.state_dim), np.float32), make_key(prefix, config.cameras),
        np.zeros((shape.groups, shape.action_layers, shape.masked), np.uint16),
        np.zeros((config.chunk_size, config.action_dim), np.float32), config.cameras)


def memory_table(config: ModelConfig = PI05, settings: Settings | None = None) -> dict[str, object]:
    """Bytes per entry on host and device, and per library size what the whole takes beside what the paper reports.

    The window of a library with E episodes holds ``2 window + 1`` calls in each of ``window_episodes`` episodes, but
    no more episodes than there are and no more entries than there are slots.
    """
    settings = settings or Settings()
    host = host_bytes(example_reference(config, settings))
    device = device_bytes(config, settings, len(config.cameras))
    sketch = device_bytes(config, settings.with_values(sketch_width=64), len(config.cameras))
    rows = []
    for entries, episodes in LIBRARIES:
        window = min((2 * settings.window + 1) * min(settings.window_episodes, episodes), settings.slots)
        total = entries * sum(host.values())
        rows.append({'entries': entries, 'episodes': episodes, 'host_mb': round(total / 1e6),
                     'share_of_32_gb': round(total / HOST_BYTES, 4), 'paper_share': PUBLISHED_SHARES.get(entries),
                     'window_entries': window, 'device_mb': round(window * sum(device.values()) / 1e6),
                     'device_mb_sketch': round(window * sum(sketch.values()) / 1e6)})
    return {'host_entry': {**host, 'total': sum(host.values())},
            'device_entry': {**device, 'total': sum(device.values())},
            'device_entry_sketch_64': {**sketch, 'total': sum(sketch.values())}, 'libraries': rows}


def print_memory(table: dict[str, object]) -> None:
    """The table of `memory_table` for people."""
    entries = {name.replace('_', ' '): table[name] for name in ('host_entry', 'device_entry', 'device_entry_sketch_64')}
    for name, parts in entries.items():
        print_table(f'{name}, 3 views at full size', list(parts), [[f'{size / 1e6:.3f} MB' for size in parts.values()]])
    columns = {'entries': 'references', 'episodes': 'episodes', 'host_mb': 'host MB',
               'share_of_32_gb': 'share of 32 GB', 'paper_share': 'in the paper', 'window_entries': 'in the window',
               'device_mb': 'device MB', 'device_mb_sketch': 'with a sketch'}
    print_table('libraries', list(columns.values()),
                [[row[key] if 'share' not in key or row[key] is None else f'{row[key]:.1%}' for key in columns]
                 for row in table['libraries']])

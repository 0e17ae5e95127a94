# SPDX-License-Identifier: Apache-2.0
"""Bytes per reference, against the tensors themselves and the limits the project sets."""

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.bench import memory
from rmuscle_core.bench.sizes import PI05
from rmuscle_core.engine.plan import arena_shape
from rmuscle_core.settings import Settings


def test_device_bytes_are_those_the_arena_allocates():
    for settings in (Settings(), Settings().with_values(sketch_width=64, residual='none')):
        arena = ReferenceArena(arena_shape(settings, PI05, 768), 1, PI05.compute_dtype, 'meta')
        assert sum(memory.device_bytes(PI05, settings, 3).values()) == arena.nbytes


def test_entries_at_full_size_stay_within_their_limits():
    table = memory.memory_table()
    sketch = table['device_entry_sketch_64']
    assert table['host_entry']['total'] <= 3.4e6
    assert sketch['total'] - sketch['residual'] <= 60e6
    assert round(table['device_entry']['inputs'] + table['device_entry']['outputs'], -6) == 107e6


def test_library_shares_follow_from_the_entry():
    table = memory.memory_table()
    for row in table['libraries']:
        assert abs(row['host_mb'] - row['entries'] * table['host_entry']['total'] / 1e6) <= 0.5
        assert row['paper_share'] is None or row['share_of_32_gb'] < row['paper_share']

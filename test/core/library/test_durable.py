# SPDX-License-Identifier: Apache-2.0
"""A file appears by rename, when its block has ended well, and not otherwise."""

import pytest

from rmuscle_core.library.durable import appearing


def test_the_written_file_itself_appears_at_the_end(tmp_path):
    target = tmp_path / 'a.h5'
    with appearing(target) as temporary:
        temporary.write_text('whole')
        inode = temporary.stat().st_ino
        assert not target.exists()
    assert target.read_text() == 'whole'
    assert target.stat().st_ino == inode  # a copy could be seen half done


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / 'a.h5'
    target.write_text('old')
    with pytest.raises(RuntimeError), appearing(target) as temporary:
        temporary.write_text('half')
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ['a.h5'] and target.read_text() == 'old'

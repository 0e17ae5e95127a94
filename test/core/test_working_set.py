# SPDX-License-Identifier: Apache-2.0
import pytest

from rmuscle_core.library import ReferenceId
from rmuscle_core.working_set import WorkingSet

IDS = [ReferenceId('task', f'episode{i}', 0) for i in range(6)]


@pytest.fixture
def full():
    """Three slots holding references 0, 1, 2."""
    working_set = WorkingSet(3)
    for reference in IDS[:3]:
        working_set.commit(working_set.claim(reference, IDS[:3]), 64)
    return working_set


def test_a_claimed_slot_is_not_ready_before_its_commit():
    working_set = WorkingSet(1)
    slot = working_set.claim(IDS[0], IDS)
    assert working_set.ready() == []
    working_set.commit(slot, None)
    assert working_set.ready() == [IDS[0]]


def test_an_abandoned_slot_is_free_again():
    working_set = WorkingSet(1)
    working_set.abandon(working_set.claim(IDS[0], IDS))
    assert working_set.claim(IDS[1], IDS) == 0


def test_what_is_not_wanted_goes_first_then_the_least_likely(full):
    assert full.claim(IDS[3], [IDS[0], IDS[3], IDS[2]]) == 1  # 1 is not wanted any more
    assert full.claim(IDS[4], [IDS[4], IDS[0], IDS[2]]) is not None
    assert IDS[0] in full.ready()


def test_a_less_likely_reference_does_not_push_out_a_likelier_one(full):
    assert full.claim(IDS[3], [*IDS[:3], IDS[3]]) is None
    assert sorted(map(str, full.ready())) == sorted(map(str, IDS[:3]))


def test_a_slot_being_read_is_never_claimed(full):
    with full.reading(IDS[0]) as zero, full.reading(IDS[1]), full.reading(IDS[2]):
        assert full.claim(IDS[3], [IDS[3]]) is None
        assert zero.residual_neurons == 64
    assert full.claim(IDS[3], [IDS[3]]) is not None


def test_a_reference_is_rebuilt_in_its_own_slot(full):
    with full.reading(IDS[1]) as reading:
        slot = reading.slot
    assert not full.has(IDS[1], 128)
    assert full.claim(IDS[1], IDS) == slot
    full.commit(slot, 128)
    assert full.has(IDS[1], 128) and full.ready().count(IDS[1]) == 1


def test_reading_an_absent_reference_gives_nothing(full):
    with full.reading(IDS[5]) as reading:
        assert reading is None
    with full.reading(None) as reading:
        assert reading is None


def test_drop_forgets_a_reference_but_not_under_a_reader(full):
    with full.reading(IDS[0]):
        full.drop(IDS[0])
        assert IDS[0] in full.ready()
    full.drop(IDS[0])
    assert IDS[0] not in full.ready()


def test_others_are_pinned_with_it_as_far_as_they_are_ready(full):
    with full.reading(IDS[1], [IDS[4], IDS[0]]) as reading:
        assert len(reading.donors) == 1 and reading.slot not in reading.donors
        assert full.claim(IDS[3], [IDS[3]]) not in (reading.slot, *reading.donors)
    with full.reading(IDS[5], [IDS[0]]) as reading:
        assert reading is None
    assert all(not slot.readers for slot in full._slots)

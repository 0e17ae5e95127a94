# SPDX-License-Identifier: Apache-2.0
"""Retrieval finds the fitting reference whatever the units, and names what the next call may need."""

import numpy as np
import pytest
import torch

from rmuscle_core.library import LibraryIndex, Reference, ReferenceId
from rmuscle_core.processing import Normalizer, feature_statistics
from rmuscle_core.retrieval import Retriever, make_key
from rmuscle_core.settings import Settings

VIEWS, EPISODES, CALLS = ('top', 'wrist'), 5, 8


def index(history=3, task='stack', views=VIEWS, seed=0):
    """Episodes that move alike: state and key change along the episode, a little from episode to episode."""
    random = np.random.default_rng(seed)
    path, drift = random.normal(size=(CALLS, 6)), random.normal(size=(CALLS, len(views), 32))
    ids, keys, states = [], [], []
    for episode in range(EPISODES):
        shift = 0.05 * episode
        trajectory = path + shift
        for call in range(CALLS):
            ids.append(ReferenceId(task, f'e{episode}', call))
            keys.append(drift[call] + shift)
            padded = np.full((history, 6), np.nan)
            known = trajectory[max(0, call - history + 1):call + 1]
            padded[history - len(known):] = known
            states.append(padded)
    return LibraryIndex(tuple(ids), (views,) * len(ids), np.float32(keys), np.float32(states))


INDEX = index()


def row(episode, call):
    return INDEX.ids.index(ReferenceId('stack', f'e{episode}', call))


def query(episode, call):
    states = INDEX.states[row(episode, call)]
    return INDEX.keys[row(episode, call)], states[np.isfinite(states[:, 0])]


@pytest.mark.parametrize('episode, call', [(0, 0), (2, 1), (4, 7)])
def test_a_reference_finds_itself(episode, call):
    match = Retriever(INDEX, Settings()).nearest(*query(episode, call), 'stack', VIEWS)
    assert match.id == ReferenceId('stack', f'e{episode}', call)
    assert match.similarity == pytest.approx(1, abs=1e-5) and match.visual == pytest.approx(1, abs=1e-5)


def test_only_ready_references_compete():
    retriever, ready = Retriever(INDEX, Settings()), [ReferenceId('stack', 'e3', c) for c in range(CALLS)]
    assert retriever.match(*query(2, 4), ready, 'stack', VIEWS).id == ReferenceId('stack', 'e3', 4)
    assert retriever.match(*query(2, 4), [], 'stack', VIEWS) is None
    assert retriever.match(*query(2, 4), [ReferenceId('stack', 'gone', 0)], 'stack', VIEWS) is None


def test_a_dissimilar_reference_is_not_used():
    retriever, ready = Retriever(INDEX, Settings(min_similarity=0.99)), [ReferenceId('stack', 'e0', 0)]
    assert retriever.match(*query(0, 0), ready, 'stack', VIEWS)
    assert retriever.match(*query(0, 5), ready, 'stack', VIEWS) is None


@pytest.mark.parametrize('task, views', [('sort', VIEWS), ('stack', ('top',)), ('stack', ('wrist', 'top'))])
def test_another_task_or_other_views_are_not_eligible(task, views):
    retriever = Retriever(INDEX, Settings())
    key, states = query(0, 0)
    assert retriever.nearest(key[:len(views)], states, task, views) is None
    assert retriever.candidates(None, task, views) == []


def test_weights_decide_between_picture_and_state():
    key, states = query(0, 2)[0], query(0, 6)[1]
    for weight, call in ((1.0, 2), (0.0, 6)):
        match = Retriever(INDEX, Settings(visual_weight=weight)).nearest(key, states, 'stack', VIEWS)
        assert match.id.call == call


def test_a_short_history_is_compared_with_the_newest_part():
    key, states = query(3, 6)
    match = Retriever(INDEX, Settings(visual_weight=0.0)).nearest(key, states[-1:], 'stack', VIEWS)
    assert match.id == ReferenceId('stack', 'e3', 6) and match.state == pytest.approx(1, abs=1e-5)
    longer = np.concatenate([states[:1] * 9, states])
    assert Retriever(INDEX, Settings(visual_weight=0.0)).nearest(key, longer, 'stack', VIEWS).id == match.id


def test_a_young_reference_is_judged_by_the_history_it_has():
    ids, views = (ReferenceId('stack', 'young', 0),), (VIEWS,)
    states = np.full((1, 4, 3), np.nan, np.float32)
    states[0, -1] = 0.5
    retriever = Retriever(LibraryIndex(ids, views, INDEX.keys[:1], states), Settings(visual_weight=0.0))
    match = retriever.nearest(INDEX.keys[0], np.zeros((4, 3), np.float32), 'stack', VIEWS)
    assert match.state == pytest.approx(np.exp(-0.5), abs=1e-6)


def test_at_the_start_of_an_episode_every_first_call_is_likely():
    assert Retriever(INDEX, Settings()).candidates(None, 'stack', VIEWS) == [
        ReferenceId('stack', f'e{e}', 0) for e in range(EPISODES)]


def test_after_a_match_the_window_follows_the_best_episodes():
    retriever = Retriever(INDEX, Settings(window=1, window_episodes=2))
    wanted = retriever.candidates(retriever.nearest(*query(0, 3), 'stack', VIEWS), 'stack', VIEWS)
    assert [(i.episode, i.call) for i in wanted] == [('e0', 4), ('e1', 4), ('e0', 5), ('e1', 5), ('e0', 3), ('e1', 3)]


def test_the_window_ends_with_the_episode():
    retriever = Retriever(INDEX, Settings(window=2, window_episodes=1))
    wanted = retriever.candidates(retriever.nearest(*query(0, CALLS - 1), 'stack', VIEWS), 'stack', VIEWS)
    assert [i.call for i in wanted] == [CALLS - 1, CALLS - 2]


def test_a_foretold_state_chooses_the_episode_that_goes_there_next():
    retriever, (key, states) = Retriever(INDEX, Settings(history=1, visual_weight=0.0)), query(2, 3)
    for episode in range(EPISODES):
        expected = INDEX.states[row(episode, 4)][-1]
        wanted = retriever.ahead(key, states, expected, 'stack', VIEWS)
        assert wanted[0] == ReferenceId('stack', f'e{episode}', 4)
        assert len({identity.episode for identity in wanted}) == len(wanted) == EPISODES


def test_looking_ahead_never_offers_a_first_call_and_keeps_to_the_window():
    retriever = Retriever(INDEX, Settings().with_values(window_episodes=3, window=0))
    key, states = query(0, 0)
    wanted = retriever.ahead(key, states, INDEX.states[row(0, 0)][-1], 'stack', VIEWS)
    assert len(wanted) == 3 and all(identity.call > 0 for identity in wanted)
    assert retriever.ahead(key, states, states[-1], 'other task', VIEWS) == []


def test_compare_needs_no_index():
    i = row(1, 4)
    reference = Reference(INDEX.ids[i], None, None, INDEX.states[i], INDEX.keys[i], None, None, VIEWS)
    key, states = query(1, 4)
    assert Retriever(None, Settings()).compare(key, states, reference).similarity == pytest.approx(1, abs=1e-5)
    assert Retriever(None, Settings()).compare(-key, states, reference).visual == pytest.approx(-1, abs=1e-5)


def test_an_empty_library_offers_nothing():
    retriever = Retriever(None, Settings())
    assert retriever.nearest(*query(0, 0), 'stack', VIEWS) is None
    retriever.use(INDEX)
    assert retriever.nearest(*query(0, 0), 'stack', VIEWS) is not None


@pytest.mark.parametrize('scale', [57.29578, 1 / 57.29578])
def test_units_do_not_matter(scale):
    random = np.random.default_rng(3)
    raw = random.normal(size=(40, 6)).astype(np.float32)
    picks = []
    for factor in (1.0, scale):
        statistics = {f's.{k}': v for k, v in feature_statistics(raw * factor).items()}
        normalizer = Normalizer.from_statistics('QUANTILES', statistics, 's', 6)
        states = normalizer.normalize(raw * factor)
        ids = tuple(ReferenceId('t', 'e', i) for i in range(30))
        keys = np.ones((30, 1, 4), np.float32)
        retriever = Retriever(LibraryIndex(ids, (('top',),) * 30, keys, states[:30, None]), Settings())
        picks.append([retriever.nearest(keys[0], states[i:i + 1], 't', ('top',)).id.call for i in range(30, 40)])
    assert picks[0] == picks[1] and len(set(picks[0])) > 1


def test_brightness_of_embeddings_does_not_matter():
    key, states = query(2, 2)
    retriever = Retriever(INDEX, Settings())
    one, other = (retriever.nearest(key * s, states, 'stack', VIEWS) for s in (1, 1000))
    assert one.id == other.id and one.similarity == pytest.approx(other.similarity, abs=1e-5)


def cosine(one, other):
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_key_is_stable_and_knows_where_things_are():
    torch.manual_seed(0)
    background, thing = torch.randn(64, 48), 5 * torch.randn(48)
    keys = []
    for place in (9, 9, 54):
        tokens = background.clone()
        tokens[place] += thing
        keys.append(make_key(torch.cat([tokens, background]), VIEWS))
    same, moved = (cosine(keys[0][0], key[0]) for key in keys[1:])
    assert keys[0].shape == (2, 48) and keys[0].dtype == np.float32
    assert same == pytest.approx(1, abs=1e-6) and moved < 0.95
    assert np.array_equal(keys[0][1], keys[2][1])


def test_key_keeps_similarity_and_accepts_any_number_of_tokens():
    torch.manual_seed(0)
    one = torch.randn(256, 2048)
    near, far = one + 0.1 * torch.randn_like(one), torch.randn_like(one)
    cosines = [cosine(make_key(one, ('a',))[0], make_key(other, ('a',))[0]) for other in (near, far)]
    assert cosines[0] > 0.95 and abs(cosines[1]) < 0.3
    assert make_key(torch.randn(21, 8), ('a', 'b', 'c')).shape == (3, 8)
    assert make_key(one.bfloat16(), ('a',)).shape == (1, 256)


@pytest.mark.parametrize('far', [1e20, 1e38])
def test_a_joint_far_out_of_range_makes_a_call_dissimilar_and_nothing_else(far):
    key, states = query(2, 4)
    match = Retriever(INDEX, Settings()).nearest(key, np.full_like(states, far), 'stack', VIEWS)
    assert match.state == 0 and match.id == ReferenceId('stack', 'e2', 4)

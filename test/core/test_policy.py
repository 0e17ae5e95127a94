# SPDX-License-Identifier: Apache-2.0
"""MusclePolicy on a tiny model: exactness, the fallback ladder, and that no reference can make a call fail."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import OPEN, PROMPT, WAIT_S, run

from rmuscle_core.errors import ObservationError
from rmuscle_core.ffn import RecordFFN
from rmuscle_core.library import ReferenceId
from rmuscle_core.observation import Leftover
from rmuscle_core.policy import task_of
from rmuscle_core.processing.steps import Normalization
from rmuscle_core.settings import RESIDUALS, Settings


def test_ratios_of_one_equal_dense_bit_for_bit(load, look, library):
    dense = run(load(OPEN.with_values(mode='dense')), [look(2, 0), look(2, 1)])
    full = run(load(OPEN.with_values(token_ratio=1, neuron_ratio=1), library), [look(2, 0), look(2, 1)])
    assert [c.report.path for c in full] == ['library', 'library']
    for a, b in zip(dense, full, strict=True):
        assert np.array_equal(a.actions, b.actions)


def test_reconstructed_states_equal_a_direct_prefill_of_the_stored_inputs(load, library):
    policy = load(library=library)
    identity = policy.library.index().ids[0]
    with policy.memory.working_set.reading(identity) as reading:
        slot, arena = reading.slot, policy.engine.arena
        x, y = arena.x[slot].clone(), arena.y[slot].clone()
    stored = policy.library.load(identity)
    arena.x.zero_()
    arena.y.zero_()
    with torch.inference_mode():
        text = policy.model.embed_prompt(torch.as_tensor(stored.token_ids, dtype=torch.int64))
        policy.model.prefill(torch.cat([stored.prefix.float(), text])[None], RecordFFN(arena, slot, lambda: None))
    assert x.abs().sum() > 0
    assert torch.equal(arena.x[slot], x) and torch.equal(arena.y[slot], y)


def test_an_episode_is_followed_through_the_library(load, look, library):
    reports = [c.report for c in run(load(library=library), [look(3, place) for place in range(3)])]
    assert [r.path for r in reports] == ['library'] * 3
    assert [r.reference.split('#')[1] for r in reports] == ['0', '1', '2']
    for report in reports:
        assert report.tokens_recomputed == report.tokens // 2 and report.neurons_evaluated == report.neurons // 2
        assert 0.9 < report.similarity <= 1.0
        assert report.milliseconds['total'] >= report.milliseconds['prefill'] + report.milliseconds['denoise'] > 0


def test_the_likeliest_reference_is_not_pushed_out_by_less_likely_ones(load, look, tmp_path):
    recorder = load(library=tmp_path / 'library')
    for seed in range(4):
        run(recorder, [look(seed, 10 * seed + place) for place in range(3)])
        recorder.save_episode(True).result(WAIT_S)
        recorder.reset_episode(PROMPT)
    policy = load(OPEN.with_values(slots=4, window=0, window_episodes=4, budget=8), tmp_path / 'library')
    chunks = run(policy, [look(9, 20 + place) for place in range(3)])
    followed = {c.report.reference.split('#')[0] for c in chunks}
    assert [c.report.path for c in chunks] == ['library'] * 3 and len(followed) == 1
    assert all(c.report.similarity > 0.9 for c in chunks)


def test_cached_actions_stay_near_dense_ones_on_a_similar_observation(load, look, library):
    dense, = run(load(OPEN.with_values(mode='dense')), [look(4, 0)])
    full, = run(load(library=library), [look(4, 0)])
    other, = run(load(OPEN.with_values(mode='dense')), [look(4, 7)])
    assert 0 < np.abs(full.actions - dense.actions).mean() < 0.5 * np.abs(other.actions - dense.actions).mean()


@pytest.mark.parametrize(('asked', 'used'), [(1, 0), (3, 2), (8, 3)])
def test_tokens_may_reuse_from_the_best_call_of_several_episodes(load, look, tmp_path, monkeypatch, asked, used):
    policy = load(Settings(token_references=asked, slots=12, window_episodes=4), tmp_path)
    for episode in range(4):
        references = policy.record_references([look(seed=10 * episode + i, place=i) for i in range(2)], 'lift-the-cube',
                                              f'e{episode}')
        policy.library.add_episode('lift-the-cube', references, success=True)
    policy.memory.retriever.use(policy.library.index())
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S)
    seen, act = [], policy.engine.act
    monkeypatch.setattr(policy.engine, 'act', lambda *args: seen.append(args) or act(*args))
    assert policy.infer(look(seed=50, place=0)).report.path == 'library'
    (_, _, slot, donors), = seen
    assert len(set(donors)) == used and slot not in donors

    policy.chunk_published(float('inf'))
    assert policy.wait_ready(WAIT_S)
    own = policy.memory.episode[0].id
    policy.infer(look(seed=51, place=1))
    with policy.memory.working_set.reading(own) as reading:  # the call before: its tokens, not its neurons
        assert reading.residual_neurons is None
        assert seen[1][3][:1] == ((reading.slot,) if asked > 1 else ())


def test_without_a_library_the_previous_call_serves_and_before_it_nothing(load, look):
    policy = load()
    reports = [c.report for c in run(policy, [look(0, 0), look(1, 0), look(2, 0)])]
    assert [r.path for r in reports] == ['dense', 'previous_call', 'previous_call']
    assert 'no library reference' in reports[1].reason
    policy.settings = OPEN.with_values(reference_source='previous_call')
    assert 'reference_source is previous_call' in policy.infer(look(3, 0)).report.reason
    assert reports[0].tokens_recomputed == reports[0].tokens and reports[0].reference == ''
    policy.settings = OPEN.with_values(mode='dense')
    assert policy.infer(look(3, 0)).report.path == 'dense' and policy.engine.recomputed == []


def test_the_way_to_an_episode_s_beginning_is_not_held_against_the_foresight(load, look):
    policy = load()
    run(policy, [look(0, 0)])
    policy.reset_episode(PROMPT)
    run(policy, [look(0, 9)])  # the robot was moved by others in between
    assert not policy.foresight._errors.any()


def test_an_episode_that_ended_leaves_no_reference_behind(load, look):
    policy = load()
    run(policy, [look(0, 0), look(1, 0)])
    assert policy.status()['slots_ready'] == 1  # nor, where nothing can be saved, the call before the last
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S) and policy.status()['slots_ready'] == 0


def test_another_instruction_begins_another_episode(load, look, tmp_path):
    policy = load(library=tmp_path / 'library')
    run(policy, [look(0, 0), look(1, 0)])
    other = [replace(look(seed, 0), prompt='open the drawer') for seed in (2, 3)]
    first, second = (chunk.report for chunk in run(policy, other))
    assert (first.path, second.path, second.reference[-2:]) == ('dense', 'previous_call', '#0')
    saved = policy.save_episode().result(WAIT_S)
    assert saved.parent.name == 'open-the-drawer'
    assert [len(episode.keys) for episode in policy.library.episodes] == [2]
    assert [len(states) for states in policy.library.episodes[0].states] == [1, 2]  # nor is the state history mixed


def test_a_call_goes_by_the_settings_it_began_with(load, look, monkeypatch):
    policy = load(OPEN.with_values(rtc='exp'))
    temper, leftover = policy.shadow.temper, Leftover(policy.infer(look(0)).actions, 2)

    def changed_meanwhile(settings):
        policy.settings = OPEN.with_values(rtc='off')
        return temper(settings)

    monkeypatch.setattr(policy.shadow, 'temper', changed_meanwhile)
    assert policy.infer(look(0), leftover).report.guided
    assert not policy.infer(look(0), leftover).report.guided


def test_a_call_does_not_change_with_the_array_its_state_was_in(load, look, tmp_path):
    policy, seen = load(library=tmp_path / 'library'), look(0)
    policy.processor.recipe = replace(policy.processor.recipe, steps=tuple(
        replace(step, states=replace(step.states, mode='IDENTITY')) if isinstance(step, Normalization) else step
        for step in policy.processor.recipe.steps))
    expected = seen.state.copy()
    run(policy, [seen])
    seen.state.fill(0)  # a simulator's own memory
    assert np.array_equal(policy.memory.episode[0].states[-1], expected)
    assert np.array_equal(policy._states[-1], expected)


@pytest.mark.parametrize(('change', 'word'), [
    ({'mode': 'dense'}, 'dense'), ({'reference_source': 'none'}, 'none'), ({'min_similarity': 1.0}, 'similarity')])
def test_the_report_says_why_a_call_ran_dense(load, look, library, change, word):
    policy = load(library=library)
    policy.settings = OPEN.with_values(**change)
    report = policy.infer(look(5, 1)).report
    assert report.path == 'dense' and word in report.reason


def test_settings_take_effect_at_the_next_call(load, look, library):
    policy = load(library=library)
    policy.settings = OPEN.with_values(token_ratio=0.25, mode='context')
    report = policy.infer(look(6, 0)).report
    assert (report.tokens_recomputed, report.neurons_evaluated) == (report.tokens // 4, report.neurons)


def test_a_new_neuron_ratio_denoises_dense_until_its_residual_is_rebuilt(load, look, library):
    policy = load(library=library)
    policy.settings = OPEN.with_values(neuron_ratio=0.25)
    first, = run(policy, [look(7, 0)])
    assert first.report.path == 'library' and first.report.neurons_evaluated == first.report.neurons
    assert 'residual' in first.report.reason
    second, = run(policy, [look(7, 1)])
    assert second.report.neurons_evaluated == second.report.neurons // 4


def test_a_reference_that_is_not_similar_enough_serves_the_context_cache_only(load, look, library):
    policy = load(OPEN.with_values(action_similarity=1.0), library)
    report = policy.infer(look(8, 0)).report
    assert report.path == 'library' and report.tokens_recomputed == report.tokens // 2
    assert report.neurons_evaluated == report.neurons and 'action_similarity' in report.reason


def test_dense_steps_count_among_the_neurons_evaluated(load, look, library):
    policy = load(OPEN.with_values(residual='anchored', group_size=5), library)
    report = policy.infer(look(8, 0)).report  # four steps, the first dense
    assert report.neurons_evaluated == round((1 + 3 / 2) / 4 * report.neurons)


def test_a_missing_camera_runs_dense_and_an_unknown_one_is_refused(load, look, library):
    policy = load(library=library)
    report = policy.infer(look(8, 0, cameras=('base',))).report
    assert report.path == 'dense' and report.tokens == 16
    with pytest.raises(ObservationError, match='side'):
        policy.infer(type(look())({'side': look().images['base']}, look().state, PROMPT))


def test_calls_without_a_camera_do_not_serve_each_other(load, look):
    policy = load()
    reports = [c.report for c in run(policy, [look(seed, 0, cameras=('base',)) for seed in range(2)])]
    assert [r.path for r in reports] == ['dense', 'dense'] and policy.problems == []


def test_a_state_in_other_units_is_warned_about_once(load, look, caplog):
    policy = load()
    odd = replace(look(), state=look().state + np.array([57, 0, 0, 0, 0], np.float32))
    for more in (0, 1):  # other values are no news
        run(policy, [replace(odd, state=odd.state + np.float32(more))])
        policy.reset_episode(PROMPT)
    assert [r.message for r in caplog.records if 'radians' in r.message] == [
        policy.processor.doubts(odd.state)['state 0 far']]


def test_a_reference_that_cannot_be_expanded_is_a_problem_and_calls_go_on(load, look, library, monkeypatch):
    policy = load(OPEN.with_values(mode='dense'), library)

    def fail(*_):
        raise RuntimeError('shapes do not match')

    monkeypatch.setattr(policy.engine, 'expand', fail)
    policy.settings = OPEN
    assert [c.report.path for c in run(policy, [look(3, 0), look(3, 1)])] == ['dense', 'dense']
    assert policy.problems and all('shapes do not match' in problem for problem in policy.problems)


@pytest.mark.parametrize(('prompt', 'task'), [('Lift the cube!', 'lift-the-cube'), ('', 'task'), ('...', 'task')])
def test_a_prompt_names_its_task(prompt, task):
    assert task_of(prompt) == task


def test_long_prompts_keep_different_names_that_fit_a_file_name():
    a, b = task_of('word ' * 100 + 'left'), task_of('word ' * 100 + 'right')
    assert a != b and len(a) <= 64 and ReferenceId(a, 'episode', 0)


@pytest.mark.parametrize('residual', RESIDUALS)
@pytest.mark.parametrize(('asked', 'mask', 'share'), [(0.9, 0.75, 0.75), (0.5, 0.25, 0.25), (1.0, 0.25, 1.0)])
def test_a_call_evaluates_no_more_neurons_than_a_reference_ranks_unless_it_asks_for_all(load, look, residual, asked,
                                                                                         mask, share):
    policy = load(OPEN.with_values(residual=residual, neuron_ratio=asked, mask_ratio=mask, group_size=3))
    _, chunk = run(policy, [look(1, 0), look(1, 1)])
    dense_steps = 2 if residual == 'anchored' else 0  # the first of each group
    assert chunk.report.path == 'previous_call' and np.isfinite(chunk.actions).all()
    assert chunk.report.neurons_evaluated == round((dense_steps + (4 - dense_steps) * share) / 4 * chunk.report.neurons)


def test_fewer_denoise_steps_are_another_policy_with_a_library_of_its_own(load, look, tmp_path):
    ten, two = load(OPEN.with_values(mode='dense')), load(OPEN.with_values(mode='dense', denoise_steps=2))
    assert (ten.config.steps, two.config.steps) == (4, 2)
    assert not np.allclose(ten.infer(look(1, 0)).actions, two.infer(look(1, 0)).actions, atol=1e-3)
    folder = tmp_path / 'two'
    load(OPEN.with_values(denoise_steps=2), folder)
    assert 'model' in load(OPEN, folder).problems[0] and not load(OPEN.with_values(denoise_steps=2), folder).problems


def test_a_robot_without_a_camera_has_a_muscle_memory_too(load, look, tmp_path):
    seen = [look(1, place, cameras=('wrist',)) for place in range(3)]
    policy = load(library=tmp_path / 'library', cameras=('wrist',))
    reports = [c.report for c in run(policy, seen)]
    assert [r.path for r in reports] == ['dense', 'previous_call', 'previous_call']
    assert reports[1].tokens == 16 and reports[1].tokens_recomputed == 8
    policy.save_episode(True).result(WAIT_S)
    again = load(library=tmp_path / 'library', cameras=('wrist',))
    assert [c.report.path for c in run(again, seen)] == ['library'] * 3
    with pytest.raises(ObservationError, match='base'):
        again.infer(look(1, 0))


def test_calls_with_fewer_cameras_than_references_say_so(load, look, library):
    policy = load(library=library)
    for chunk in run(policy, [look(1, place, cameras=('wrist',)) for place in range(3)]):
        assert chunk.report.path == 'dense' and 'wrist' in chunk.report.reason
    assert policy.problems == []
    assert run(policy, [look(1, 0)])[0].report.path == 'library'

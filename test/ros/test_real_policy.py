# SPDX-License-Identifier: Apache-2.0
"""The node with a real, tiny pi0.5: dense at first, then by its previous call, then by a library it wrote itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

S = 1_000_000_000


def observe_until(bench, path):
    """Send observations, each when the reconstructor has done what it can; fails after 10 calls."""
    for _ in range(10):
        assert bench.node._policy.memory.reconstructor.wait_idle(10)
        bench.time_ns += S
        bench.send_time(bench.time_ns)
        count = len(bench.statuses)
        bench.send(bench.time_ns, positions=(.1,) * 7)
        bench.until(lambda count=count: len(bench.statuses) > count, 'an answer')
        if bench.statuses[-1].path == path:
            return bench.statuses[-1]
    raise AssertionError(f'no call was served by {path}: {[(s.path, s.reason) for s in bench.statuses]}')


def test_from_the_first_dense_call_to_a_library_of_its_own(make_bench, checkpoint, tmp_path):
    bench = make_bench(real=True, checkpoint=str(checkpoint), library=str(tmp_path / 'library'), use_sim_time=True,
                       device='cpu', slots=4, max_age_s=0.5, call_lead_s=0.0)
    bench.time_ns = 100 * S
    bench.activate()
    dense = observe_until(bench, 'dense')
    assert dense.tokens_recomputed == dense.tokens == 2 * 16 and dense.reference == ''
    own = observe_until(bench, 'previous_call')
    assert own.tokens_recomputed < own.tokens and own.neurons_evaluated < own.neurons and 'running' in own.reference
    saved = bench.save(True)
    assert saved.success and Path(saved.message).is_file(), saved.message
    assert bench.trigger('reset_episode').success
    stored = observe_until(bench, 'library')
    assert stored.reference.startswith('lift/') and stored.library_entries > 0 and stored.similarity > 0.9
    assert all(np.isfinite(p.positions).all() for t in bench.trajectories for p in t.points)
    again = bench.trigger('reload_library')
    assert again.success and again.message == '1 episodes'
    Path(saved.message).unlink()
    assert bench.trigger('reload_library').message == '0 episodes'
    assert bench.change('deactivate') and bench.change('cleanup')


def test_a_masked_camera_leaves_the_muscle_memory_its_use(make_bench, checkpoint):
    bench = make_bench(real=True, checkpoint=str(checkpoint), cameras=['base'], masked_cameras=['wrist'],
                       use_sim_time=True, device='cpu', slots=4)
    bench.time_ns = 100 * S
    bench.activate()
    served = observe_until(bench, 'previous_call')
    assert served.tokens == 16 and served.tokens_recomputed < 16


def test_unusable_library_is_reported_and_calls_run_dense(make_bench, checkpoint, tmp_path, capfd):
    (tmp_path / 'library.json').write_text('{')
    bench = make_bench(real=True, checkpoint=str(checkpoint), library=str(tmp_path), use_sim_time=True, device='cpu')
    bench.time_ns = 100 * S
    bench.activate()
    assert 'library.json' in capfd.readouterr().err
    assert observe_until(bench, 'dense').library_entries == 0
    answer = bench.save(True)
    assert not answer.success and 'library' in answer.message


def test_a_tilde_in_a_parameter_is_the_home_folder(make_bench, checkpoint, tmp_path, monkeypatch):
    """No shell is between a parameter file and the node; the library would be made in a folder of that name."""
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'policy').symlink_to(checkpoint)
    bench = make_bench(real=True, checkpoint='~/policy', library='~/library', device='cpu', slots=4)
    assert bench.change('configure'), bench.node.last_error
    assert (tmp_path / 'library').is_dir()

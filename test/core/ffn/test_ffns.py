# SPDX-License-Identifier: Apache-2.0
"""The FFNs on a small random model: exactness at ratio one, and what each keeps or leaves out."""

import copy

import pytest
import torch

from rmuscle_core.arena import ArenaShape, ReferenceArena
from rmuscle_core.engine.spread import even
from rmuscle_core.ffn import ContextFFN, DenseFFN, Interrupted, NeuronFFN, RecordFFN, ResidualFFN, ScoreFFN
from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig

T, TEXT, K, GROUP, N = 8, 3, 4, 2, 24
SIX, ALL = even(6, 2, 3), even(N, 2, 3)


def nothing():
    return None


@pytest.fixture(scope='module', params=['checkpoint', 'fp8'])
def model(request):
    torch.manual_seed(0)
    config = ModelConfig('pi05', VisionConfig(8, 4, 16, 1, 16, 2), TransformerConfig(16, 3, 32, 2, 1, 8),
                         TransformerConfig(12, 3, N, 2, 1, 8), vocab=40, cameras=('a', 'b'), state_dim=3, action_dim=3,
                         chunk_size=5, steps=K, weight_dtype=request.param)
    return VLA(config).eval()


@pytest.fixture
def arena():
    return ReferenceArena(ArenaShape(layers=2, tokens=T, width=16, compare_width=16, steps=K, groups=2,
                                     action_layers=3, masked=18, suffix=5, action_width=12, with_residual=True),
                          slots=2, dtype=torch.float32, device='cpu')


def prefix_of(seed):
    return torch.randn(1, T + TEXT, 16, generator=torch.Generator().manual_seed(seed))


def noise():
    return torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(9))


@torch.inference_mode()
def expand(model, arena, slot, prefix, neurons=SIX):
    cache = model.prefill(prefix, RecordFFN(arena, slot, nothing))
    score = ScoreFFN(2, 3, N, GROUP, 'cpu', nothing)
    model.denoise(cache, noise(), score)
    arena.neurons[slot].copy_(score.ranked(18))
    model.denoise(cache, noise(), ResidualFFN(arena, slot, neurons, GROUP, nothing))
    arena.slot.fill_(slot)
    return score


@torch.inference_mode()
def act(model, prefix, context, neurons):
    return model.denoise(model.prefill(prefix, context), noise(), neurons)


def test_ratio_one_is_dense_bit_for_bit(model, arena):
    expand(model, arena, 1, prefix_of(0))
    dense = act(model, prefix_of(1), DenseFFN(), DenseFFN())
    assert torch.equal(act(model, prefix_of(1), ContextFFN(arena, T), NeuronFFN(arena, ALL, GROUP, 'anchored')), dense)


def test_record_keeps_what_a_dense_prefill_sees_bit_for_bit(model, arena):
    seen = {}

    def spy(x, mlp, layer, step=0):
        y = mlp(x)
        seen[layer] = (x[0, :T].clone(), y[0, :T].clone())
        return y

    with torch.inference_mode():
        model.prefill(prefix_of(2), spy)
    expand(model, arena, 1, prefix_of(2))
    for layer, (x, y) in seen.items():
        assert torch.equal(arena.x[1, layer], x) and torch.equal(arena.y[1, layer], y)
    assert len(seen) == 2


@pytest.mark.parametrize('residual', ['reference', 'anchored'])
def test_an_identical_observation_reproduces_dense_whatever_is_reused(model, arena, residual):
    expand(model, arena, 0, prefix_of(3), neurons=SIX)
    dense = act(model, prefix_of(3), DenseFFN(), DenseFFN())
    cached = act(model, prefix_of(3), ContextFFN(arena, 0), NeuronFFN(arena, SIX, GROUP, residual))
    torch.testing.assert_close(cached, dense, rtol=0, atol=1e-5)
    without = act(model, prefix_of(3), ContextFFN(arena, 0), NeuronFFN(arena, SIX, GROUP, 'none'))
    assert (without - dense).abs().max() > 1e-3  # what the dropped neurons contributed is really gone


def test_only_the_most_changed_tokens_and_the_text_are_recomputed(model, arena):
    expand(model, arena, 0, prefix_of(4))
    prefix = prefix_of(4).clone()
    prefix[0, [2, 5]] += 3.0
    rows = []
    with torch.inference_mode():
        model.prefill(prefix, ContextFFN(arena, 2, rows))
    assert rows[0].tolist() == [2, 5, *range(T, T + TEXT)]


def test_reused_rows_are_the_references_output(model, arena):
    expand(model, arena, 0, prefix_of(5))
    outputs = []

    class Spy(ContextFFN):
        def __call__(self, x, mlp, layer, step=0):
            outputs.append(super().__call__(x, mlp, layer, step))
            return outputs[-1]

    rows = []
    with torch.inference_mode():
        model.prefill(prefix_of(6), Spy(arena, 3, rows))
    for layer, y in enumerate(outputs):
        reused = sorted(set(range(T)) - set(rows[layer].tolist()))
        assert len(reused) == T - 3
        assert torch.equal(y[0, reused], arena.y[0, layer, reused])


def test_scores_are_activation_magnitude_times_output_weight(model, arena):
    score = expand(model, arena, 0, prefix_of(7))
    expected = torch.zeros(2, 3, N)

    def spy(x, mlp, layer, step=0):
        a = torch.nn.functional.gelu(mlp.gate(x), approximate='tanh') * mlp.up(x)
        expected[step // GROUP, layer] += a[0].abs().sum(0) * mlp.down.weight.norm(dim=0)
        return mlp.down(a)

    act(model, prefix_of(7), DenseFFN(), spy)
    torch.testing.assert_close(score.scores, expected)
    ranked = score.ranked(18).long()
    along = score.scores.gather(-1, ranked)
    assert (along.diff(dim=-1) <= 0).all()
    assert (along[..., -1:] >= score.scores.sort(-1).values[..., N - 18:N - 17]).all()


def test_neurons_outside_the_mask_do_not_matter_without_residual(model, arena):
    expand(model, arena, 0, prefix_of(8))
    before = act(model, prefix_of(8), DenseFFN(), NeuronFFN(arena, SIX, GROUP, 'none'))

    class Poisoned(NeuronFFN):
        def _weights(self, mlp, group, layer, count):
            kept = self.arena.neurons[self.slot, group, layer, :count].long()
            poisoned = copy.deepcopy(mlp)
            dropped = torch.ones(N, dtype=torch.bool).index_fill(0, kept, False)
            eight_bit = model.config.weight_dtype == 'fp8'
            gate, down = (linear.scale if eight_bit else linear.weight for linear in (poisoned.gate, poisoned.down))
            with torch.no_grad():
                gate[dropped] = float('nan')
                (down if eight_bit else down.t())[dropped] = float('nan')
            return super()._weights(poisoned, group, layer, count)

    assert torch.equal(act(model, prefix_of(8), DenseFFN(), Poisoned(arena, SIX, GROUP, 'none')), before)


@pytest.mark.parametrize(('residual', 'dense_steps'), [('anchored', {0, 2}), ('reference', set()),
                                                        ('none', set())])
def test_the_first_step_of_a_group_is_dense_where_the_call_anchors_its_residual(model, arena, residual, dense_steps):
    expand(model, arena, 0, prefix_of(3))
    ffn, exact = NeuronFFN(arena, SIX, GROUP, residual), set()

    def spy(x, mlp, layer, step=0):
        y = ffn(x, mlp, layer, step)
        if torch.equal(y, mlp(x)):
            exact.add(step)
        return y

    act(model, prefix_of(4), DenseFFN(), spy)
    assert exact == dense_steps


def test_what_is_added_after_the_first_step_is_what_was_left_out_there(model, arena):
    expand(model, arena, 0, prefix_of(3))
    ffn, layer = NeuronFFN(arena, SIX, GROUP, 'anchored'), 1
    mlp = model.expert.layers[layer].mlp
    x = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ffn(x, mlp, layer, 2)
        later = ffn(x, mlp, layer, 3)
        moved = arena.residual[0, 3, layer] - arena.residual[0, 2, layer]
        torch.testing.assert_close(later, mlp(x) + moved, rtol=0, atol=1e-5)


@pytest.mark.parametrize('stop_at', [0, 1])
def test_an_interrupted_reconstruction_leaves_the_model_and_other_slots_alone(model, arena, stop_at):
    expand(model, arena, 0, prefix_of(0))
    kept, dense = arena.y[0].clone(), act(model, prefix_of(1), DenseFFN(), DenseFFN())
    layers = iter(range(10))

    def checkpoint():
        if next(layers) == stop_at:
            raise Interrupted

    with pytest.raises(Interrupted), torch.inference_mode():
        model.prefill(prefix_of(2), RecordFFN(arena, 1, checkpoint))
    assert torch.equal(arena.y[0], kept)
    assert torch.equal(act(model, prefix_of(1), DenseFFN(), DenseFFN()), dense)


def test_a_sketch_compares_by_projected_inputs():
    shape = ArenaShape(layers=1, tokens=64, width=256, compare_width=64, steps=1, groups=1, action_layers=1, masked=1,
                       suffix=1, action_width=1, with_residual=False)
    arena = ReferenceArena(shape, slots=1, dtype=torch.float32, device='cpu')
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(64, 256, generator=generator)
    arena.x[0, 0] = arena.comparable(reference)
    changed = reference.clone()
    changed[[3, 40]] += torch.randn(2, 256, generator=generator)
    rows = []
    ContextFFN(arena, 2, rows)(changed[None], torch.nn.Identity(), 0)
    assert rows[0].tolist() == [3, 40]
    assert shape.bytes_per_slot(4)['inputs'] == arena.x.numel() * 4


def test_each_token_reuses_the_reference_it_resembles(model, arena):
    """Two executions, each right about half of the scene: reusing everything from the better one for each token is
    nearer to dense than from either alone."""
    several = ReferenceArena(arena.shape, 2, torch.float32, 'cpu', donors=2)
    left, right = prefix_of(20), prefix_of(21)
    mixed = torch.cat([left[:, :T // 2], right[:, T // 2:]], 1)
    for slot, prefix in enumerate((left, right)):
        expand(model, several, slot, prefix)
    dense = act(model, mixed, DenseFFN(), DenseFFN())

    def error(slot, *others):
        several.point_to(slot, others)
        rows = []
        actions = act(model, mixed, ContextFFN(several, 2, rows), DenseFFN())
        assert rows[0].shape[0] == 2 + TEXT
        return float((actions - dense).abs().mean())

    assert error(0, 1) < min(error(0), error(1))
    assert error(1, 0) == pytest.approx(error(0, 1), rel=1e-4)  # which one is first matters to the Action Cache only


def test_pointing_fills_missing_donors_with_the_best(arena):
    several = ReferenceArena(arena.shape, 5, torch.float32, 'cpu', donors=3)
    several.point_to(4, (2,))
    assert several.donors.tolist() == [4, 2, 4] and several.slot.tolist() == [4]
    several.point_to(1, (3, 0, 2))
    assert several.donors.tolist() == [1, 3, 0]

# SPDX-License-Identifier: Apache-2.0
"""The Model seam on random weights: batches, autograd, an FFN that gives up."""

from __future__ import annotations

import pytest
import torch

from rmuscle_core.model import VLA


def dense(x, mlp, layer, step):
    return mlp(x)


def batch(model: VLA, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Prefix [B,R,D], noise and state of random observations."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    images = torch.rand(size * 2, 3, 28, 28, generator=generator) * 2 - 1
    visual = model.embed_images(images).unflatten(0, (size, 2)).flatten(1, 2)
    text = model.embed_prompt(torch.randint(0, config.vocab, (size, 7), generator=generator))
    noise = torch.randn(size, config.chunk_size, config.padded_dim, generator=generator)
    state = torch.randn(size, config.padded_dim, generator=generator) if config.kind == 'pi0' else None
    return torch.cat((visual, text), 1), noise, state


@torch.inference_mode()
def test_batch_of_two_equals_two_singles(random_model):
    prefix, noise, state = batch(random_model, 2)
    together = random_model.denoise(random_model.prefill(prefix, dense), noise, dense, state)
    for i in range(2):
        one = None if state is None else state[i:i + 1]
        alone = random_model.denoise(random_model.prefill(prefix[i:i + 1], dense), noise[i:i + 1], dense, one)
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=2e-5)
    assert (together[0] - together[1]).abs().max() > 0.1


def test_tabulated_step_equals_the_same_time_computed(random_model):
    prefix, noise, state = batch(random_model, 2)
    cache = random_model.prefill(prefix, dense)
    for step in range(random_model.config.steps):
        time = torch.full((2,), 1.0 - step / random_model.config.steps)
        looked_up = random_model.velocity(cache, noise, step, dense, state)
        computed = random_model.velocity(cache, noise, 0, dense, state, time=time)
        torch.testing.assert_close(looked_up, computed, rtol=0, atol=1e-5)


def test_modulations_have_one_row_per_norm_and_follow_training(random_model):
    config = random_model.config
    table = random_model.modulations()
    assert table.shape == (config.steps, 2 * config.expert.layers + 1, 3 * config.expert.width)
    assert random_model.modulations() is table
    random_model.train()
    with torch.no_grad():
        for name, parameter in random_model.expert.named_parameters():
            if name in ('norms', 'modulation.bias'):
                parameter += 0.5
    change = random_model.eval().modulations() - table
    scale = change[..., :config.expert.width]
    torch.testing.assert_close(scale, torch.full_like(scale, 0.5))


def test_training_reaches_every_parameter_through_a_repeated_prefix(random_model):
    random_model.train()
    prefix, noise, state = batch(random_model, 2)
    n_valid = torch.tensor([13, 15], dtype=torch.int32)
    cache = random_model.prefill(prefix, dense, n_valid)
    state = None if state is None else state.repeat(3, 1)
    time = torch.linspace(0.1, 1.0, 6)
    velocity = random_model.velocity(cache.repeat(3), noise.repeat(3, 1, 1), 0, dense, state, time=time)
    single = random_model.velocity(cache, noise, 0, dense, None if state is None else state[:2], time=time[2:4])
    torch.testing.assert_close(velocity[2:4], single, rtol=0, atol=1e-5)
    velocity.square().mean().backward()
    assert [name for name, p in random_model.named_parameters() if p.grad is None or not p.grad.any()] == []


@torch.inference_mode()
def test_an_ffn_may_abandon_the_call(random_model):
    class Interrupted(Exception):
        pass

    def interrupting(x, mlp, layer, step):
        if layer == 1:
            raise Interrupted
        return mlp(x)

    prefix, noise, state = batch(random_model, 1)
    before = random_model.denoise(random_model.prefill(prefix, dense), noise, dense, state)
    with pytest.raises(Interrupted):
        random_model.prefill(prefix, interrupting)
    cache = random_model.prefill(prefix, dense)
    with pytest.raises(Interrupted):
        random_model.denoise(cache, noise, interrupting, state)
    assert torch.equal(random_model.denoise(cache, noise, dense, state), before)


@torch.inference_mode()
def test_ffns_are_called_once_per_live_layer_and_step(random_model):
    config, calls = random_model.config, []

    def counting(x, mlp, layer, step):
        calls.append((tuple(x.shape), layer, step))
        return mlp(x)

    prefix, noise, state = batch(random_model, 1)
    cache = random_model.prefill(prefix, counting)
    assert calls == [((1, 15, 48), layer, 0) for layer in range(config.prefix.layers - 1)]
    calls.clear()
    random_model.denoise(cache, noise, counting, state)
    assert calls == [((1, config.suffix_rows, 32), layer, step)
                     for step in range(config.steps) for layer in range(config.expert.layers)]


@pytest.mark.parametrize('random_model', ['pi0'], indirect=True)
@torch.inference_mode()
def test_pi0_state_token_does_not_see_the_actions(random_model):
    prefix, noise, state = batch(random_model, 1)
    cache = random_model.prefill(prefix, dense)
    rows = []

    def keep(x, mlp, layer, step):
        rows.append(x[0].clone())
        return mlp(x)

    random_model.velocity(cache, noise, 0, keep, state)
    random_model.velocity(cache, noise + 1, 0, keep, state)
    layers = random_model.config.expert.layers
    for first, second in zip(rows[:layers], rows[layers:]):
        assert torch.equal(first[0], second[0])
        assert not torch.equal(first[1:], second[1:])

# SPDX-License-Identifier: Apache-2.0
"""One launch between denoise steps: its kernel and its reference against plain double precision."""

from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.step import denoise_step

ROWS, WIDTH, ACTIONS, DT = 5, 512, 16, 0.1


@pytest.fixture
def parts(random):
    def make(dtype):
        vectors = {'norm': (random(WIDTH), random(WIDTH)),
                   'action_out': (random(ACTIONS, WIDTH, scale=WIDTH**-0.5), random(ACTIONS)),
                   'action_in': (random(WIDTH, ACTIONS, scale=ACTIONS**-0.5), random(WIDTH))}
        return random(ROWS, ACTIONS), random(ROWS, WIDTH + 8, dtype=dtype)[:, :WIDTH], vectors
    return make


def expected(actions, stream, norm=None, action_out=None, action_in=None):
    actions, x = actions.double(), stream.double()
    if norm:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm[0].double()) + norm[1].double()
        x = x.to(stream.dtype).double()
        actions = actions - DT * (x @ action_out[0].double().t() + action_out[1].double())
        x = stream.double()
    if action_in:
        x = actions @ action_in[0].double().t() + action_in[1].double()
    return actions, x


@pytest.mark.parametrize('dtype, rounding', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('impl', ['triton', 'reference'])
@pytest.mark.parametrize('names', [('action_in',), ('norm', 'action_out'), ('norm', 'action_out', 'action_in')])
def test_first_last_and_middle_step(parts, names, impl, dtype, rounding):
    actions, stream, vectors = parts(dtype)
    chosen = {name: vectors[name] for name in names}
    want_actions, want_stream = expected(actions, stream, **chosen)
    denoise_step(actions, stream, DT, **chosen, impl=impl)
    # a bfloat16 norm may round the other way, in one column of 512
    torch.testing.assert_close(actions.double(), want_actions, atol=1e-5 if dtype == torch.float32 else 1e-3, rtol=1e-5)
    torch.testing.assert_close(stream.double(), want_stream, atol=rounding, rtol=rounding)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('impl', ['triton', 'reference'])
def test_leaves_what_the_next_norm_wants(parts, random, device, impl, dtype):
    actions, stream, vectors = parts(dtype)
    scale, scaled = random(WIDTH), torch.full((ROWS, WIDTH), float('nan'), dtype=dtype, device=device)
    squares = torch.full((1, ROWS), float('nan'), device=device)
    denoise_step(actions, stream, DT, **vectors, following=(scale, scaled, squares), impl=impl)
    torch.testing.assert_close(squares[0], stream.float().square().sum(-1))
    torch.testing.assert_close(scaled, (stream.float() * (1 + scale)).to(dtype))


@pytest.mark.parametrize('change, words', [
    ({'action_in': None, 'following': (torch.zeros(512), torch.zeros(5, 512), torch.zeros(1, 5))}, 'needs action_in'),
    ({'norm': None}, 'belong together'), ({'action_in': (torch.zeros(16, 512), torch.zeros(512))}, 'action_in'),
    ({'stream': torch.zeros(5, 100), 'norm': (torch.zeros(100),) * 2, 'action_in': None,
      'action_out': (torch.zeros(16, 100), torch.zeros(16))}, 'multiples of 256'),
])
def test_refuses_what_does_not_fit(parts, device, change, words):
    actions, stream, vectors = parts(torch.float32)
    with pytest.raises(ValueError, match=words):
        denoise_step(**{'actions': actions, 'stream': stream, 'dt': DT, **vectors, 'impl': 'triton', **change})

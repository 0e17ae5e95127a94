# SPDX-License-Identifier: Apache-2.0
"""What stands between two denoise steps, in one launch: off the residual stream, one Euler step, onto it again.

    velocity = action_out @ norm(stream) + bias      actions -= dt * velocity      stream = action_in @ actions + bias

All of it in fp32, as the checkpoints compute it; only the stream is rounded. One program per action row: its two
products are small, and as matmuls of their own they would cost more in launches than in work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rmuscle_kernels.norms import norm_reference
from rmuscle_kernels.numerics import await_inputs, cast
from rmuscle_kernels.runtime import DTYPES, INTERPRETED, expect, jit, launch, tl, use_triton

CHUNK = 256  # columns of the stream at a time: with 8 warps a thread holds 32 weights


@jit
def step_kernel(actions, stream, scale, shift, out_weight, out_bias, in_weight, in_bias, next_scale, scaled, squares,
                dt, eps, stream_stride, scaled_stride, WIDTH: tl.constexpr, ACTIONS: tl.constexpr, COLS: tl.constexpr,
                LEAVE: tl.constexpr, ENTER: tl.constexpr, FOLLOWED: tl.constexpr, UPCAST: tl.constexpr,
                EARLY: tl.constexpr):
    row = tl.program_id(0)
    action = tl.arange(0, ACTIONS)
    stream += row * stream_stride
    await_inputs(EARLY)
    value = tl.load(actions + row * ACTIONS + action)
    if LEAVE:
        square = tl.zeros((COLS,), tl.float32)
        for start in tl.static_range(0, WIDTH, COLS):
            x = tl.load(stream + start + tl.arange(0, COLS)).to(tl.float32)
            square += x * x
        inverse = tl.rsqrt(tl.sum(square, axis=0) / WIDTH + eps)
        velocity = tl.load(out_bias + action)
        for start in tl.static_range(0, WIDTH, COLS):
            col = start + tl.arange(0, COLS)
            x = tl.load(stream + col).to(tl.float32) * inverse
            x = x * (1.0 + tl.load(scale + col).to(tl.float32)) + tl.load(shift + col).to(tl.float32)
            x = cast(x, stream.dtype.element_ty, UPCAST).to(tl.float32)
            weight = tl.load(out_weight + action[:, None] * WIDTH + col[None, :])
            velocity += tl.sum(weight * x[None, :], axis=1)
        value -= dt * velocity
        tl.store(actions + row * ACTIONS + action, value)
    if ENTER:
        square = tl.zeros((COLS,), tl.float32)
        for start in tl.static_range(0, WIDTH, COLS):
            col = start + tl.arange(0, COLS)
            weight = tl.load(in_weight + col[:, None] * ACTIONS + action[None, :])
            x = tl.load(in_bias + col) + tl.sum(weight * value[None, :], axis=1)
            rounded = cast(x, stream.dtype.element_ty, UPCAST)
            tl.store(stream + col, rounded)
            if FOLLOWED:
                x = rounded.to(tl.float32)
                square += x * x
                x *= 1.0 + tl.load(next_scale + col)
                tl.store(scaled + row * scaled_stride + col, cast(x, scaled.dtype.element_ty, UPCAST))
        if FOLLOWED:
            tl.store(squares + row, tl.sum(square, axis=0))


Linear = tuple[torch.Tensor, torch.Tensor]  # weight, bias
Followed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # scale, scaled, squares


def denoise_step(actions: torch.Tensor, stream: torch.Tensor, dt: float, *, norm: Linear | None = None,
                 action_out: Linear | None = None, action_in: Linear | None = None,
                 following: Followed | None = None, eps: float = 1e-6, impl: str | None = None) -> None:
    """Finish a denoise step (norm and action_out given), begin the next one (action_in given), or both; in place.

    actions: fp32 [H, A]. stream: [H, W], the residual stream after the last layer, then before the first.
    norm: (scale, shift), [W] each, of the norm after the last layer. action_out: (fp32 [A, W], [A]).
    action_in: (fp32 [W, A], [W]). following: what the next norm's product wants beside the stream (see layer.py): fp32
    scale [W] of that norm, and outputs scaled [H, W] = stream * (1 + scale) and squares fp32 [1, H], the sums of the
    stream's squares. The kernel needs A a power of two and W a multiple of 256; other sizes run the
    reference. Raises ValueError for shapes that do not fit, or where impl insists in vain.
    """
    expect('actions', actions, (None, None), torch.float32)
    rows, count = actions.shape
    expect('stream', stream, (rows, None))
    width = stream.shape[1]
    if (norm is None) != (action_out is None):
        raise ValueError('norm and action_out belong together: both end a step')
    if action_out is not None:
        for name, vector in zip(('scale', 'shift'), norm):
            expect(name, vector, (width,), *DTYPES)
        expect('the weight of action_out', action_out[0], (count, width), torch.float32)
        expect('the bias of action_out', action_out[1], (count,), torch.float32)
    if action_in is not None:
        expect('the weight of action_in', action_in[0], (width, count), torch.float32)
        expect('the bias of action_in', action_in[1], (width,), torch.float32)
    if following is not None:
        if action_in is None:
            raise ValueError('following needs action_in: without it no step begins that a norm could follow')
        for name, tensor, shape, dtype in zip(('scale', 'scaled', 'squares'), following,
                                              ((width,), (rows, width), (1, rows)),
                                              (torch.float32, stream.dtype, torch.float32)):
            expect(f'{name} of following', tensor, shape, dtype)
    suits = width % CHUNK == 0 and not count & (count - 1) and actions.is_contiguous()
    if not use_triton(actions, impl) or (impl is None and not suits):
        return denoise_step_reference(actions, stream, dt, norm=norm, action_out=action_out, action_in=action_in,
                                      following=following, eps=eps)
    if not suits:
        raise ValueError(f'the kernel needs contiguous actions, a power of two of them and a width in multiples of '
                         f"{CHUNK}, not {count} and {width}; pass impl='reference'")
    step_kernel[(rows,)](actions, stream, *(norm or (None, None)), *(action_out or (None, None)),
                         *(action_in or (None, None)), *(following or (None,) * 3), dt, eps, stream.stride(0),
                         following[1].stride(0) if following else 0, WIDTH=width, ACTIONS=count, COLS=CHUNK,
                         LEAVE=action_out is not None, ENTER=action_in is not None, FOLLOWED=following is not None,
                         UPCAST=INTERPRETED, num_warps=8, **launch(actions))
    return None


def denoise_step_reference(actions: torch.Tensor, stream: torch.Tensor, dt: float, *, norm: Linear | None = None,
                           action_out: Linear | None = None, action_in: Linear | None = None,
                           following: Followed | None = None, eps: float = 1e-6) -> None:
    """Torch reference of `denoise_step`."""
    if action_out is not None:
        actions.sub_(F.linear(norm_reference(stream, *norm, eps=eps)[1].float(), *action_out), alpha=dt)
    if action_in is not None:
        stream.copy_(F.linear(actions, *action_in))
    if following is not None:
        scale, scaled, squares = following
        scaled.copy_(stream.float() * (1.0 + scale))
        squares.copy_(stream.float().square().sum(-1)[None])

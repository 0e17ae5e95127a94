# SPDX-License-Identifier: Apache-2.0
"""Attention for the probe scripts: against its reference in both regimes, and the tiles and splits it might use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_checks import LIMITS, Sizes, error

from rmuscle_kernels.attention import attend, attend_reference
from rmuscle_kernels.tiles import INTERPRETER, Tile

TILES = {'prefill': [Tile(64, 256, 64, 4, 2), Tile(64, 256, 32, 4, 3), Tile(128, 256, 64, 8, 2),
                     Tile(128, 256, 32, 8, 3)],
         'denoise': [Tile(64, 256, 64, 4, 2), Tile(64, 256, 64, 8, 2), Tile(64, 256, 32, 4, 3),
                     Tile(64, 256, 64, 4, 1)]}
SPLITS = {'prefill': (1,), 'denoise': (5, 7, 14)}


def operands(rows: int, heads: int, size: int, capacity: int, device: torch.device, dtype: torch.dtype):
    """q, k, v of one layer."""
    return tuple(torch.randn(shape, device=device).to(dtype)
                 for shape in ((rows, heads, size), (capacity, size), (capacity, size)))


def attention_checks(report, device: torch.device) -> None:
    """Prefill and denoise shapes with tails, in two precisions; what lies beyond the valid keys is NaN."""
    cpu = device.type == 'cpu'
    shapes = [(5, 2, 32, 40, 33), (3, 2, 32, 40, 1)] if cpu else [
        (832, 8, 256, 832, 803), (50, 8, 256, 1018, 868), (10, 8, 256, 978, 13), (50, 8, 256, 1018, 1018),
        (1, 8, 256, 64, 1), (51, 8, 64, 200, 77)]
    for rows, heads, size, capacity, valid in shapes:
        kv_len = torch.tensor([valid], dtype=torch.int32, device=device)
        for dtype, limit in LIMITS.items() if valid == shapes[0][4] else [(torch.bfloat16, LIMITS[torch.bfloat16])]:
            q, k, v = operands(rows, heads, size, capacity, device, dtype)
            k[valid:], v[valid:] = float('nan'), float('nan')
            for splits in (None, 1, 5):
                def run(q=q, k=k, v=v, kv_len=kv_len, splits=splits) -> float:
                    got = attend(q, k, v, kv_len, splits=splits, impl='triton')
                    return error(got, attend_reference(q.float(), k.float(), v.float(), kv_len))
                report.check(f'attend {rows}x{heads} of {valid}/{capacity} {dtype} splits {splits}', run, limit)


def attention_times(report, sizes: Sizes, device: torch.device) -> None:
    """Tiles for prefill, tiles and splits for denoise, torch's own attention beside them."""
    layers = sizes.expert_layers
    for regime, rows in (('prefill', sizes.visual + sizes.text), ('denoise', sizes.suffix)):
        keys = sizes.visual + sizes.text + (sizes.suffix if regime == 'denoise' else 0)
        made = [operands(rows, sizes.heads, sizes.head_dim, keys, device, torch.bfloat16) for _ in range(layers)]
        kv_len = torch.tensor([keys], dtype=torch.int32, device=device)
        flops = 4.0 * rows * keys * sizes.heads * sizes.head_dim
        if device.type == 'cuda':
            report.time(f'attend {regime}: torch, heads folded, no mask', [
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q.flatten(0, 1)[None, None], k[None, None],
                                                                     v[None, None]) for q, k, v in made],
                sizes, flops=flops)
        for tile in [INTERPRETER.attention] if device.type == 'cpu' else TILES[regime]:
            for split in SPLITS[regime]:
                report.time(f'attend {regime}: {tile.rows}x{tile.depth} w{tile.warps} s{tile.stages} split{split}', [
                    lambda a=(*layer, kv_len), t=tile, s=split: attend(*a, splits=s, tile=t, impl='triton')
                    for layer in made], sizes, flops=flops)

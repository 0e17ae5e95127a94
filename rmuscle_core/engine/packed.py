# SPDX-License-Identifier: Apache-2.0
"""The same weights as a VLA, laid out for fused kernels: inference of one observation, made to be captured in a graph.

Keys and values live in preallocated rows, a suffix's own first and the prefix after them: valid rows are then
contiguous however long the prompt is, so attention needs a length instead of a mask, and nothing moves when the
padding of a prompt changes. Order does not matter to attention; positions are in the rotary angles.
"""

from __future__ import annotations

import torch

from rmuscle_core.engine.packed_cache import PackedCache
from rmuscle_core.engine.packed_expert import PackedExpert
from rmuscle_core.engine.packed_ffn import PackedGeGLU
from rmuscle_core.engine.packed_vision import PackedVision
from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import VLA
from rmuscle_core.model.guidance import Guidance
from rmuscle_core.model.prefix import FFN
from rmuscle_kernels.attention import attend
from rmuscle_kernels.norms import add_rms_norm, rms_norm
from rmuscle_kernels.rope import rope


class PackedVLA:
    """Inference of one pi0.5 observation through fused kernels; on a CPU through their torch references.

    Takes the VLA's weights over without a second copy: its FFN weights become views of the packed ones, so the VLA
    stays usable. Norms round once where the VLA rounds after each operation; in float32 both agree to 1e-5.

    Raises CheckpointError for pi0, whose state token masks keys, and for 8-bit FFN weights: they run on the plain
    path.
    """

    def __init__(self, model: VLA) -> None:
        if model.config.kind != 'pi05':
            raise CheckpointError('fused kernels serve pi0.5 only; this checkpoint is pi0, whose state token needs a '
                                  'mask, so run it with the eager engine')
        if model.config.weight_dtype != 'checkpoint':
            raise CheckpointError('fused kernels read whole FFN weights, this model holds 8-bit ones; load it with '
                                  'weight_dtype checkpoint or run it with the eager engine')
        self.vla, self.config = model, model.config
        self.prefix_weight = model.prefix_weight
        device, dtype = self.prefix_weight.device, self.prefix_weight.dtype
        self.device, self.dtype, self.suffix = device, dtype, self.config.suffix_rows
        with torch.no_grad():
            self.vision = PackedVision(model.vision)
            self.prefix_ffns = [PackedGeGLU(layer.mlp) for layer in model.prefix.layers[:-1]]
            self.expert = PackedExpert(model)
        self.cos, self.sin = model.cos.float(), model.sin.float()
        self.places = torch.arange(self.suffix, device=device)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Views [V,3,S,S] in [-1,1] -> visual tokens [V,tokens,D]."""
        return self.vision(images).to(self.dtype)

    def embed_prompt(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [P] int64 -> [P,D]."""
        return self.vla.embed_prompt(ids)

    def new_cache(self, rows: int) -> PackedCache:
        """Memory for prefixes of up to this many rows; one per stream that prefills."""
        sizes, make = self.config.prefix, {'device': self.device}
        k, v = (torch.zeros(sizes.layers, self.suffix + rows, sizes.head_dim, dtype=self.dtype, **make) for _ in 'kv')
        cos, sin = (torch.zeros(self.suffix, sizes.head_dim // 2, **make) for _ in 'cs')
        n_valid, kv_len = (torch.zeros(1, dtype=torch.int32, **make) for _ in 'nk')
        return PackedCache(k, v, cos, sin, n_valid, kv_len)

    def prefill(self, prefix: torch.Tensor, ffn: FFN, n_valid: torch.Tensor | None = None,
                cache: PackedCache | None = None) -> PackedCache:
        """prefix [1,T+P,D], visual rows first -> the cache that denoise reads.

        n_valid: int32 [1] on the device when rows from there on are padding. Padding influences nothing but its own
        rows, which are left over.
        """
        rows, heads = prefix.shape[1], self.config.prefix.heads
        cache = cache or self.new_cache(rows)
        if n_valid is None:
            cache.n_valid.fill_(rows)
        else:
            cache.n_valid.copy_(n_valid)
        torch.add(cache.n_valid, self.suffix, out=cache.kv_len)
        norms, layers = self.vla.prefix.norms, self.vla.prefix.layers
        cos, sin = self.cos[:rows], self.sin[:rows]
        x = prefix[0].to(self.dtype)
        h = rms_norm(x, norms[0])
        for i, layer in enumerate(layers[:-1]):
            k, v = cache.k[i, self.suffix:], cache.v[i, self.suffix:]
            q, _, _ = rope(layer.attention.qkv(h), cos, sin, heads, cache=(k, v))
            y = layer.attention.out(attend(q, k, v, cache.n_valid))
            x, h = add_rms_norm(x, y, norms[2 * i + 1])
            x, h = add_rms_norm(x, ffn(h[None], self.prefix_ffns[i], i, 0)[0], norms[2 * i + 2])
        rope(layers[-1].attention.qkv(h), cos, sin, 0, cache=(cache.k[-1, self.suffix:], cache.v[-1, self.suffix:]))
        position = self.places + cache.n_valid
        torch.index_select(self.cos, 0, position, out=cache.cos)
        torch.index_select(self.sin, 0, position, out=cache.sin)
        return cache

    def denoise(self, cache: PackedCache, noise: torch.Tensor, ffn: FFN, state: None = None,
                guidance: Guidance | None = None) -> torch.Tensor:
        """noise float32 [1,H,A_pad] -> normalised actions [1,H,A_pad], by Euler steps from t = 1 to 0."""
        return self.expert.denoise(cache, noise, ffn, guidance)

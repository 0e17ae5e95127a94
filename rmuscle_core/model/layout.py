# SPDX-License-Identifier: Apache-2.0
"""LeRobot's tensor names, and where in our model each of them lives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from rmuscle_core.model.vla import VLA

BASE = 'paligemma_with_expert.'
VISION = BASE + 'paligemma.model.vision_tower.vision_model.'
PROJECTOR = BASE + 'paligemma.model.multi_modal_projector.linear.'
LANGUAGE = BASE + 'paligemma.model.language_model.'
EXPERT = BASE + 'gemma_expert.model.'
EMBEDDING = LANGUAGE + 'embed_tokens.weight'
LANGUAGE_HEAD = BASE + 'paligemma.lm_head.weight'


def canonical(key: str) -> str:
    """LeRobot's present name of a tensor, without ``model.``.

    openpi leaves that prefix out, newer transformers leave ``vision_model`` out.
    """
    key = key.removeprefix('model.')
    return re.sub(r'(vision_tower\.)(?!vision_model\.)', r'\1vision_model.', key)


def is_dead(key: str, layers: int) -> bool:
    """Whether a tensor cannot reach the actions: the language heads, and the prefix after its last keys and values."""
    last = re.escape(f'{LANGUAGE}layers.{layers - 1}.')
    return key.endswith('lm_head.weight') or key == LANGUAGE + 'norm.weight' or bool(
        re.match(last + r'(self_attn\.[qo]_proj|mlp\.(gate|up|down)_proj|post_attention_layernorm)\.weight$', key))


def tensor_views(model: VLA) -> dict[str, torch.Tensor]:
    """Canonical name -> view on the model's storage, for every tensor the model uses.

    Copying into the views loads a checkpoint, copying out of them saves one. Several names share one packed
    parameter: the projections of an attention, the modulations of the expert.
    """
    views = {EMBEDDING: model.prefix.embedding.weight}
    _add_vision(views, model)
    _add_stack(views, LANGUAGE, model.prefix.layers)
    for row, norm in enumerate(model.prefix.norms.unbind(0)):
        views[_norm_name(LANGUAGE, row) + '.weight'] = norm
    expert, pi05 = model.expert, model.config.kind == 'pi05'
    _add_stack(views, EXPERT, expert.layers)
    for row in range(expert.n_norms):
        name = _norm_name(EXPERT, row) if row < expert.n_norms - 1 else EXPERT + 'norm'
        if pi05:
            rows = slice(row * 3 * expert.action_in.out_features, (row + 1) * 3 * expert.action_in.out_features)
            _add_linear(views, name + '.dense.', expert.modulation, rows)
        else:
            views[name + '.weight'] = expert.norms[row]
    heads = {'action_in_proj': expert.action_in, 'action_out_proj': expert.action_out}
    if pi05:
        heads |= {'time_mlp_in': expert.time_in, 'time_mlp_out': expert.time_out}
    else:
        heads |= {'state_proj': expert.state_in, 'action_time_mlp_in': expert.time_in,
                  'action_time_mlp_out': expert.time_out}
    for name, linear in heads.items():
        _add_linear(views, name + '.', linear)
    return {name: view.detach() for name, view in views.items()}


def _norm_name(stack: str, row: int) -> str:
    return f'{stack}layers.{row // 2}.{("input", "post_attention")[row % 2]}_layernorm'


def _add_linear(views: dict[str, torch.Tensor], name: str, module: nn.Module, rows: slice = slice(None)) -> None:
    views[name + 'weight'] = module.weight[rows]
    if module.bias is not None:
        views[name + 'bias'] = module.bias[rows]


def _add_vision(views: dict[str, torch.Tensor], model: VLA) -> None:
    vision = model.vision
    width = vision.positions.shape[1]
    views[VISION + 'embeddings.position_embedding.weight'] = vision.positions
    views[VISION + 'embeddings.patch_embedding.weight'] = vision.patches.weight.unflatten(1, (3, *[vision.patch] * 2))
    views[VISION + 'embeddings.patch_embedding.bias'] = vision.patches.bias
    _add_linear(views, VISION + 'post_layernorm.', vision.norm)
    _add_linear(views, PROJECTOR, vision.projector)
    for i, layer in enumerate(vision.layers):
        name = f'{VISION}encoder.layers.{i}.'
        for part, module in (('layer_norm1', layer.norm1), ('layer_norm2', layer.norm2), ('mlp.fc1', layer.fc1),
                             ('mlp.fc2', layer.fc2), ('self_attn.out_proj', layer.out)):
            _add_linear(views, f'{name}{part}.', module)
        for index, part in enumerate('qkv'):
            _add_linear(views, f'{name}self_attn.{part}_proj.', layer.qkv, slice(index * width, (index + 1) * width))


def _add_stack(views: dict[str, torch.Tensor], stack: str, layers: nn.ModuleList) -> None:
    for i, layer in enumerate(layers):
        name, attention = f'{stack}layers.{i}.', layer.attention
        query = attention.heads * attention.head_dim
        kv = attention.kv_heads * attention.head_dim
        _add_linear(views, name + 'self_attn.k_proj.', attention.qkv, slice(query, query + kv))
        _add_linear(views, name + 'self_attn.v_proj.', attention.qkv, slice(query + kv, None))
        if attention.heads:
            _add_linear(views, name + 'self_attn.q_proj.', attention.qkv, slice(0, query))
            _add_linear(views, name + 'self_attn.o_proj.', attention.out)
            for part in ('gate', 'up', 'down'):
                _add_linear(views, f'{name}mlp.{part}_proj.', getattr(layer.mlp, part))

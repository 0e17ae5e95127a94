# SPDX-License-Identifier: Apache-2.0
"""Time and peak host memory of loading a checkpoint as LeRobot writes it: bfloat16, tied embedding, random weights.

    python bench/load_real_size.py --size pi05 --folder /tmp     # writes 8.3 GB there, and deletes it
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from rmuscle_core.bench.sizes import SIZES
from rmuscle_core.errors import SettingsError
from rmuscle_core.memory_free import available_bytes
from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig, load_model
from rmuscle_core.model.checkpoint_config import config_json
from rmuscle_core.model.layout import BASE, EMBEDDING, LANGUAGE, LANGUAGE_HEAD, tensor_views

BLOCK = 16 << 20  # numbers written at a time
PART = replace(SIZES['pi05'], vision=VisionConfig(56, 14, 96, 2, 192, 4), vocab=32_000,
               prefix=TransformerConfig(1024, 4, 8192, 8, 1, 64), expert=TransformerConfig(512, 4, 2048, 8, 1, 64))
NAMED = {**SIZES, 'part': PART}  # about 300 MB
NAMES = {torch.float32: 'F32', torch.bfloat16: 'BF16'}


def stored(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor LeRobot would write, those that cannot reach the actions too."""
    with torch.device('meta'):
        views = tensor_views(VLA(config))
    tensors = {name: (tuple(view.shape), view.dtype) for name, view in views.items()}
    tensors[LANGUAGE_HEAD] = tensors.pop(EMBEDDING)
    size, last = config.prefix, f'{LANGUAGE}layers.{config.prefix.layers - 1}.'
    query = size.heads * size.head_dim
    dead = {BASE + 'gemma_expert.lm_head.weight': (config.vocab, config.expert.width),
            LANGUAGE + 'norm.weight': (size.width,), last + 'post_attention_layernorm.weight': (size.width,),
            last + 'self_attn.q_proj.weight': (query, size.width),
            last + 'self_attn.o_proj.weight': (size.width, query),
            last + 'mlp.gate_proj.weight': (size.mlp, size.width), last + 'mlp.up_proj.weight': (size.mlp, size.width),
            last + 'mlp.down_proj.weight': (size.width, size.mlp)}
    return tensors | {name: (shape, torch.float32 if 'norm' in name else torch.bfloat16)
                      for name, shape in dead.items()}


def write(config: ModelConfig, directory: Path) -> int:
    """Write config.json and model.safetensors block by block; returns the bytes of the weights file."""
    header, end = {}, 0
    for name, (shape, dtype) in stored(config).items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[f'model.{name}'] = {'dtype': NAMES[dtype], 'shape': shape, 'data_offsets': [begin, end]}
    text = json.dumps(header).encode()
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02
    with (directory / 'model.safetensors').open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for shape, dtype in stored(config).values():
            block = values.to(dtype).view(torch.uint8).numpy()
            left = torch.Size(shape).numel() * dtype.itemsize
            while left:
                left -= file.write(block[:left].data)
        file.flush()
        os.fsync(file.fileno())
    (directory / 'config.json').write_text(json.dumps(config_json(config)))
    return (directory / 'model.safetensors').stat().st_size


def measure(directory: Path) -> dict[str, float]:
    """Load in this process, which has done nothing else yet."""
    before, start = _memory('VmRSS'), time.perf_counter()
    model = load_model(directory)
    seconds, peak = time.perf_counter() - start, _memory('VmHWM')
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {'seconds': round(seconds, 2), 'weights_gb': weights / 1e9, 'peak_gb': peak / 1e9,
            'beyond_weights_gb': (peak - weights) / 1e9, 'of_it_imports_gb': before / 1e9}


def _memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak, mapped files included."""
    lines = Path('/proc/self/status').read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def require_room(config: ModelConfig, folder: Path) -> None:
    """Raise SettingsError when disk or memory are too small, before anything is written."""
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in stored(config).values())
    for what, free in (('disk', shutil.disk_usage(folder).free), ('memory', available_bytes(torch.device('cpu')))):
        if free < 1.1 * size + 2e9:
            raise SettingsError(f'{size / 1e9:.1f} GB of weights do not fit into {free / 1e9:.1f} GB of {what} at '
                                f'{folder} with room to spare; choose another --folder or --size')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--size', choices=tuple(NAMED), default='pi05')
    parser.add_argument('--folder', type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument('--load', type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(measure(options.load)))
        return
    config = replace(NAMED[options.size], dtype='bfloat16', numerics='lerobot')
    require_room(config, options.folder)
    result: dict[str, object] = {'size': options.size}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result['file_gb'] = write(config, Path(name)) / 1e9
        for run in ('from_disk', 'from_page_cache'):
            if run == 'from_disk':
                with (Path(name) / 'model.safetensors').open('rb') as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            child = subprocess.run([sys.executable, __file__, '--load', name], check=True, stdout=subprocess.PIPE,
                                   text=True)
            result[run] = json.loads(child.stdout.splitlines()[-1])
    print(json.dumps(result))


if __name__ == '__main__':
    main()

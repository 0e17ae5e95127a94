# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for GPUs that are not here and say what it would use: ``python -m rmuscle_kernels.aot``.

Needs the Triton wheel only (it bundles ptxas and the disassembler): no GPU, driver or CUDA toolkit. One JSON line per
kernel and architecture; the exit code is 1 when something spills, exceeds a limit or misses the tensor cores.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rmuscle_kernels import attention, geglu, layer, layer_norm, merge, neurons, norms, rope, select
from rmuscle_kernels import step as step_module
from rmuscle_kernels.runtime import LAUNCH
from rmuscle_kernels.tiles import Tile, Tiles, capability_tiles

# opt-in shared memory of one block, bytes: CUDA programming guide, "technical specifications per compute capability"
SHARED_LIMIT = {87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 110: 227 << 10, 120: 99 << 10}
TENSOR_CORE = {87: 'HMMA', 89: 'HMMA', 90: 'HGMMA', 100: 'UTCHMMA', 110: 'UTCHMMA', 120: 'HMMA'}
GPU_NUMERICS = {'UPCAST': False, 'IEEE': False}


@dataclass(frozen=True)
class Spec:
    """One kernel as the launcher would specialise it.

    types: argument -> Triton type; pointers, and integers written 'i32:16', are known to be divisible by 16, as
    sizes and strides of real models are. Without that the compiler would build another, slower kernel.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    launch: dict[str, int] = field(default_factory=lambda: {'num_warps': 4})
    matmul: bool = False


def specs(tiles: Tiles, *, prefix_width: int = 2048, expert_width: int = 1024) -> Iterator[Spec]:
    """Yield all kernels in bf16, with the tiles of one architecture and the widths of pi0.5."""
    bf16, i32, f32, step = '*bf16', '*i32', '*fp32', 'i32:16'
    yield Spec('change', select.change_kernel,
               {'x': bf16, 'reference': bf16, 'slots': i32, 'change': f32, 'donor': i32, 'rows': 'i32', 'width': step,
                'eps': 'fp32', 'x_stride': step, 'slot_stride': step, 'reference_stride': step},
               {'COUNT': 3, 'ROWS': 1, 'WIDTH': 2048})
    yield Spec('choose', select.choose_kernel,
               {'change': f32, 'donor': i32, 'index': i32, 'inverse': i32, 'rows': 'i32', 'n_text': 'i32', 'k': 'i32'},
               {'ROWS': 1024, 'TEXT': 64}, {'num_warps': 1})
    yield Spec('activate', geglu.activate_kernel,
               {'gate_up': bf16, 'out': bf16, 'features': step, 'gate_up_stride': step, 'out_stride': step},
               {'COLS': 1024, 'UPCAST': False})
    for gather in (True, False) if tiles.geglu else ():
        tile = tiles.geglu
        weight = f'tensordesc<bf16[{tile.cols}, {tile.depth}]>' if tile.descriptors else bf16
        yield Spec('gather_geglu' if gather else 'geglu', geglu.gather_geglu_kernel,
                   {'x': bf16, 'index': i32, 'weight': weight, 'out': bf16, 'rows': 'i32', 'features': step,
                    'x_stride': step, 'weight_stride': step, 'out_stride': step},
                   {'WIDTH': prefix_width, 'ROWS': tile.rows, 'COLS': tile.cols, 'DEPTH': tile.depth,
                    'GATHER': gather, 'DESCRIPTORS': tile.descriptors, **({} if gather else {'index': None}),
                    **GPU_NUMERICS}, tile.launch, matmul=True)
    yield Spec('merge', merge.merge_kernel,
               {'residual': bf16, 'rows': bf16, 'inverse': i32, 'reference_y': bf16, 'out': bf16,
                'width': step, 'residual_stride': step, 'rows_stride': step, 'slot_stride': step,
                'reference_stride': step, 'out_stride': step}, {'WIDTH': 2048, 'ADD': True, 'UPCAST': False})
    yield from _neuron_specs(tiles, expert_width)
    yield from _attention_specs(tiles.attention)
    yield Spec('norm', norms.norm_kernel,
               {**dict.fromkeys(('x', 'delta', 'gate', 'scale', 'shift', 'total', 'y'), bf16), 'width': step,
                'eps': 'fp32', 'x_stride': step, 'delta_stride': step, 'total_stride': step, 'y_stride': step},
               {'WIDTH': 2048, 'ADD': True, 'GATED': True, 'SHIFTED': True, 'UPCAST': False})
    yield Spec('rope', rope.rope_kernel,
               {'qkv': bf16, 'cos': f32, 'sin': f32, 'q': bf16, 'k': bf16, 'v': bf16, 'heads': 'i32', 'half': step,
                'qkv_stride': step, 'table_stride': step, 'q_stride': step, 'k_stride': step, 'v_stride': step},
               {'HEADS': 16, 'HALF': 128, 'UPCAST': False})
    yield Spec('layer_norm', layer_norm.layer_norm_kernel,
               {**dict.fromkeys(('x', 'delta', 'bias', 'weight', 'shift', 'total', 'y'), bf16), 'width': step,
                'eps': 'fp32'}, {'WIDTH': 2048, 'UPCAST': False})
    yield Spec('step', step_module.step_kernel,
               {'stream': bf16, 'scaled': bf16, 'dt': 'fp32', 'eps': 'fp32', 'stream_stride': step,
                'scaled_stride': step, **dict.fromkeys(('actions', 'scale', 'shift', 'out_weight', 'out_bias',
                                                        'in_weight', 'in_bias', 'next_scale', 'squares'), f32)},
               {'WIDTH': expert_width, 'ACTIONS': 32, 'COLS': 256, 'LEAVE': True, 'ENTER': True, 'FOLLOWED': True,
                'UPCAST': False}, {'num_warps': 8})


def _neuron_specs(tiles: Tiles, width: int) -> Iterator[Spec]:
    bf16, i32, f32, step = '*bf16', '*i32', '*fp32', 'i32:16'
    for folded in (False, True):
        suffix = '_in_layer' if folded else ''
        plain = {'PARTS': 32} if folded else {'squares': None, 'offset': None, 'PARTS': 0}
        for name, up in (('neuron_gate_up', tiles.neuron_gate_up), ('neuron_gate_up_wide', tiles.neuron_gate_up_wide)):
            yield Spec(name + suffix, neurons.neuron_gate_up_kernel,
                       {'x': bf16, 'squares': f32, 'offset': f32, 'gate_up': bf16, 'neurons': i32, 'slot': i32,
                        'hidden': bf16, 'rows': 'i32', 'n': 'i32', 'eps': 'fp32', 'x_stride': step,
                        'slot_stride': step, 'hidden_stride': step},
                       {'WIDTH': width, 'ROWS': up.rows, 'COLS': up.cols, 'DEPTH': up.depth, 'CHOSEN': True,
                        **plain, **GPU_NUMERICS}, up.launch, matmul=True)
        added = {} if folded else dict.fromkeys(('stream', 'gate', 'scale', 'scaled', 'squares'))
        whole = {'CHOSEN': False, 'RESIDUAL': False, **dict.fromkeys(('neurons', 'slot', 'residual'))}
        kinds = [('neuron_down', tiles.neuron_down, {'CHOSEN': True, 'RESIDUAL': True}), ('out', tiles.out, whole)]
        for name, down, choice in kinds if folded else kinds[:1]:
            yield Spec(name + suffix, neurons.neuron_down_kernel,
                       {**dict.fromkeys(('hidden', 'down', 'residual', 'stream', 'scaled', 'out'), bf16),
                        **dict.fromkeys(('gate', 'scale', 'squares', 'partial'), f32), 'neurons': i32, 'slot': i32,
                        'arrived': i32, 'rows': 'i32', 'n': 'i32',
                        **dict.fromkeys(('per_split', 'hidden_stride', 'slot_stride', 'residual_slot_stride',
                                         'residual_stride', 'stream_stride', 'out_stride'), step)},
                       {'WIDTH': width, 'ROWS': down.rows, 'COLS': down.cols, 'DEPTH': down.depth,
                        'SPLITS': down.splits, 'ADD': folded, **choice, **added, **GPU_NUMERICS}, down.launch,
                       matmul=True)
    up = tiles.qkv
    yield Spec('qkv', layer.qkv_kernel,
               {**dict.fromkeys(('x', 'weight', 'q', 'k', 'v'), bf16),
                **dict.fromkeys(('squares', 'offset', 'cos', 'sin'), f32), 'rows': 'i32', 'heads': 'i32', 'eps': 'fp32',
                'k_stride': step, 'v_stride': step},
               {'WIDTH': width, 'HALF': 128, 'ROWS': up.rows, 'COLS': up.cols, 'DEPTH': up.depth, 'PARTS': 32,
                **GPU_NUMERICS}, up.launch, matmul=True)


def _attention_specs(tile: Tile) -> Iterator[Spec]:
    bf16, f32, step = '*bf16', '*fp32', 'i32:16'
    for splits in (1, 12):
        whole = {'partial': None, 'stats': None} if splits == 1 else {}
        yield Spec('attend' if splits == 1 else 'attend_split', attention.attend_kernel,
                   {**dict.fromkeys(('q', 'k', 'v', 'out', 'partial'), bf16), 'kv_len': '*i32', 'stats': f32,
                    'rows': step, 'scale': 'fp32', 'k_stride': step, 'v_stride': step},
                   {'HEAD': 256, 'ROWS': tile.rows, 'KEYS': tile.depth, 'SPLITS': splits, **whole, **GPU_NUMERICS},
                   tile.launch, matmul=True)
    yield Spec('join', attention.join_kernel, {'partial': bf16, 'stats': f32, 'out': bf16, 'rows': step},
               {'HEAD': 256, 'SPLITS': 12, 'PADDED': 16, 'UPCAST': False})


def compile_spec(spec: Spec, capability: int) -> dict[str, Any]:
    """Compile one kernel; return registers, spilled and shared bytes, and the tensor-core and spill instructions.

    Raises whatever the compiler raises.
    """
    names = spec.kernel.arg_names
    constants = {**spec.constants, 'EARLY': capability >= 90}
    signature = {name: 'constexpr' if name in constants else spec.types[name].removesuffix(':16')
                 for name in names}
    divisible = {(names.index(name),): [['tt.divisibility', 16]] for name, kind in spec.types.items()
                 if signature[name] != 'constexpr' and (kind.startswith('*') or kind.endswith(':16'))}
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=constants, attrs=divisible)
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True  # a cache hit runs no ptxas and logs nothing
        binary = triton.compile(source, target=GPUTarget('cuda', capability, 32), options={**LAUNCH, **spec.launch})
    registers = re.search(r'Used (\d+) registers', log.getvalue())
    spilled = re.search(r'(\d+) bytes spill stores, (\d+) bytes spill loads', log.getvalue())
    if not registers or not spilled:
        raise RuntimeError(f'ptxas reported no resource usage for {spec.name}: {log.getvalue()[-300:]!r}')
    return {'registers': int(registers[1]), 'spilled': int(spilled[1]) + int(spilled[2]),
            'shared': binary.metadata.shared, 'threads': binary.metadata.num_warps * 32,
            'instructions': _instructions(binary.asm['cubin'])}


def _instructions(cubin: bytes) -> dict[str, int]:
    disassembler = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / 'nvdisasm'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([disassembler, '-c', file.name], capture_output=True, text=True, check=True).stdout
    wanted = r'\b(HMMA|HGMMA|UTCHMMA|LDL|STL|LDGSTS|UTMALDG|LDG\.E\.128)\b'
    return {name: len(re.findall(rf'\b{re.escape(name)}\b', text)) for name in sorted(set(re.findall(wanted, text)))}


def problems(spec: Spec, usage: dict[str, Any], capability: int) -> list[str]:
    """Return what is wrong with a compiled kernel, in words; empty when it may ship."""
    found = []
    if usage['spilled'] or usage['instructions'].get('STL'):
        found.append(f'spills {usage["spilled"]} bytes')
    if usage['shared'] > SHARED_LIMIT[capability]:
        found.append(f'wants {usage["shared"]} bytes of shared memory of {SHARED_LIMIT[capability]}')
    if usage['registers'] * usage['threads'] > 65536:
        found.append(f'wants {usage["registers"]} registers for each of {usage["threads"]} threads')
    if spec.matmul and not usage['instructions'].get(TENSOR_CORE[capability]):
        found.append(f'has no {TENSOR_CORE[capability]} instruction')
    return found


def skipped(capability: int) -> str:
    """Return why this Triton cannot compile for an architecture, or an empty string."""
    version = tuple(int(part) for part in triton.__version__.split('.')[:2])
    return f'the ptxas of triton {triton.__version__} knows no sm_110' if capability == 110 and version < (3, 7) else ''


def main(arguments: list[str]) -> int:
    """Compile for the architectures named (default: all); print one JSON line each; return the exit code."""
    bad = 0
    for capability in [int(argument) for argument in arguments] or SHARED_LIMIT:
        if reason := skipped(capability):
            print(json.dumps({'arch': capability, 'skipped': reason}), flush=True)
            continue
        for spec in specs(capability_tiles(capability)):
            usage = compile_spec(spec, capability)
            wrong = problems(spec, usage, capability)
            bad += bool(wrong)
            print(json.dumps({'arch': capability, 'kernel': spec.name, 'problems': wrong, **usage}), flush=True)
    return int(bad > 0)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

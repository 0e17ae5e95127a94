# SPDX-License-Identifier: Apache-2.0
"""The characterisation as one picture."""

from __future__ import annotations

from pathlib import Path

MATCHED, OTHER = '#1b6ca8', '#7a828c'


def draw(found: dict, path: Path) -> None:
    """Write a PNG of four panels: similarity by layer, tokens, neurons, mask sharing."""
    import matplotlib

    matplotlib.use('Agg')  # no display on a robot
    from matplotlib import pyplot as plt

    matched, other = found['matched'], found['same_number']
    percent = [100 * share for share in found['shares']]
    figure, panels = plt.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    layers = range(len(matched['ffn_input_cosine']))
    panel = panels[0, 0]
    for name, style in (('ffn_input_cosine', '-'), ('ffn_output_cosine', '--')):
        panel.plot(layers, matched[name], style, color=MATCHED, label=f'{name.split("_")[1]}, matched reference')
        panel.plot(layers, other[name], style, color=OTHER, label=f'{name.split("_")[1]}, same call number')
    panel.set(title='Prefix FFN: cosine to the reference', xlabel='layer', ylim=(None, 1.0), xticks=layers)
    panel.legend(fontsize=8)

    panel = panels[0, 1]
    panel.plot(percent, matched['output_change_covered'], 'o-', color=MATCHED,
               label='input changed most')
    panel.plot(percent, [share / 100 for share in percent], ':', color=OTHER, label='random tokens')
    panel.set(title='Prefix FFN: output change in some tokens', xlabel='% of tokens', ylim=(0, 1))
    panel.legend(fontsize=8, loc='lower right')

    panel = panels[1, 0]
    panel.plot(percent, matched['contribution_covered'], 'o-', color=MATCHED, label='own top neurons')
    panel.plot(percent, matched['covered_by_reference'], 's--', color=MATCHED, label="matched reference's")
    panel.plot(percent, other['covered_by_reference'], 's--', color=OTHER, label="same call number's")
    panel.set(title='Expert FFN: contribution covered', xlabel='% of neurons', ylim=(0, 1))
    panel.legend(fontsize=8)

    panel = panels[1, 1]
    panel.plot(found['shared_steps'], matched['covered_at_half_by_shared_mask'], 'o-', color=MATCHED)
    panel.set(title="Expert FFN: covered by the reference's top half", xlabel='steps that share a mask',
              ylim=(0, 1))
    figure.suptitle(f'{found["calls"]} calls, {found["reference_episodes"]} reference episodes')
    figure.savefig(path, dpi=110)
    plt.close(figure)

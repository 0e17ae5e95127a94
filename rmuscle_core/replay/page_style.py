# SPDX-License-Identifier: Apache-2.0
"""The report's style: a column of at most 60rem; what is wider than a phone scrolls within its own frame."""

from rmuscle_core.replay.figures import CACHED, DARKEST, DENSE

STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; color-scheme: light; max-width: 60rem;
 margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #dde3e8 }}
h3 {{ font-size: 1rem; margin: 1.6rem 0 0 }} p.s {{ color: #52606d; margin: .2rem 0 .6rem }}
.verdict {{ font-weight: 600; padding: .5rem .8rem; border-left: 6px solid #52606d; background: #f1f4f7 }}
.yes {{ color: #166534; border-color: #166534 }} .no {{ color: #b02a0b; font-weight: 600; border-color: #b02a0b }}
.wide {{ overflow-x: auto }} .wide > img {{ width: 100%; min-width: 40rem }}
table {{ border-collapse: collapse; margin: .6rem 0 }}
td, th {{ padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; font-variant-numeric: tabular-nums;
 min-width: 3.2rem; overflow-wrap: break-word }}
td:first-child {{ max-width: 20rem }} code {{ background: #f1f4f7; padding: 0 .25rem }} img {{ max-width: 100% }}
.bars {{ position: relative; width: min(9rem, 22vw); height: 1.1rem; background: #f1f4f7; margin-top: .2rem }}
.bars div {{ position: absolute; height: 100% }} .mean {{ background: {CACHED} }} .p95 {{ background: #a9cbe4 }}
.bars .mean {{ top: 30%; height: 40% }}
.key {{ display: inline-block; width: 1rem; height: .8rem; border: 1px solid #52606d }} .dense {{ background: {DENSE} }}
.bright {{ background: #fff }} .dark {{ background: rgb({255 * DARKEST:.0f} {255 * DARKEST:.0f} {255 * DARKEST:.0f}) }}
.row {{ display: flex; flex-wrap: wrap; gap: 1rem }} .row > img {{ width: 450px }}
.views {{ display: grid; gap: .5rem }} figure {{ margin: 0; text-align: center; font-size: .8rem; color: #52606d }}
.views img {{ width: 100%; image-rendering: pixelated }} .chunks {{ margin-top: .6rem }}
.chunks figure {{ flex: 1 1 9rem; max-width: 215px }} .chunks img {{ width: 100% }}
"""

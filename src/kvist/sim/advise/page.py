"""The report as one HTML file: tables and inline SVG, no script, no network, light and dark."""

from __future__ import annotations

import html

from kvist.sim.advise.advice import Advice
from kvist.sim.advise.curve import ENGINE_POLICY, KVIST_POLICY
from kvist.sim.advise.plots import Axis, Mark, Series, line_chart
from kvist.sim.advise.question import Medium
from kvist.sim.advise.tables import Grid, grids, seconds, size

_STYLE = """
:root{--ink:#1b1b1b;--paper:#fff;--soft:#5a5a5a;--grid:#d9d9d9;--c0:#0b6bcb;--c1:#b34700;
--c2:#0f7b3f;--c3:#7a3fb3}
@media (prefers-color-scheme:dark){:root{--ink:#ececec;--paper:#161616;--soft:#ababab;
--grid:#3a3a3a;--c0:#6cb6ff;--c1:#ffab70;--c2:#6fdc9a;--c3:#d2a8ff}}
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;
margin:2rem auto;padding:0 1rem}
.verdict{border-left:.4rem solid var(--c0);padding:.6rem 1rem;font-size:1.15rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:.25rem .6rem .25rem 0;text-align:left;border-bottom:1px solid var(--grid);
vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
figure{margin:1.5rem 0}figcaption{color:var(--soft);font-size:.92rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--ink)}svg path{fill:none;stroke-width:2}
.grid{stroke:var(--grid);stroke-width:1!important}
.mark{stroke:var(--soft);stroke-dasharray:2 3}
.s0 path{stroke:var(--c0)}.s0 circle{fill:var(--c0)}
.s1 path{stroke:var(--c1);stroke-dasharray:7 4}.s1 circle{fill:var(--c1)}
.s2 path{stroke:var(--c2);stroke-dasharray:2 4}.s2 circle{fill:var(--c2)}
.s3 path{stroke:var(--c3);stroke-dasharray:10 3 2 3}.s3 circle{fill:var(--c3)}
"""


def page(advice: Advice) -> str:
    """The whole file."""
    title = f"kvist advise: {advice.traffic.name}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict"><strong>{html.escape(advice.verdict.value)}</strong><br>'
        f"{html.escape(advice.sentence)}</p>",
    ]
    figures = {1: _hits(advice), 2: _marginal(advice), 3: _cdf(advice)}
    for number, grid in enumerate(grids(advice)):
        body.append(_table(grid))
        body.append(figures.get(number, ""))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _table(grid: Grid) -> str:
    kind = "" if grid.prose else ' class="n"'
    named = any(grid.columns)
    head = "".join(
        f'<th scope="col"{kind if i else ""}>{html.escape(c)}</th>'
        for i, c in enumerate(grid.columns)
    )
    rows = "\n".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{html.escape(cell)}</th>'
            if i == 0
            else f"<td{kind}>{html.escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in grid.rows
    )
    return (
        f"<section>\n<h2>{html.escape(grid.title)}</h2>\n"
        '<div class="scroll" tabindex="0" role="group" '
        f'aria-label="{html.escape(grid.title, quote=True)}">\n<table>\n'
        + (f"<thead><tr>{head}</tr></thead>\n" if named else "")
        + f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n</section>"
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>\n{svg}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


def _percent(ratio: float) -> str:
    return f"{ratio:.0%}"


def _hits(advice: Advice) -> str:
    lines = [
        Series(
            policy,
            [(p.capacity_bytes, p.token_hit_ratio) for p in advice.curve if p.policy == policy],
            look,
        )
        for look, policy in enumerate((KVIST_POLICY, ENGINE_POLICY))
    ]
    sizes = [p.capacity_bytes for p in advice.curve]
    ideal = advice.traffic.ideal_hit_ratio
    lines.append(Series("without end", [(min(sizes), ideal), (max(sizes), ideal)], 2))
    high = max(0.05, ideal * 1.1)
    caption = (
        f"Hit ratio of tokens by capacity. {advice.sentence} "
        "The lines across are what the engine's HBM holds and what is worth buying."
    )
    svg = line_chart(
        "Hit ratio of tokens by capacity",
        caption,
        lines,
        Axis("capacity over all nodes", size, log=True),
        Axis("hit ratio of tokens", _percent, low=0.0, high=high),
        _marks(advice),
    )
    return _figure(svg, caption)


def _marks(advice: Advice) -> list[Mark]:
    marks = [Mark("HBM", float(advice.hbm_bytes))]
    for medium in Medium:
        worth = advice.tier(medium).worth_bytes
        if worth:
            marks.append(Mark(f"{medium.value} {size(worth)}", float(worth)))
    return marks


def _marginal(advice: Advice) -> str:
    points = [(float(advice.hbm_bytes), 0.0)]
    points += [(float(p.capacity_bytes), p.dollars_per_gb_hour) for p in advice.marginal]
    if len(points) > 1:
        points[0] = (points[0][0], points[1][1])
    sizes = [p[0] for p in points]
    lines = [Series("value of a GB more", points, 0, steps=True)]
    for look, tier in enumerate(advice.tiers, 1):
        price = tier.price_gb_hour
        ends = [(min(sizes), price), (max(sizes), price)]
        lines.append(Series(f"price of {tier.medium.value}", ends, look))
    caption = (
        "What a GB more earns an hour in device time, against its price. Buy a medium up to where "
        "the stairs fall below its line."
    )
    svg = line_chart(
        "Marginal value of capacity",
        caption,
        lines,
        Axis("capacity over all nodes", size, log=True),
        Axis("dollars a GB and hour", lambda v: f"{v:.0e}", log=True),
    )
    return _figure(svg, caption)


def _cdf(advice: Advice) -> str:
    lines = [Series(run.name, run.cdf, look) for look, run in enumerate(reversed(advice.served))]
    caption = "Share of all requests whose first token came within so long, by simulation."
    svg = line_chart(
        "Time to first token",
        caption,
        lines,
        Axis("TTFT", seconds, log=True),
        Axis("share of requests", _percent, low=0.0, high=1.0),
    )
    return _figure(svg, caption)

"""The report's style sheet: one column, system fonts, colours that colour-blind readers tell apart, light and dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1c1f24; --soft: #626a76; --line: #e3e4e0; --grid: #ececea;
  --good: #11795a; --good-bg: #e2f3ec; --bad: #b3382c; --bad-bg: #fbe9e6; --warn: #8a5a00; --warn-bg: #fbf0d9;
  --accent: #2f5fd0; --lost: #c9ccd1;
  --c0: #7a4fc4; --c1: #2f5fd0; --c2: #d1660a; --c3: #0f8a6a; --c4: #b93a78; --c5: #7d7b1c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131519; --card: #1b1e24; --ink: #e8e9ec; --soft: #9aa2ae; --line: #2c3038; --grid: #272b32;
    --good: #4cc79b; --good-bg: #15332a; --bad: #f0867a; --bad-bg: #3c1f1c; --warn: #e5b454; --warn-bg: #38290d;
    --accent: #7da2ff; --lost: #4a505b;
    --c0: #b497f0; --c1: #7da2ff; --c2: #f59b4c; --c3: #4cc79b; --c4: #ef86b4; --c5: #c9c65a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1040px; margin: 0 auto; padding: 40px 20px 80px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 6px 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 18px; letter-spacing: -0.01em; margin: 44px 0 10px; }
h3 { font-size: 15px; margin: 24px 0 6px; }
p { margin: 4px 0 10px; overflow-wrap: anywhere; }
.soft, small { color: var(--soft); }
.lead { font-size: 17px; max-width: 46em; }
.badge { display: inline-block; padding: 2px 11px; border-radius: 99px; font-weight: 600; font-size: 13px;
  color: var(--warn); background: var(--warn-bg); }
.badge.Succeeded { color: var(--good); background: var(--good-bg); }
.badge.Failed { color: var(--bad); background: var(--bad-bg); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 24px 0 0; padding: 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px; }
.figures dt { color: var(--soft); font-size: 13px; }
.figures dd { margin: 0; font-size: 22px; font-weight: 600; letter-spacing: -0.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.figures dd + dd { font-size: 12px; font-weight: 400; color: var(--soft); letter-spacing: 0; white-space: normal; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.chart { overflow-x: auto; }
.chart svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
svg .mark { font-size: 11px; paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
svg .row { font-weight: 600; font-size: 13px; }
svg .on-bar { font-size: 11px; font-weight: 600; fill: var(--card); }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.raw { stroke-width: 1; opacity: 0.38; } .trend { stroke-width: 2.2; }
.lost-line { stroke-width: 1.6; stroke-dasharray: 4 4; opacity: 0.75; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
svg text.c0, svg text.c1, svg text.c2, svg text.c3, svg text.c4, svg text.c5 { stroke: none; }
svg text.c0 { fill: var(--c0); } svg text.c1 { fill: var(--c1); } svg text.c2 { fill: var(--c2); }
svg text.c3 { fill: var(--c3); } svg text.c4 { fill: var(--c4); } svg text.c5 { fill: var(--c5); }
line.resume { stroke-width: 1; opacity: 0.5; } circle.resume { fill: var(--card); stroke-width: 2.2; }
line.mixture { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 4; }
.cell { fill: var(--accent); } .h0 { opacity: 0.04; } .h1 { opacity: 0.12; } .h2 { opacity: 0.24; }
.h3 { opacity: 0.36; } .h4 { opacity: 0.48; } .h5 { opacity: 0.6; } .h6 { opacity: 0.74; } .h7 { opacity: 0.88; }
.h8 { opacity: 1; }
line.stage { stroke: var(--soft); stroke-width: 1; }
polyline.held-out { stroke: var(--accent); stroke-width: 1.6; stroke-dasharray: 1 3; }
circle.held-out { fill: var(--accent); }
circle.bad { fill: var(--bad); }
.span.starting { fill: var(--warn); opacity: 0.75; } .span.training { fill: var(--good); }
.span.lost { fill: var(--bad); opacity: 0.8; } .span.finishing { fill: var(--accent); }
.span.hung { fill: var(--c4); } .span.stopped { fill: var(--lost); }
.rate { fill: var(--good); opacity: 0.75; } .rate-lost { fill: var(--bad); opacity: 0.55; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px;
  margin: 6px 0 0; padding: 0; list-style: none; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.key i.starting { background: var(--warn); } .key i.training { background: var(--good); }
.key i.lost { background: var(--bad); } .key i.finishing { background: var(--accent); }
.key i.hung { background: var(--c4); } .key i.stopped { background: var(--lost); }
.key i.line, .key i.dashed, .key i.thin, .key i.bold { width: 20px; height: 0; border-radius: 0;
  border-top: 2.4px solid; vertical-align: 4px; }
.key i.thin { border-top-width: 1px; opacity: 0.6; }
.key i.dashed { border-top-style: dashed; } .key i.dot { background: var(--accent); border-radius: 50%; }
.key .c0 { color: var(--c0); } .key .c1 { color: var(--c1); } .key .c2 { color: var(--c2); }
.key .c3 { color: var(--c3); } .key .c4 { color: var(--c4); } .key .c5 { color: var(--c5); }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; white-space: nowrap; }
.meter { display: block; width: 100%; height: 8px; min-width: 120px; background: var(--line); margin-top: 8px;
  border-radius: 4px; }
.meter rect { fill: var(--good); } .meter rect.bad { fill: var(--bad); }
.pages { display: grid; grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); gap: 12px; }
.pages figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  overflow: hidden; }
.pages figure.wrong { border-color: var(--bad); }
.pages .paper { height: 136px; padding: 8px; background: #fff; color: #626a76; }
.pages img { display: block; width: 100%; height: 100%; object-fit: contain; image-rendering: pixelated; }
.pages figcaption { padding: 8px 12px 10px; font-size: 13px; overflow-wrap: anywhere; }
.pages b { font-size: 16px; font-variant-numeric: tabular-nums; }
.pages .right b { color: var(--good); } .pages .wrong b { color: var(--bad); }
.pages del { color: var(--soft); text-decoration: none; }
details { margin: 10px 0; } summary { cursor: pointer; font-weight: 500; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font: 0.92em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
td code { overflow-wrap: break-word; }
footer { margin-top: 56px; color: var(--soft); font-size: 13px; }
@media print { .card, .figures div, .pages figure { break-inside: avoid; } }
"""

"""The console's style sheet, after the report's: navigation, tables of runs, forms, actions."""

STYLE = """
main { max-width: 1280px; padding-top: 22px; }
.skip { position: absolute; left: -999px; } .skip:focus { left: 12px; top: 8px; background: var(--card); padding: 6px; }
.top { background: var(--card); border-bottom: 1px solid var(--line); }
.top nav { max-width: 1280px; margin: 0 auto; padding: 0 20px; display: flex; flex-wrap: wrap; gap: 0 4px;
  align-items: center; }
.top b { margin-right: 14px; letter-spacing: -0.02em; font-size: 16px; padding: 12px 0; }
.top a { color: var(--soft); text-decoration: none; padding: 12px 10px 10px; border-bottom: 2px solid transparent; }
.top a:hover { color: var(--ink); } .top a[aria-current] { color: var(--ink); border-color: var(--accent); }
a { color: var(--accent); } a:focus-visible, button:focus-visible, input:focus-visible, select:focus-visible,
textarea:focus-visible, summary:focus-visible, [tabindex]:focus-visible { outline: 2px solid var(--accent);
  outline-offset: 2px; }
h1 { font-size: 26px; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: end; margin: 12px 0; }
.bar h1 { flex: 1 1 auto; margin: 0; }
label { color: var(--soft); font-size: 13px; display: inline-block; }
input, select, textarea { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; padding: 6px 10px; max-width: 100%; }
input[type=checkbox] { width: 17px; height: 17px; margin: 3px; vertical-align: middle; accent-color: var(--accent); }
textarea { width: 100%; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
label input, label select { display: block; margin-top: 3px; }
label.check { color: var(--ink); } label.check input { display: inline-block; }
:root { --edge: #8b919b; } @media (prefers-color-scheme: dark) { :root { --edge: #737b88; } }
button, .button { font: inherit; font-weight: 500; color: var(--ink); background: var(--card);
  border: 1px solid var(--edge); border-radius: 8px; padding: 6px 14px; cursor: pointer; text-decoration: none;
  display: inline-block; }
button:hover, .button:hover { border-color: var(--ink); }
button.main, .button.main { background: var(--accent); border-color: var(--accent); color: var(--card); }
button.bad { color: var(--bad); border-color: var(--bad); }
.runs td { vertical-align: middle; } .runs td a { font-weight: 500; text-decoration: none; overflow-wrap: anywhere; }
.runs td:first-child, .runs th:first-child { width: 26px; }
.runs th a { color: var(--soft); text-decoration: none; white-space: nowrap; } .runs th a:hover { color: var(--ink); }
.runs th { vertical-align: bottom; padding-right: 12px; } .runs td { padding-right: 12px; white-space: nowrap; }
.runs td.name { white-space: normal; min-width: 170px; }
.runs tbody tr:hover { background: var(--paper); }
.runs .differs { font-variant-numeric: tabular-nums; }
.badge { white-space: nowrap; } .badge.Running { color: var(--accent); background: var(--grid); }
.badge.Stopped, .badge.Unknown { color: var(--soft); background: var(--grid); }
.progress { width: 90px; height: 6px; display: inline-block; vertical-align: middle; margin: 0 0 0 8px; min-width: 0; }
.progress rect { fill: var(--accent); }
.pager { display: flex; gap: 12px; align-items: center; margin: 12px 0; color: var(--soft); }
.notice { border: 1px solid var(--line); border-left: 4px solid var(--accent); border-radius: 8px; padding: 10px 14px;
  background: var(--card); margin: 12px 0; overflow-wrap: anywhere; }
.notice.bad { border-left-color: var(--bad); } .notice.good { border-left-color: var(--good); }
.notice p { margin: 2px 0; }
.lost { margin: 0; } .lost:not(:empty) { border-left: 4px solid var(--bad); padding: 6px 14px; margin: 12px 0; }
.actions { display: flex; flex-wrap: wrap; gap: 8px; margin: 14px 0 4px; }
.actions details { margin: 0; } .actions summary { list-style: none; border: 1px solid var(--edge); border-radius: 8px;
  padding: 6px 14px; background: var(--card); } .actions summary::-webkit-details-marker { display: none; }
.actions details[open] { flex-basis: 100%; min-width: 0; }
.actions .card { margin: 8px 0; }
.actions .card pre { margin: 6px 0 10px; padding: 8px 12px; }
.compare th[scope=row] { font-weight: 500; padding-right: 18px; color: var(--soft); vertical-align: top; }
.compare thead th { font-size: 14px; color: var(--ink); }
.compare th i { display: inline-block; width: 20px; border-top: 3px solid; vertical-align: 4px; margin-right: 7px; }
.c6, svg .c6 { stroke: #8a6d3b; } .c7, svg .c7 { stroke: #6b7280; }
i.c0 { color: var(--c0); } i.c1 { color: var(--c1); } i.c2 { color: var(--c2); } i.c3 { color: var(--c3); }
i.c4 { color: var(--c4); } i.c5 { color: var(--c5); } i.c6 { color: #8a6d3b; } i.c7 { color: #6b7280; }
.axis { stroke: var(--edge); } polyline.thick { stroke-width: 2; }
.tabs { display: flex; gap: 4px; flex-wrap: wrap; margin: 8px 0; }
.tabs a { padding: 4px 12px; border-radius: 99px; text-decoration: none; color: var(--soft);
  border: 1px solid transparent; }
.tabs a[aria-current] { background: var(--card); border-color: var(--edge); color: var(--ink); }
.log { max-height: 480px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.panes { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 20px; align-items: start; }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 12px 16px; padding: 6px 0; }
.fields input, .fields select, .fields textarea { width: 100%; }
.fields small { display: block; line-height: 1.35; }
.fields label { display: block; }
.fields .wide { grid-column: 1 / -1; }
.result { position: sticky; top: 12px; } .result pre { max-height: 420px; overflow: auto; }
fieldset { border: 0; padding: 0; margin: 0; min-width: 0; }
.empty { text-align: center; padding: 40px 12px; color: var(--soft); }
@media (max-width: 860px) { .panes { grid-template-columns: minmax(0, 1fr); } .result { position: static; order: -1; } }
@media (max-width: 600px) { main { padding: 14px 12px 60px; } .top nav { padding: 0 12px; } h1 { font-size: 22px; }
  .top a { padding: 8px 8px 6px; } .figures { grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); } }
"""

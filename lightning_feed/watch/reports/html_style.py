"""The style of the HTML report: light and dark, on a screen, a phone and on paper, without anything from outside."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --line: #e3e1db; --ink: #1c1b19; --soft: #625f58; --track: #eeece7;
  --compute: #2a78d6; --data: #d9483b; --h2d: #e0a100; --other: #97938a; --good: #1a8a5a; --mark: #fbe6e3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #161614; --card: #201f1d; --line: #383632; --ink: #f1efe9; --soft: #a9a59b; --track: #2e2c29;
    --compute: #5a9ff0; --data: #f0695b; --h2d: #f0b92f; --other: #8b877e; --good: #48bd87; --mark: #4a2520;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 960px; margin: 0 auto; padding: 40px 20px 56px; }
h1 { font-size: 30px; line-height: 1.2; margin: 4px 0 8px; letter-spacing: -.01em; text-wrap: balance; }
h2 { font-size: 16px; margin: 0 0 14px; }
p { margin: 0; }
.kicker { color: var(--soft); font-size: 13px; letter-spacing: .04em; }
.soft { color: var(--soft); }
.verdict { display: inline-block; width: 12px; height: 12px; border-radius: 50%; margin-right: 8px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 24px;
  margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 22px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile b small { font-size: 15px; font-weight: 500; color: var(--soft); }
.tile span { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; }
.stack { height: 44px; border-radius: 8px; background: var(--track); }
.legend { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 10px 22px;
  margin-top: 16px; }
.legend div { display: grid; grid-template-columns: 12px 1fr; gap: 0 10px; align-items: baseline;
  align-content: start; }
.legend i { width: 12px; height: 12px; border-radius: 3px; }
.legend b { font-variant-numeric: tabular-nums; }
.legend span { grid-column: 2; color: var(--soft); font-size: 13px; line-height: 1.35; }
.compute { fill: var(--compute); background: var(--compute); } .data { fill: var(--data); background: var(--data); }
.h2d { fill: var(--h2d); background: var(--h2d); } .other { fill: var(--other); background: var(--other); }
.good { fill: var(--good); background: var(--good); } .track { fill: var(--track); }
.road { display: grid; grid-template-columns: minmax(120px, 250px) 80px 1fr; gap: 9px 14px; align-items: center; }
.road .bar { height: 20px; border-radius: 5px; }
.road .cut { -webkit-mask-image: linear-gradient(90deg, #000 75%, transparent); }
.road + .soft { margin-top: 14px; font-size: 13px; }
.road .rate { text-align: right; font-variant-numeric: tabular-nums; }
.road .part { padding-left: 16px; color: var(--soft); }
.road small { display: block; color: var(--soft); line-height: 1.3; }
.road .rule { grid-column: 1 / -1; border-top: 1px solid var(--line); margin: 6px 0 2px; color: var(--soft);
  font-size: 13px; padding-top: 8px; }
.tag { display: inline-block; background: var(--mark); color: var(--ink); border-radius: 99px; padding: 1px 9px;
  font-size: 12px; margin-left: 8px; white-space: nowrap; }
ol.fixes { list-style: none; padding: 0; margin: 0; counter-reset: fix; }
ol.fixes li { counter-increment: fix; display: grid; grid-template-columns: 30px 1fr auto; gap: 2px 10px;
  padding: 13px 0; border-top: 1px solid var(--line); align-items: baseline; }
ol.fixes li:first-child { border-top: 0; padding-top: 0; }
ol.fixes li:last-child { padding-bottom: 0; }
ol.fixes li::before { content: counter(fix); color: var(--soft); font-weight: 650; }
ol.fixes .gain { grid-row: 1 / 3; grid-column: 3; text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
ol.fixes .gain b { color: var(--good); }
ol.fixes .why { grid-column: 2; color: var(--soft); }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere;
  white-space: pre-wrap; }
ul { margin: 0; padding-left: 18px; } li + li { margin-top: 4px; } ol.fixes li + li { margin-top: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
td:last-child, th:last-child { padding-right: 0; }
.num { text-align: right; }
.two { columns: 2 320px; column-gap: 40px; }
.two div { display: grid; grid-template-columns: 140px 1fr; gap: 10px; break-inside: avoid; padding: 4px 0; }
.two span { color: var(--soft); } .two b { font-weight: 500; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; margin-top: 22px; }
@media (max-width: 560px) {
  main { padding-top: 24px; } h1 { font-size: 24px; } section { padding: 18px 16px; }
  .road { grid-template-columns: 1fr auto; } .road svg { grid-column: 1 / -1; margin-bottom: 8px; }
  ol.fixes li { grid-template-columns: 24px 1fr; } ol.fixes .gain { grid-column: 2; grid-row: auto; text-align: left; }
}
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } main { padding: 0; } }
"""

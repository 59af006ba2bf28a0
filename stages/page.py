"""The skeleton of every HTML page: one file without external URLs, readable on a phone."""

import html


def render_page(title: str, body: str, *, style: str = "", head: str = "") -> str:
    """A whole page.

    Args:
        title: plain text.
        body: trusted HTML.
        style: CSS after the shared style.
        head: trusted HTML that stands before the title.
    """
    return _PAGE.format(title=html.escape(title), style=_STYLE + style, head=head, body=body)


_STYLE = """
:root{color-scheme:light;--ink:#1f2430;--soft:#667085;--line:#e4e7ec;--paper:#fff;--ground:#f6f7f9;--accent:#4467c4}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:28px 20px 60px;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.2;margin:0 0 18px;font-weight:650}
h2{font-size:16px;margin:0 0 10px;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(158px,1fr));gap:12px;margin-bottom:16px}
.tile,section{background:var(--paper);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 14px}
.name{color:var(--soft);font-size:13px}
.value{font-size:23px;font-weight:620;font-variant-numeric:tabular-nums;overflow-wrap:anywhere;line-height:1.3}
.value.long{font-size:14px;font-weight:560}
.lines{font-size:13px;line-height:1.45;overflow-wrap:anywhere}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
section{padding:16px 18px;min-width:0}
section.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto}
.bar{fill:var(--accent)}.bar:hover{fill:#22398a}
.grid{stroke:var(--line)}.axis{stroke:#98a2b3}
.tick,.label{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.label{fill:var(--ink)}
.note{color:var(--soft);font-size:13px;margin:8px 0 0;font-variant-numeric:tabular-nums}
.note b{color:var(--ink);font-weight:600}
.scroll{overflow:auto;max-height:560px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere;min-width:56px}
th{color:var(--soft);font-weight:500;font-size:13px;position:sticky;top:0;background:var(--paper)}
td:first-child{overflow-wrap:normal;white-space:nowrap}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;padding-right:20px}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px}
figure{margin:0;border:1px solid var(--line);border-radius:8px;overflow:hidden;background:var(--paper)}
figure img{display:block;width:100%;height:140px;object-fit:contain;background:#eef0f3;image-rendering:auto}
figcaption{padding:8px 10px;font-size:13px;line-height:1.4;white-space:pre-line;overflow-wrap:anywhere}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
@media (max-width:520px){body{padding:16px 12px 40px}h1{font-size:22px}section{padding:14px}
.tiles{grid-template-columns:repeat(2,1fr)}.pictures{grid-template-columns:repeat(2,1fr)}.value{font-size:20px}}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{head}<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

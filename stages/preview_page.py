"""The page of a preview: one file that loads nothing and runs no script but its own, light and dark."""

import base64
import hashlib

from stages.page import render_page

STYLE = """
:root{--learnt:#b7e4c0;--on-learnt:#0b3d1b;--chip:#e4e7ec;--on-chip:#344054;--bubble:#eef1f6;--hatch:#d5dae3}
body{overflow-x:clip}
main{margin-top:16px}
h1 code{font-size:.8em;color:var(--soft);font-weight:500}
h2 code{font-size:14px;overflow-wrap:anywhere}
h2 small{color:var(--soft);font-weight:400;font-size:13px;margin-left:6px}
nav{position:sticky;top:0;z-index:3;display:flex;flex-wrap:wrap;gap:8px 12px;align-items:center;padding:8px 0;
background:var(--ground);font-size:14px}
nav button,nav select{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--line);
border-radius:8px;padding:5px 12px;max-width:100%}
nav output{color:var(--soft);font-variant-numeric:tabular-nums}
[hidden]{display:none!important}
.card{scroll-margin-top:60px}
.sample{display:grid;grid-template-columns:minmax(200px,36%) 1fr;gap:18px;align-items:start}
.sample.text{grid-template-columns:1fr}
.side{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:flex-end}
figure.shot{border:0;border-radius:0;overflow:visible;background:none;max-width:100%;min-width:176px}
.shot img{width:auto;height:auto;max-width:100%;max-height:70vh;min-width:min(120px,100%);background:#fff;
border:1px solid var(--line)}
.shot img.tiny{image-rendering:pixelated;width:176px}
.shot figcaption{width:0;min-width:100%;padding:6px 0 0;color:var(--soft);font-variant-numeric:tabular-nums}
.lost{padding:24px 12px;background:var(--bubble);color:var(--soft);font-size:13px}
.msg{max-width:min(94%,660px);margin:0 0 10px;padding:8px 12px;border-radius:12px 12px 12px 3px;
background:var(--bubble);width:fit-content}
.msg.assistant{margin-left:auto;border-radius:12px 12px 3px 12px}
.msg.learnt{background:var(--learnt);color:var(--on-learnt)}
.msg.system{max-width:100%;border:1px dashed var(--line);background:none}
.role{font-size:12px;opacity:.72}
.say{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext}
.chip{display:inline-flex;align-items:center;gap:5px;background:var(--chip);color:var(--on-chip);border-radius:9px;
padding:1px 8px;margin:1px 4px 1px 0;font-size:12px;vertical-align:middle;white-space:nowrap}
.chip img{height:26px;width:auto;max-width:60px;background:#fff}
.patched{position:relative;display:inline-block;line-height:0;max-width:100%}
.patched.tiny{width:176px}.patched.tiny img{width:100%;image-rendering:pixelated}
.patched svg{position:absolute;inset:1px;width:calc(100% - 2px);height:calc(100% - 2px);pointer-events:none}
.patched path{fill:none;stroke:#ff2f6d;vector-effect:non-scaling-stroke}
.patched .patches{stroke-width:.6;opacity:.4}.patched .blocks{stroke-width:1.3;opacity:.9}
.patched.fine .patches{opacity:.25}.patched.fine .blocks{stroke-width:1;opacity:.6}
.nogrid .patched svg{display:none}
.tokens{line-height:1.75;unicode-bidi:plaintext}
.tokens .given{color:var(--soft)}
.tokens .learnt{background:var(--learnt);color:var(--on-learnt);border-radius:3px}
.tokens i{font-style:normal;position:relative;border-radius:2px}
.tokens:hover i,.bounds .tokens i{box-shadow:inset 0 0 0 1px color-mix(in srgb,currentColor 24%,transparent)}
.tokens i:hover{background:var(--accent);color:#fff}
[data-t]:hover::after{content:attr(data-t);position:absolute;left:0;top:100%;z-index:5;background:#101828;color:#fff;
padding:2px 7px;border-radius:5px;font:12px/1.5 system-ui,sans-serif;white-space:pre;pointer-events:none}
.bin{margin:0 0 14px}
.bin p{margin:0 0 3px;font-size:13px;color:var(--soft);font-variant-numeric:tabular-nums}
.bin p b{color:var(--ink);font-weight:600}
.strip{display:flex;height:26px;border-radius:4px;background:repeating-linear-gradient(135deg,var(--hatch) 0 2px,
transparent 2px 7px);outline:1px solid var(--line)}
.strip.thin{height:9px;margin-top:3px}
.strip span{position:relative;flex:none;border-right:1px solid var(--paper);min-width:0}
.strip span:hover{filter:brightness(1.15);outline:2px solid var(--ink);z-index:4}
.strip span.right:hover::after{left:auto;right:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;margin:0 0 14px}
.legend span{display:inline-flex;align-items:center;gap:6px}
.legend i{width:14px;height:14px;border-radius:3px}
.legend i.pad{background:repeating-linear-gradient(135deg,var(--hatch) 0 2px,transparent 2px 7px);
outline:1px solid var(--line)}
details>summary{cursor:pointer;color:var(--soft);font-size:14px}
a{color:var(--accent)}
@media (max-width:720px){.sample{grid-template-columns:1fr}.shot img{max-height:52vh}}
@media (prefers-color-scheme:dark){
:root{color-scheme:dark;--ink:#e6e9ef;--soft:#98a1b3;--line:#333a48;--paper:#191d26;--ground:#11141b;--accent:#7d9cf0;
--learnt:#1f5a33;--on-learnt:#d6f5de;--chip:#323948;--on-chip:#d5dae3;--bubble:#252b37;--hatch:#3a4252}
.bar:hover{fill:#b8caff}.axis{stroke:#5d6678}figure img{background:#fff}
section svg[style]{filter:invert(.9) hue-rotate(180deg)}}
"""

_SCRIPT = """
(()=>{
const all=s=>[...document.querySelectorAll(s)],nav=document.querySelector('nav');
all('img[data-of]').forEach(i=>{i.src=document.getElementById(i.dataset.of).src});
if(!nav)return;
const pick=nav.querySelector('select'),count=nav.querySelector('output'),cards=all('[data-group]');
const shown=()=>cards.filter(c=>!c.hidden),top=c=>c.getBoundingClientRect().top-nav.offsetHeight-14;
const here=s=>s.reduce((found,c,i)=>top(c)<=1?i:found,-1);
const say=()=>{const s=shown();count.textContent=s.length?Math.max(here(s),0)+1+' of '+s.length:'none'};
const go=step=>{const s=shown(),to=Math.min(Math.max(here(s)+step,0),s.length-1);
if(s.length)window.scrollBy(0,top(s[to]));say()};
pick.onchange=()=>{cards.forEach(c=>{c.hidden=pick.value!==''&&c.dataset.group!==pick.value});say()};
all('nav button').forEach(b=>{b.onclick=()=>go(Number(b.value))});
all('nav input').forEach(b=>{b.onchange=()=>document.body.classList.toggle(b.value,b.checked!==b.defaultChecked)});
document.onkeydown=e=>{if(e.target===pick||e.altKey||e.ctrlKey||e.metaKey)return;
if(e.key==='ArrowRight'||e.key==='j')go(1);if(e.key==='ArrowLeft'||e.key==='k')go(-1)};
document.onscroll=say;say();
})();
"""
# Only this script runs and only what is inside the page is shown, whatever a hostile text might smuggle in.
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{_SCRIPT_HASH}'; "
    "base-uri 'none'; form-action 'none'"
)
_HEAD = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'


def preview_page(title: str, body: str) -> str:
    """The whole page.

    Args:
        title: plain text.
        body: trusted HTML: everything foreign in it has been escaped.
    """
    page = render_page(title, f"{body}\n<script>{_SCRIPT}</script>", style=STYLE, head=_HEAD)
    return page.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair, a page cannot


def walk_bar(groups: list[str], noun: str, toggles: str = "") -> str:
    """The bar with which cards (`data-group`) are filtered and stepped through.

    Args:
        groups: values of `data-group`, escaped.
        noun: what a group is, "subset".
        toggles: trusted HTML after it.
    """
    options = "".join(f'<option value="{group}">{group}</option>' for group in groups)
    return (
        f'<nav><select aria-label="{noun}"><option value="">every {noun}</option>{options}</select>'
        '<button value="-1">previous</button><button value="1">next</button><output></output>'
        f"{toggles}</nav>\n"
    )

"""The page: HTML around charts, with everything in it that it needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from html import escape
from importlib.resources import files

from plotly.offline import get_plotlyjs

from driftproof import __version__
from driftproof._text import printable
from driftproof.report.charts import Absent, Chart, Section, Table, Text
from driftproof.report.findings import CHECKS, GUIDE, Finding, Verdict
from driftproof.report.results import IN_SAMPLE
from driftproof.report.summary import Card

_LONGEST_LINE = 500
_SPANS = {0: "wide", 1: "", 2: "broad"}


def render(
    cards: Sequence[Card],
    verdicts: Sequence[Verdict],
    sections: Sequence[Section | Absent],
    notes: Sequence[str],
) -> str:
    """The whole file.

    Args:
        cards: Of runs.
        verdicts: What checks found in runs.
        sections: In their order; those that are absent become lines at the end.
        notes: Of what could not be read.
    """
    present = [section for section in sections if isinstance(section, Section)]
    absent = [section for section in sections if isinstance(section, Absent)]
    figures: list[Chart] = []
    body = "\n".join(_section(section, figures) for section in present)
    titles = ["Findings", *(section.title for section in present)]
    names = ", ".join(card.name for card in cards)
    style, script, library = _asset("page.css"), _asset("page.js"), get_plotlyjs()
    # Nothing is fetched, and of scripts only these two run, whatever names of runs and metrics contain.
    policy = (
        f"default-src 'none'; script-src {_digest(library)} {_digest(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_shown(names)} · driftproof</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="brand">driftproof report</p>
<h1>{_shown(names) if len(cards) == 1 else f"{len(cards)} runs"}</h1>
<div class="cards">
{"".join(_card(card, is_alone=len(cards) == 1) for card in cards)}
</div>
<nav aria-label="Sections">{"".join(f'<a href="#{_slug(title)}">{_shown(title)}</a>' for title in titles)}</nav>
<p class="note">Horizontal axes count the environment steps of one agent, unless they say otherwise.</p>
</header>
<main>
<noscript><p class="note">The charts need JavaScript, which is in this file.</p></noscript>
{_verdicts(verdicts, titles)}
{body}
</main>
<footer>
{_footnotes(absent, notes)}
<p>Written by driftproof {_shown(__version__)}.</p>
</footer>
<script type="application/json" id="figures">{_json([chart.figure() for chart in figures])}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def _card(card: Card, is_alone: bool) -> str:
    facts = "".join(
        f"<div><dt>{_shown(name)}</dt>"
        f'<dd>{_shown(value)}<small class="word{_alarm(word)}">{_shown(word)}</small></dd></div>'
        for name, value, word in card.facts
    )
    dot = f'<span class="dot" style="background:var(--{card.colour.removeprefix("@")})"></span>'
    title = "" if is_alone else f"<h2>{dot}{_shown(card.name)}</h2>"
    lines = "".join(f"<li><b>{_shown(name)}</b> {_shown(text)}</li>" for name, text in card.lines)
    origin = f'<ul class="origin">{lines}</ul>' if lines else ""
    return f'<section class="card">{title}<dl>{facts}</dl>{origin}</section>'


def _verdicts(verdicts: Sequence[Verdict], titles: Collection[str]) -> str:
    """The block of findings."""
    counts = Counter(finding.severity for verdict in verdicts for finding in verdict.findings)
    told = ", ".join(f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items())
    done = [len(verdict.findings) + len(verdict.passed) for verdict in verdicts]
    most = f"{max(done, default=0)} of {len(CHECKS)} checks could be made"
    lead = f"{most}: {told or 'nothing looks wrong'}."
    body = "".join(_verdict(verdict, titles, is_alone=len(verdicts) == 1) for verdict in verdicts)
    return f'<section id="findings"><h2>Findings</h2><p class="lead">{lead}</p>{body}</section>'


def _verdict(verdict: Verdict, titles: Collection[str], is_alone: bool) -> str:
    title = "" if is_alone else f"<h3>{_shown(verdict.name)}</h3>"
    found = "".join(_finding(each, titles) for each in verdict.findings)
    items = f'<ul class="findings">{found}</ul>' if found else ""
    others = (("In order", verdict.passed), ("Not checked, as too little was logged", verdict.unchecked))
    notes = "".join(f'<p class="note">{how}: {_shown(", ".join(names))}.</p>' for how, names in others if names)
    return f"{title}{items}{notes}"


def _finding(finding: Finding, titles: Collection[str]) -> str:
    where = f'<a href="#{_slug(finding.section)}">{_shown(finding.section)}</a> · ' if finding.section in titles else ""
    return (
        f'<li class="{finding.severity}"><h4><span class="badge">{finding.severity}</span>{_shown(finding.title)}</h4>'
        f"<p>{_shown(finding.evidence)}</p>"
        f'<p class="threshold">Normal: {_shown(finding.threshold)}. {_shown(finding.remedy)}</p>'
        f'<p class="threshold">{where}<code>{GUIDE}#{finding.anchor}</code></p></li>'
    )


def _section(section: Section, figures: list[Chart]) -> str:
    parts = []
    for part in section.parts:
        if isinstance(part, Chart):
            figures.append(part)
            parts.append(_chart(part, len(figures) - 1))
        else:
            parts.append(_table(part) if isinstance(part, Table) else _text(part))
    notes = "".join(f'<p class="note">{_shown(note)}</p>' for note in section.notes)
    labels = "".join(f'<p class="label{_alarm(text)}">{_shown(text)}</p>' for text in section.labels)
    columns = section.columns or _columns(section)
    return (
        f'<section id="{_slug(section.title)}"><h2>{_shown(section.title)}</h2>'
        f'<p class="lead">{_shown(section.lead)}</p>{labels}'
        f'<div class="grid" style="--columns:{columns}">{"".join(parts)}</div>{notes}</section>'
    )


def _columns(section: Section) -> int:
    """Three, unless another number leaves fewer places empty."""
    if any(isinstance(part, Chart) and part.span == 2 for part in section.parts):
        return 3
    charts = sum(isinstance(part, Chart) and part.span == 1 for part in section.parts)
    if charts in (2, 4):
        return 2
    return 4 if charts > 6 and -charts % 4 < -charts % 3 else 3


def _chart(chart: Chart, index: int) -> str:
    choice = ""
    if len(chart.choices) > 1:
        options = "".join(f'<option value="{i}">{_shown(name)}</option>' for i, name in enumerate(chart.choices))
        choice = f'<label>Show <select data-for="{index}">{options}</select></label>'
    caption = f"<p>{_shown(chart.caption)}</p>" if chart.caption else ""
    return (
        f'<figure class="panel {_SPANS[chart.span]}"><figcaption><h3>{_shown(chart.title)}</h3>{caption}{choice}'
        "</figcaption>"
        f'<div class="chart" data-figure="{index}" role="img" aria-label="{_shown(chart.title)}" '
        f'style="--height:{chart.height}px"></div></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_shown(name)}</th>' for name in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    caption = f"<p>{_shown(table.caption)}</p>" if table.caption else ""
    return (
        f'<div class="panel {_SPANS[table.span]}"><h3{_title_style(table.title)}>{_shown(table.title)}</h3>{caption}'
        f'<div class="scroll" tabindex="0"><table class="{"texts" if table.is_text else "numbers"}">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
    )


def _text(text: Text) -> str:
    return (
        f'<details class="panel wide"><summary>{_shown(text.title)}</summary>'
        f'<pre tabindex="0">{_shown(text.text)}</pre></details>'
    )


def _title_style(title: str) -> str:
    return ' class="in-sample"' if IN_SAMPLE in title else ""


def _alarm(text: str) -> str:
    """The style of a label; that of numbers which training saw is red."""
    return " in-sample" if IN_SAMPLE in text else ""


def _footnotes(absent: Sequence[Absent], notes: Sequence[str]) -> str:
    lines = [f"{section.title}: {section.reason}." for section in absent] + [f"{note}." for note in notes]
    if not lines:
        return ""
    return f"<h2>Absent</h2><ul>{''.join(f'<li>{_shown(line)}</li>' for line in lines)}</ul>"


def _shown(text: str) -> str:
    """Text of others, which neither markup nor control characters make more than that."""
    return "\n".join(escape(printable(line, _LONGEST_LINE)) for line in text.split("\n"))


def _json(value: object) -> str:
    """JSON that cannot end the element that it is in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("driftproof.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _slug(title: str) -> str:
    return re.sub("[^a-z]+", "-", title.lower())

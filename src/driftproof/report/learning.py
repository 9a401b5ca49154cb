"""Section about what agents achieve while they learn."""

from __future__ import annotations

from collections.abc import Sequence

from driftproof.report.bundles import Bundle, curves, shaded
from driftproof.report.charts import TITLED_STEPS, Absent, Chart, Section, Trace, line
from driftproof.report.drift import marks
from driftproof.report.signs import EPISODES, chart_of
from driftproof.runs import RETURN


def learning(bundles: Sequence[Bundle]) -> Section | Absent:
    """Returns, and what else tells how well agents do."""
    title = "Learning"
    data = curves(bundles, RETURN)
    if not any(y is not None for trace in data for y in trace["y"]):
        return Absent(title, f"no return was logged ({RETURN}): no episode has ended yet")
    caption = "Mean return of the latest episodes of training."
    best = _best_members(bundles)
    if best:
        caption += " Line: median of members; band: the middle 80 % of them; dotted: the best one in the end."
    if any(len(bundle.runs) > 1 for bundle in bundles):
        caption += " Runs that differ in their seed only are one line, their median, and a band, the middle 80 %."
    layout = shaded(bundles, numbered=True)
    if layout:
        caption += " Every other phase of the drift is shaded; its number is at the top."
    marked = marks(bundles)
    if marked:
        caption += " Marks: what agents noticed of the drift, and did about it; hover to read."
    more = [chart for sign in EPISODES for chart in chart_of(sign, bundles)]
    layout |= {"xaxis": TITLED_STEPS}
    returns = Chart("Return", caption, [*data, *best, *marked], layout, height=380, span=2 if len(more) == 1 else 0)
    return Section(title, "How well the agents do as they learn.", [returns, *more])


def _best_members(bundles: Sequence[Bundle]) -> list[Trace]:
    """A dotted line for each population."""
    traces = []
    for bundle in bundles:
        run = bundle.runs[0]
        if run.is_population:
            x, y = run.members[run.best].column(RETURN)
            group = {"legendgroup": bundle.name, "showlegend": False}
            traces.append(line(x, y, f"member {run.best}", bundle.colour, width=1.5, dash="dot", **group))
    return traces

"""Draws sGPO's plan: the group size for each success rate, and the queries that each phase serves."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from style import INK, PALE, PHASES, new_figure, save

import d3s_kernels as d3s

SAMPLES = 8
FINE = 2000  # samples for the smooth lines
# The successes of each query, hard queries first, similar to a profile of a small model.
QUERIES = torch.tensor([0] * 10 + [1] * 6 + [2] * 5 + [3] * 4 + [4] * 4 + [5] * 3 + [6] * 3 + [7] * 2 + [8] * 3)


def draw_plan(path: Path) -> None:
    figure = new_figure(5.2)
    sizes, phases = figure.subplots(2, 1, height_ratios=(3, 1.5))
    draw_sizes(sizes)
    plan = d3s.plan_rollouts(QUERIES, SAMPLES)
    draw_phases(phases, plan)
    served = [f"phase {phase}: {plan.queries(phase).tolist()}" for phase in range(len(plan.phase_sizes))]
    save(figure, path, "\n".join([f"sizes: {plan.group_size.tolist()}", *served]))


def draw_sizes(axes: Axes) -> None:
    fine = torch.arange(1, FINE + 1)
    rates = (fine / FINE).tolist()
    for rule, style in (("inverse_success_rate", ":"), ("buckets", "-")):
        found = d3s.plan_rollouts(fine, FINE, rule=rule).group_size.tolist()
        shown = [(rate, size) for rate, size in zip(rates, found, strict=True) if size > 0]
        axes.plot(*zip(*shown, strict=True), style, color=INK, linewidth=1.2, label=f'rule="{rule}"')
    plan = d3s.plan_rollouts(torch.arange(SAMPLES + 1), SAMPLES)
    for successes, (size, phase) in enumerate(zip(plan.group_size.tolist(), plan.phase.tolist(), strict=True)):
        if phase >= 0:
            axes.plot(successes / SAMPLES, size, "o", color=PHASES[phase], markersize=9)
            beside = (-24, -14) if size > 2 else (0, -17)  # does not overlap the lines
            place = successes / SAMPLES, size
            axes.annotate(f"{successes} of {SAMPLES}", place, beside, textcoords="offset points", ha="center")
    axes.axvspan(0.75, 1.02, color=PALE, alpha=0.35, linewidth=0)
    axes.text(0.885, 5, "trivial:\nnot trained on", ha="center", va="center")
    axes.axvspan(-0.035, 0, color=PALE, alpha=0.35, linewidth=0)
    axes.text(0.012, 1.05, "p = 0: a random 10 % is kept, for every phase", va="bottom")
    axes.set(xlabel="p, successes of the initial policy / samples", ylabel="rollouts of a group")
    axes.set(xlim=(-0.035, 1.02), ylim=(0.8, 9), yticks=[2, 4, 6, 8])
    axes.legend(loc="upper right", bbox_to_anchor=(0.72, 1), frameon=False)


def draw_phases(axes: Axes, plan: d3s.RolloutPlan) -> None:
    """Draws a row for each phase, with a coloured cell for each query that it serves."""
    for phase, size in enumerate(plan.phase_sizes):
        served = plan.queries(phase).tolist()
        for query in range(len(QUERIES)):
            colour = PHASES[phase] if query in served else "#f2f2f2"
            axes.add_patch(Rectangle((query + 0.06, phase + 0.08), 0.88, 0.84, facecolor=colour, linewidth=0))
            if query in served:
                axes.text(query + 0.5, phase + 0.52, size, ha="center", va="center", color="white", fontsize=7)
    axes.set(xlim=(0, len(QUERIES)), ylim=(len(plan.phase_sizes), 0))
    axes.set_yticks([phase + 0.5 for phase in range(len(plan.phase_sizes))])
    axes.set_yticklabels([f"phase {phase}" for phase in range(len(plan.phase_sizes))])
    axes.set_xticks([query + 0.5 for query in range(len(QUERIES))], QUERIES.tolist())
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(
        f"queries, by their successes of {SAMPLES}; a cell is a query that the phase serves, with its rollouts"
    )

"""Colours and matplotlib settings of all pictures; imports nothing, so that it costs nothing."""

BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#d1701f", "#2e8b57", "#b8323f", "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, RED, "#7a4fa3", "#128a9b", "#a07d1c", "#c2528b")
"""Of several runs in one picture, in order."""
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e4e6ea",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": "#444",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
}

"""Pictures and pages of a run.

report.py    RUN/report.html (one file, opens offline) and RUN/reward.png      charts.py  its pictures, from rows
trace.py     `megarl trace`: where the time of the last steps went, from RUN/trace, for Perfetto
"""

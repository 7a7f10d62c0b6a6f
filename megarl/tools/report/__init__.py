"""Pictures and pages about a run.

report.py    RUN/report.html (one file, opens offline) and RUN/reward.png
charts.py    the report's pictures
trace.py     `megarl trace`: where the time of the last steps went, from RUN/trace, for
             Perfetto
"""

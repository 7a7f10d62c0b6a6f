"""The grader `math`: whether an answer in prose or LaTeX equals the expected one.

    the policy's answer ─► locate.py: what states it ─► reader.py ─┐
    the data set's answer ────────────────────────────► reader.py ─┤
                                                                   ▼
                compare.py: equal? ◄─ question.py: may it count? ◄─┘

A text is read whole or not at all: layout.py puts it into one spelling, tokens.py
splits it into tokens, cursor.py moves over them, expressions.py reads formulas
(formulas.py), units.py their units, and reader.py answers of all kinds (kinds.py).
names.py has the closed lists of functions, units and words. What cannot be read equals
only the same text (readings.py). answers.py says what one answer is by itself,
compare.py compares two. Formulas are compared by their values: equality.py with
evaluation.py, sets of real numbers with realsets.py. boxes.py finds the boxes of an
answer and the formulas around them; question.py has all that a prompt says about its
answers, and values.py tells results from what is left to compute. grading.py puts these
together.
"""

from megarl.tasks.graders.math.grading import is_equal, readable
from megarl.tasks.graders.math.locate import has_complete_answer

__all__ = ["has_complete_answer", "is_equal", "readable"]

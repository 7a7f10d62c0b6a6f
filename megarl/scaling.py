"""What a notebook imports (docs/how-to/scaling.md), such as `from megarl.scaling.fit
import fit`: modules of megarl/predict/scaling/.
"""

import sys

from megarl.predict.scaling import extrapolate, fit, points

for _module in (extrapolate, fit, points):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

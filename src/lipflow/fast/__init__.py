"""What runs faster than its formula: chains of Convex Potential Layers as one function, power iterations as one.

It knows operators only. `lipflow.Sequential` uses it; the formulas are in `lipflow.flows`.
"""

from lipflow.fast.descent import Layer, NormStep, descend
from lipflow.fast.joint_power_iteration import joint_power_iteration

__all__ = ["Layer", "NormStep", "descend", "joint_power_iteration"]

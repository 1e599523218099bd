"""Fast implementations: chains of Convex Potential Layers as one function, and joint power iterations.

They depend on operators only. `lipflow.Sequential` uses them. The formulas are in `lipflow.flows`.
"""

from lipflow.fast.descent import Layer, NormStep, descend
from lipflow.fast.joint_power_iteration import joint_power_iteration

__all__ = ["Layer", "NormStep", "descend", "joint_power_iteration"]
